// libcuda.so.1 without a GPU: what Allfold uses of CUDA's driver, for tests with real processes.
//
// The addresses of device memory are none that a CPU can use: host code that touches them crashes,
// as it does with a real GPU. What processes share of it (cuMemCreate) is a memfd, and that is what
// its file descriptors stand for. Every stream is a thread that dawdles before each operation, so
// that a wait that is missing shows as wrong data. What the driver's documentation leaves open is
// answered in the way that hides least: who unmaps memory that is in use has spoiled the process.
//
// Known differences: the budget of memory is that of one process, so memory of others costs
// nothing; an error sticks to the whole process and not to one context; what cuMemCreate has made
// is mapped from its beginning, to all of what was reserved, and access is given to all of it;
// only primary contexts, no graphs, no handles of cuIpc.
// Settings are read from the environment when the library is first used; __init__.py names them.

#include "driver/devices_api.h"
#include "driver/streams_api.h"
#include "driver/memory_api.h"
#include "driver/mappings_api.h"
#include "driver/kernels_api.h"
#include "driver/errors_api.h"
