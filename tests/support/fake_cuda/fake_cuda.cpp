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

#include <dlfcn.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

extern char** environ;

// ---- The driver's types and numbers, as cuda.h has them -----------------------------------------

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using Handle = void*;  // CUcontext, CUstream, CUevent, CUmodule and CUfunction

#define API extern "C" __attribute__((visibility("default"))) CUresult

#define RESULTS(X)                                                        \
    X(SUCCESS, 0, "no error")                                             \
    X(ERROR_INVALID_VALUE, 1, "invalid argument")                         \
    X(ERROR_OUT_OF_MEMORY, 2, "out of memory")                            \
    X(ERROR_NOT_INITIALIZED, 3, "initialization error")                   \
    X(ERROR_NO_DEVICE, 100, "no CUDA-capable device is detected")         \
    X(ERROR_INVALID_DEVICE, 101, "invalid device ordinal")                \
    X(ERROR_INVALID_IMAGE, 200, "device kernel image is invalid")         \
    X(ERROR_INVALID_CONTEXT, 201, "invalid device context")               \
    X(ERROR_MAP_FAILED, 205, "mapping of buffer object failed")           \
    X(ERROR_PEER_ACCESS_UNSUPPORTED, 217,                                 \
      "peer access is not supported between these two devices")           \
    X(ERROR_INVALID_HANDLE, 400, "invalid resource handle")               \
    X(ERROR_NOT_FOUND, 500, "named symbol not found")                     \
    X(ERROR_NOT_READY, 600, "device not ready")                           \
    X(ERROR_ILLEGAL_ADDRESS, 700, "an illegal memory access was encountered") \
    X(ERROR_PEER_ACCESS_ALREADY_ENABLED, 704, "peer access is already enabled") \
    X(ERROR_CONTEXT_IS_DESTROYED, 709, "context is destroyed")            \
    X(ERROR_HOST_MEMORY_ALREADY_REGISTERED, 712,                          \
      "part or all of the requested memory range is already mapped")      \
    X(ERROR_HOST_MEMORY_NOT_REGISTERED, 713,                              \
      "pointer does not correspond to a registered memory region")        \
    X(ERROR_NOT_PERMITTED, 800, "operation not permitted")                \
    X(ERROR_NOT_SUPPORTED, 801, "operation not supported")

enum : CUresult {
#define RESULT_NUMBER(name, number, text) name = number,
    RESULTS(RESULT_NUMBER)
};

// ---- Settings -----------------------------------------------------------------------------------

static long number_setting(const char* name, long otherwise) {
    const char* text = getenv(name);
    return text && *text ? strtol(text, nullptr, 10) : otherwise;
}

static bool word_setting(const char* name, const char* word) {
    const char* text = getenv(name);
    return text && !strcmp(text, word);
}

struct Settings {
    int devices = static_cast<int>(number_setting("FAKE_CUDA_DEVICES", 1));
    bool peers = !word_setting("FAKE_CUDA_PEERS", "none");
    bool ipc = number_setting("FAKE_CUDA_IPC", 1);
    bool may_register = number_setting("FAKE_CUDA_REGISTER", 1);
    bool words = number_setting("FAKE_CUDA_STREAM_WORDS", 1);
    size_t memory = static_cast<size_t>(number_setting("FAKE_CUDA_MEMORY_MB", 4096)) << 20;
    long delay_us = number_setting("FAKE_CUDA_DELAY_US", 200);
    long seed = number_setting("FAKE_CUDA_SEED", std::random_device()() & 0x7fffffff);
    long hang_after = number_setting("FAKE_CUDA_HANG_DEVICE_AFTER", -1);
};

using Uuid = unsigned char[16];

static void uuid_of(int physical, Uuid& uuid) {
    static const Uuid all = {0xfa, 0x4e, 0xc0, 0xda, 0, 0, 0x40, 0, 0x80, 0, 0, 0, 0, 0, 0, 0};
    memcpy(uuid, all, sizeof all);
    uuid[15] = static_cast<unsigned char>(physical);
}

// As the real driver does, what comes behind an unknown device is not seen. UUIDs are not known.
static std::vector<int> visible_devices(int devices) {
    std::vector<int> visible;
    const char* text = getenv("CUDA_VISIBLE_DEVICES");
    if (!text) {
        for (int device = 0; device < devices; ++device) visible.push_back(device);
        return visible;
    }
    std::istringstream names(text);
    for (std::string name; std::getline(names, name, ',');) {
        char* end = nullptr;
        const long device = strtol(name.c_str(), &end, 10);
        if (name.empty() || *end || device < 0 || device >= devices) break;
        visible.push_back(int(device));
    }
    return visible;
}

// ---- What there is ------------------------------------------------------------------------------

using Lock = std::unique_lock<std::mutex>;

struct Stream;
struct Context;

// A point in the work of a stream: reached when so many operations are done.
struct Point {
    std::shared_ptr<Stream> stream;
    uint64_t number = 0;
};

struct Operation {
    std::function<CUresult()> work;  // runs without the lock
    std::vector<Point> after;
};

struct Stream {
    Context* context;
    bool blocking;  // has an order with the legacy default stream
    std::mt19937 dawdling;
    std::deque<Operation> queue;
    uint64_t given = 0, done = 0;
    bool closed = false;
};

struct Event {
    Context* context;
    Point point;  // without a stream: never recorded
};

// Memory that has no address yet, or several: cuMemCreate's. Destroyed with the driver's lock held.
struct Physical {
    int fd;
    size_t size;
    int device;    // physical
    bool counted;  // as memory of this process
    bool shareable;

    Physical(int fd, size_t size, int device, bool counted, bool shareable)
        : fd(fd), size(size), device(device), counted(counted), shareable(shareable) {}
    Physical(const Physical&) = delete;
    void close_file();
    ~Physical();
};

// Memory that has an address in this process.
struct Allocation {
    char* base;
    size_t size;
    int device = 0;  // physical
    // Of cuMemAlloc:
    Context* context = nullptr;
    void* mapping = nullptr;  // with the pages around it
    size_t mapped = 0;
    // Of cuMemMap:
    std::shared_ptr<Physical> physical;
    std::set<int> users;    // physical devices, of cuMemSetAccess
    bool unmapped = false;  // what still runs there ends first

    ~Allocation() {
        if (mapping) munmap(mapping, mapped);
    }
};

struct Reserved {
    char* base;
    size_t size;
};

struct HostRange {
    size_t size;
    int ordinal;
};

struct Module {
    Context* context;
    std::string image;
};

struct Function {
    std::shared_ptr<Module> module;
    void (*run)(unsigned grid, unsigned block, const void* arguments);
    size_t arguments;
};

struct Context {
    int ordinal;   // in this process
    int physical;  // on this machine
    Handle handle = nullptr;
    int retained = 0;
    std::shared_ptr<Stream> legacy;
    std::vector<std::shared_ptr<Stream>> streams;  // until they are drained, legacy among them
    std::set<int> peers;                           // physical devices whose memory kernels may use
};

// Handles are numbers that are never used twice, so that a stale one is always known as such.
static Handle new_handle() {
    static std::atomic<uintptr_t> last{0xfacade000000};
    return reinterpret_cast<Handle>(last += 16);
}

template <typename T>
class Table {
  public:
    Handle add(std::shared_ptr<T> what) {
        const Handle handle = new_handle();
        live_[handle] = std::move(what);
        return handle;
    }

    std::shared_ptr<T> find(Handle handle) const {
        const auto found = live_.find(handle);
        return found == live_.end() ? nullptr : found->second;
    }

    bool remove(Handle handle) { return live_.erase(handle) > 0; }

    void remove_where(const std::function<bool(const T&)>& condition) {
        for (auto each = live_.begin(); each != live_.end();)
            each = condition(*each->second) ? live_.erase(each) : std::next(each);
    }

  private:
    std::unordered_map<Handle, std::shared_ptr<T>> live_;
};

struct Driver {
    std::mutex mutex;  // of everything below
    std::condition_variable changed;
    Settings settings;
    std::atomic<bool> initialised{false};
    CUresult sticky = SUCCESS;
    long executed = 0;
    unsigned streams_made = 0;
    std::vector<std::shared_ptr<Context>> contexts;  // by ordinal
    Table<Context> context_handles;
    Table<Stream> streams;
    Table<Event> events;
    Table<Module> modules;
    Table<Function> functions;
    std::map<CUdeviceptr, std::shared_ptr<Allocation>> allocations;
    Table<Physical> physical;
    std::map<CUdeviceptr, Reserved> reserved;
    std::map<uintptr_t, HostRange> registered;
    std::map<int, size_t> used;  // bytes by physical device
};

// Never destroyed: the threads of streams run until the process has gone.
static Driver& driver() {
    static Driver* const only = new Driver;
    return *only;
}

static thread_local std::vector<Context*> current;

static CUresult work_in_context(const std::function<CUresult(Lock&, Context&)>& work) {
    Driver& all = driver();
    if (!all.initialised) return ERROR_NOT_INITIALIZED;
    Lock held(all.mutex);
    if (all.sticky) return all.sticky;
    if (current.empty()) return ERROR_INVALID_CONTEXT;
    if (!current.back()->retained) return ERROR_CONTEXT_IS_DESTROYED;
    return work(held, *current.back());
}

// The device's number in this process, or -1 where it sees none of this physical number.
static int ordinal_of(int physical) {
    for (const auto& context : driver().contexts)
        if (context->physical == physical) return context->ordinal;
    return -1;
}

static Context* context_of(CUdevice device) {
    const auto& contexts = driver().contexts;
    return device >= 0 && device < int(contexts.size()) ? contexts[size_t(device)].get() : nullptr;
}

// ---- Streams ------------------------------------------------------------------------------------

static bool reached(const Point& point) {
    return !point.stream || point.stream->done >= point.number;
}

// Wait until a point is reached; what hangs on a GPU hangs here as well.
static CUresult wait_for(Lock& held, const std::vector<Point>& points) {
    Driver& all = driver();
    all.changed.wait(held, [&] {
        return all.sticky || std::all_of(points.begin(), points.end(), reached);
    });
    return all.sticky;
}

// The thread of a stream. Once an error sticks, nothing is executed any more, but all is done.
static void run_stream(std::shared_ptr<Stream> stream) {
    Driver& all = driver();
    std::uniform_int_distribution<long> delay(0, std::max(0L, all.settings.delay_us));
    Lock held(all.mutex);
    for (;;) {
        all.changed.wait(held, [&] { return !stream->queue.empty() || stream->closed; });
        if (stream->queue.empty()) break;
        Operation operation = std::move(stream->queue.front());
        stream->queue.pop_front();
        wait_for(held, operation.after);
        const long hang_after = all.settings.hang_after;
        if (hang_after >= 0 && all.executed >= hang_after)
            all.changed.wait(held, [] { return false; });
        ++all.executed;
        if (!all.sticky) {
            const long microseconds = delay(stream->dawdling);
            held.unlock();
            if (microseconds) std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
            const CUresult result = operation.work ? operation.work() : SUCCESS;
            operation = {};
            held.lock();
            if (result && !all.sticky) all.sticky = result;
        }
        ++stream->done;
        all.changed.notify_all();
    }
    auto& streams = stream->context->streams;
    streams.erase(std::remove(streams.begin(), streams.end(), stream), streams.end());
}

static std::shared_ptr<Stream> make_stream(Context& context, bool blocking) {
    Driver& all = driver();
    auto stream = std::make_shared<Stream>();
    stream->context = &context;
    stream->blocking = blocking;
    stream->dawdling.seed(static_cast<unsigned>(all.settings.seed) + 7919 * all.streams_made++);
    context.streams.push_back(stream);
    std::thread(run_stream, stream).detach();
    return stream;
}

static void close_stream(Stream& stream) {
    stream.closed = true;
    driver().changed.notify_all();
}

// The stream of a handle; 0 and 1 are the legacy default stream, 2 is that of this thread.
static std::shared_ptr<Stream> stream_of(Context& context, Handle handle) {
    static thread_local std::map<Context*, Handle> of_this_thread;
    Driver& all = driver();
    if (reinterpret_cast<uintptr_t>(handle) <= 1) return context.legacy;
    if (reinterpret_cast<uintptr_t>(handle) > 2) return all.streams.find(handle);
    Handle& own = of_this_thread[&context];
    if (!all.streams.find(own)) own = all.streams.add(make_stream(context, true));
    return all.streams.find(own);
}

// Give a stream something to do. The legacy default stream waits for all blocking streams of its
// context, and they wait for it.
static Point push(const std::shared_ptr<Stream>& stream, std::function<CUresult()> work,
                  std::vector<Point> after = {}) {
    Context& context = *stream->context;
    if (stream == context.legacy) {
        for (const auto& other : context.streams)
            if (other->blocking && other != stream) after.push_back({other, other->given});
    } else if (stream->blocking) {
        after.push_back({context.legacy, context.legacy->given});
    }
    stream->queue.push_back({std::move(work), std::move(after)});
    ++stream->given;
    driver().changed.notify_all();
    return {stream, stream->given};
}

static std::vector<Point> all_work_of(const Context& context) {
    std::vector<Point> points;
    for (const auto& stream : context.streams) points.push_back({stream, stream->given});
    return points;
}

// ---- Memory -------------------------------------------------------------------------------------

// Device addresses are a process's own addresses with these bits, which no mapping can have. Part
// of them is the process's number: an address of another process is no address here.
static const CUdeviceptr DEVICE_TAG = 0xd0ULL << 48;
static const CUdeviceptr TAG_MASK = 0xfff0ULL << 48;
static const size_t GRANULE = 2 << 20;
static const size_t ALIGNMENT = 256;

static bool is_device_address(CUdeviceptr address) { return (address & TAG_MASK) == DEVICE_TAG; }

static CUdeviceptr device_address(const void* address) {
    const CUdeviceptr tag = DEVICE_TAG | (static_cast<CUdeviceptr>(getpid() & 0xf) << 48);
    return tag + reinterpret_cast<uintptr_t>(address);
}

static size_t rounded(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

static const int NO_MEMORY = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
static const int READABLE = PROT_READ | PROT_WRITE;

// New memory between two pages that nobody may touch. Its end lies at the end of a page: what a
// kernel reads or writes behind it crashes.
static std::shared_ptr<Allocation> new_memory(size_t size) {
    const size_t page = size_t(sysconf(_SC_PAGESIZE)), bytes = rounded(size, page);
    void* around = mmap(nullptr, bytes + 2 * page, PROT_NONE, NO_MEMORY, -1, 0);
    if (around == MAP_FAILED) return nullptr;
    char* inside = static_cast<char*>(around) + page;
    if (mprotect(inside, bytes, READABLE)) {
        munmap(around, bytes + 2 * page);
        return nullptr;
    }
    auto made = std::make_shared<Allocation>();
    made->base = inside + bytes - rounded(size, ALIGNMENT);
    made->size = size;
    made->mapping = around;
    made->mapped = bytes + 2 * page;
    return made;
}

// The live allocation that all of a range lies in.
static std::shared_ptr<Allocation> allocation_at(CUdeviceptr address, size_t size) {
    const auto& allocations = driver().allocations;
    auto next = allocations.upper_bound(address);
    if (next == allocations.begin()) return nullptr;
    const auto& [base, found] = *std::prev(next);
    const size_t offset = address - base;
    const bool inside = offset < found->size && size <= found->size - offset;
    return inside && !found->unmapped ? found : nullptr;
}

struct Place {
    enum Kind { INVALID, DEVICE, PINNED, PAGEABLE } kind = INVALID;
    char* at = nullptr;
    std::shared_ptr<Allocation> memory;  // stays mapped as long as somebody has this
};

static Place place_of(CUdeviceptr address, size_t size) {
    if (is_device_address(address)) {
        const auto found = allocation_at(address, size);
        if (!found) return {};
        return {Place::DEVICE, found->base + (address - device_address(found->base)), found};
    }
    Place::Kind kind = Place::PAGEABLE;
    for (const auto& [base, range] : driver().registered) {
        if (base <= address && address + size <= base + range.size) kind = Place::PINNED;
        else if (base < address + size && address < base + range.size) return {};  // in part
    }
    return {address ? kind : Place::INVALID, reinterpret_cast<char*>(address), nullptr};
}

static bool may_access(const Context& context, const Allocation& memory) {
    if (memory.physical) return memory.users.count(context.physical);
    return memory.device == context.physical || context.peers.count(memory.device);
}

// What a stream or a kernel of a context may read and write.
static bool reaches(const Context& context, const Place& place) {
    return place.kind == Place::PINNED ||
           (place.kind == Place::DEVICE && may_access(context, *place.memory));
}

// Use places without the lock. They must be let go of with it: hence no copy of them here.
static CUresult use(Lock& held, const std::vector<Place>& places,
                    const std::function<void()>& work) {
    held.unlock();
    work();
    held.lock();
    for (const auto& place : places)
        if (place.memory && place.memory->unmapped) return ERROR_ILLEGAL_ADDRESS;
    return SUCCESS;
}

// What kind of memory a copy has to do with; INVALID where the context may not copy it. What comes
// from cuMemAlloc may always be copied.
static Place::Kind copied_kind(const Context& context, const Place& place) {
    const bool mapped = place.memory && place.memory->physical;
    return mapped && !may_access(context, *place.memory) ? Place::INVALID : place.kind;
}

static CUresult copy(Lock& held, const std::shared_ptr<Stream>& stream, CUdeviceptr target,
                     CUdeviceptr source, size_t size, bool synchronous) {
    if (!stream) return ERROR_INVALID_HANDLE;
    if (!size) return SUCCESS;
    const Context& context = *stream->context;
    const Place::Kind kinds[2] = {copied_kind(context, place_of(target, size)),
                                  copied_kind(context, place_of(source, size))};
    if (!kinds[0] || !kinds[1]) return ERROR_INVALID_VALUE;
    const Point end = push(stream, [=, &context]() -> CUresult {
        Lock looking(driver().mutex);
        const std::vector<Place> places = {place_of(target, size), place_of(source, size)};
        for (const size_t each : {0, 1})
            if (copied_kind(context, places[each]) != kinds[each]) return ERROR_ILLEGAL_ADDRESS;
        return use(looking, places, [&] { memmove(places[0].at, places[1].at, size); });
    });
    // The driver stages pageable memory; only page-locked memory is copied asynchronously.
    const bool staged = kinds[0] == Place::PAGEABLE || kinds[1] == Place::PAGEABLE;
    return synchronous || staged ? wait_for(held, {end}) : SUCCESS;
}

// ---- The driver's calls: devices and contexts ---------------------------------------------------

API cuInit(unsigned flags) {
    Driver& all = driver();
    Lock held(all.mutex);
    if (flags) return ERROR_INVALID_VALUE;
    if (all.initialised) return SUCCESS;
    for (const int physical : visible_devices(all.settings.devices)) {
        auto context = std::make_shared<Context>();
        context->ordinal = int(all.contexts.size());
        context->physical = physical;
        context->handle = all.context_handles.add(context);
        all.contexts.push_back(context);
    }
    all.initialised = !all.contexts.empty();
    return all.initialised ? SUCCESS : ERROR_NO_DEVICE;
}

API cuDriverGetVersion(int* version) {
    *version = 12090;
    return SUCCESS;
}

static CUresult about_device(CUdevice device, const std::function<CUresult(Context&)>& work) {
    if (!driver().initialised) return ERROR_NOT_INITIALIZED;
    Lock held(driver().mutex);
    Context* context = context_of(device);
    return context ? work(*context) : ERROR_INVALID_DEVICE;
}

API cuDeviceGetCount(int* count) {
    if (!driver().initialised) return ERROR_NOT_INITIALIZED;
    *count = int(driver().contexts.size());
    return SUCCESS;
}

API cuDeviceGet(CUdevice* device, int ordinal) {
    return about_device(ordinal, [&](Context&) { return *device = ordinal, SUCCESS; });
}

API cuDeviceGetName(char* name, int length, CUdevice device) {
    return about_device(device, [&](Context& context) {
        snprintf(name, size_t(length), "Fake GPU %d", context.physical);
        return SUCCESS;
    });
}

API cuDeviceGetUuid_v2(Uuid* uuid, CUdevice device) {
    return about_device(device, [&](Context& context) {
        return uuid_of(context.physical, *uuid), SUCCESS;
    });
}

API cuDeviceGetUuid(Uuid* uuid, CUdevice device) { return cuDeviceGetUuid_v2(uuid, device); }

API cuDeviceGetAttribute(int* value, int attribute, CUdevice device) {
    static const std::map<int, int> values = {
        {1, 1024},                      // MAX_THREADS_PER_BLOCK
        {2, 1024},   {3, 1024}, {4, 64},          // MAX_BLOCK_DIM_X, Y, Z
        {5, 0x7fffffff}, {6, 65535}, {7, 65535},  // MAX_GRID_DIM_X, Y, Z
        {10, 32},                       // WARP_SIZE
        {16, 4},                        // MULTIPROCESSOR_COUNT
        {19, 1},                        // CAN_MAP_HOST_MEMORY
        {39, 2048},                     // MAX_THREADS_PER_MULTIPROCESSOR
        {41, 1},                        // UNIFIED_ADDRESSING
        {75, 9},     {76, 0},           // COMPUTE_CAPABILITY_MAJOR, MINOR
        {91, 1},                        // CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
        {92, 1},     {99, 1},           // CAN_USE_STREAM_MEM_OPS, HOST_REGISTER_SUPPORTED
    };
    return about_device(device, [&](Context&) {
        const auto found = values.find(attribute);
        *value = found == values.end() ? 0 : found->second;
        return SUCCESS;
    });
}

API cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
    return about_device(device, [&](Context&) {
        return *bytes = driver().settings.memory, SUCCESS;
    });
}

API cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
    return about_device(device, [&](Context&) {
        *can = driver().settings.peers && device != peer;
        return context_of(peer) ? SUCCESS : ERROR_INVALID_DEVICE;
    });
}

API cuDevicePrimaryCtxRetain(Handle* context, CUdevice device) {
    return about_device(device, [&](Context& found) {
        if (!found.retained++) found.legacy = make_stream(found, true);
        *context = found.handle;
        return SUCCESS;
    });
}

// The last release ends what belongs to the context, as with the real driver.
static void end_context(Lock& held, Context& context) {
    Driver& all = driver();
    wait_for(held, all_work_of(context));
    for (const auto& stream : context.streams) close_stream(*stream);
    const auto ours = [&](const auto& each) { return each.context == &context; };
    all.streams.remove_where(ours);
    all.events.remove_where(ours);
    all.functions.remove_where([&](const Function& each) { return ours(*each.module); });
    all.modules.remove_where(ours);
    for (auto each = all.allocations.begin(); each != all.allocations.end();) {
        const auto& memory = *each->second;
        if (ours(memory)) all.used[memory.device] -= rounded(memory.size, GRANULE);
        each = ours(memory) ? all.allocations.erase(each) : std::next(each);
    }
    context.peers.clear();
}

API cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
    return about_device(device, [&](Context& context) {
        *flags = 0;
        *active = context.retained > 0;
        return SUCCESS;
    });
}

API cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    if (!driver().initialised) return ERROR_NOT_INITIALIZED;
    Lock held(driver().mutex);
    Context* context = context_of(device);
    if (!context) return ERROR_INVALID_DEVICE;
    if (!context->retained) return ERROR_INVALID_CONTEXT;
    if (!--context->retained) end_context(held, *context);
    return SUCCESS;
}

API cuCtxPushCurrent_v2(Handle context) {
    if (!driver().initialised) return ERROR_NOT_INITIALIZED;
    Lock held(driver().mutex);
    const auto found = driver().context_handles.find(context);
    if (!found || !found->retained) return ERROR_INVALID_CONTEXT;
    current.push_back(found.get());
    return SUCCESS;
}

API cuCtxPopCurrent_v2(Handle* context) {
    if (!driver().initialised) return ERROR_NOT_INITIALIZED;
    if (current.empty()) return ERROR_INVALID_CONTEXT;
    if (context) *context = current.back()->handle;
    current.pop_back();
    return SUCCESS;
}

API cuCtxSetCurrent(Handle context) {
    if (!context) return current.empty() ? SUCCESS : cuCtxPopCurrent_v2(nullptr);
    const CUresult result = cuCtxPushCurrent_v2(context);
    if (!result && current.size() > 1) current.erase(current.end() - 2);
    return result;
}

API cuCtxGetCurrent(Handle* context) {
    if (!driver().initialised) return ERROR_NOT_INITIALIZED;
    *context = current.empty() ? nullptr : current.back()->handle;
    return SUCCESS;
}

API cuCtxGetDevice(CUdevice* device) {
    return work_in_context([&](Lock&, Context& context) {
        return *device = context.ordinal, SUCCESS;
    });
}

API cuCtxSynchronize() {
    return work_in_context([&](Lock& held, Context& context) {
        return wait_for(held, all_work_of(context));
    });
}

API cuCtxEnablePeerAccess(Handle peer, unsigned flags) {
    return work_in_context([&](Lock&, Context& context) -> CUresult {
        const auto other = driver().context_handles.find(peer);
        if (!other || !other->retained) return ERROR_INVALID_CONTEXT;
        if (flags) return ERROR_INVALID_VALUE;
        if (other->physical == context.physical) return ERROR_INVALID_DEVICE;
        if (!driver().settings.peers) return ERROR_PEER_ACCESS_UNSUPPORTED;
        const bool added = context.peers.insert(other->physical).second;
        return added ? SUCCESS : ERROR_PEER_ACCESS_ALREADY_ENABLED;
    });
}

// ---- Streams and events -------------------------------------------------------------------------

API cuStreamCreateWithPriority(Handle* stream, unsigned flags, int) {
    return work_in_context([&](Lock&, Context& context) -> CUresult {
        if (flags > 1) return ERROR_INVALID_VALUE;
        *stream = driver().streams.add(make_stream(context, flags != 1));
        return SUCCESS;
    });
}

API cuStreamCreate(Handle* stream, unsigned flags) {
    return cuStreamCreateWithPriority(stream, flags, 0);
}

API cuStreamDestroy_v2(Handle stream) {
    return work_in_context([&](Lock&, Context&) -> CUresult {
        const auto found = driver().streams.find(stream);
        if (!found) return ERROR_INVALID_HANDLE;
        close_stream(*found);  // what it was given is done nevertheless
        driver().streams.remove(stream);
        return SUCCESS;
    });
}

using OnStream = std::function<CUresult(Lock&, const std::shared_ptr<Stream>&)>;

static CUresult with_stream(Handle stream, const OnStream& work) {
    return work_in_context([&](Lock& held, Context& context) {
        const auto found = stream_of(context, stream);
        return found ? work(held, found) : ERROR_INVALID_HANDLE;
    });
}

API cuStreamSynchronize(Handle stream) {
    return with_stream(stream, [](Lock& held, const std::shared_ptr<Stream>& found) {
        return wait_for(held, {{found, found->given}});
    });
}

API cuStreamQuery(Handle stream) {
    return with_stream(stream, [](Lock&, const std::shared_ptr<Stream>& found) {
        return found->done == found->given ? SUCCESS : ERROR_NOT_READY;
    });
}

// Nothing here records graphs.
API cuStreamIsCapturing(Handle stream, int* status) {
    *status = 0;
    return with_stream(stream, [&](Lock&, const std::shared_ptr<Stream>&) { return SUCCESS; });
}

API cuStreamWaitEvent(Handle stream, Handle event, unsigned) {
    return with_stream(stream, [&](Lock&, const std::shared_ptr<Stream>& found) {
        const auto awaited = driver().events.find(event);
        if (!awaited) return ERROR_INVALID_HANDLE;
        if (awaited->point.stream) push(found, nullptr, {awaited->point});
        return SUCCESS;
    });
}

API cuStreamWriteValue32_v2(Handle stream, CUdeviceptr address, uint32_t value, unsigned flags) {
    return with_stream(stream, [&](Lock&, const std::shared_ptr<Stream>& found) {
        const Context& context = *found->context;
        if (!driver().settings.words) return ERROR_NOT_SUPPORTED;
        if (address % 4 || flags > 1 || !reaches(context, place_of(address, 4)))
            return ERROR_INVALID_VALUE;
        push(found, [=, &context]() -> CUresult {
            Lock looking(driver().mutex);
            const Place place = place_of(address, 4);
            if (!reaches(context, place)) return ERROR_ILLEGAL_ADDRESS;
            __atomic_store_n(reinterpret_cast<uint32_t*>(place.at), value, __ATOMIC_SEQ_CST);
            return SUCCESS;
        });
        return SUCCESS;
    });
}

static bool holds(uint32_t found, uint32_t value, unsigned condition) {
    switch (condition) {
        case 0: return static_cast<int32_t>(found - value) >= 0;
        case 1: return found == value;
        case 2: return found & value;
        default: return ~(found | value);
    }
}

API cuStreamWaitValue32_v2(Handle stream, CUdeviceptr address, uint32_t value, unsigned flags) {
    return with_stream(stream, [&](Lock&, const std::shared_ptr<Stream>& found) {
        const Context& context = *found->context;
        const unsigned condition = flags & ~(1u << 30);
        if (!driver().settings.words) return ERROR_NOT_SUPPORTED;
        if (address % 4 || condition > 3 || !reaches(context, place_of(address, 4)))
            return ERROR_INVALID_VALUE;
        push(found, [=, &context]() -> CUresult {
            for (;;) {
                Lock looking(driver().mutex);
                if (driver().sticky) return SUCCESS;
                {
                    const Place place = place_of(address, 4);
                    if (!reaches(context, place)) return ERROR_ILLEGAL_ADDRESS;
                    const auto* word = reinterpret_cast<uint32_t*>(place.at);
                    if (holds(__atomic_load_n(word, __ATOMIC_SEQ_CST), value, condition))
                        return SUCCESS;
                }
                looking.unlock();
                std::this_thread::sleep_for(std::chrono::microseconds(20));
            }
        });
        return SUCCESS;
    });
}

API cuEventCreate(Handle* event, unsigned flags) {
    return work_in_context([&](Lock&, Context& context) -> CUresult {
        if (flags > 7 || (flags & 6) == 4) return ERROR_INVALID_VALUE;
        *event = driver().events.add(std::make_shared<Event>(Event{&context, {}}));
        return SUCCESS;
    });
}

API cuEventRecord(Handle event, Handle stream) {
    return with_stream(stream, [&](Lock&, const std::shared_ptr<Stream>& on) {
        const auto found = driver().events.find(event);
        if (!found || found->context != on->context) return ERROR_INVALID_HANDLE;
        found->point = push(on, nullptr);
        return SUCCESS;
    });
}

API cuEventQuery(Handle event) {
    return work_in_context([&](Lock&, Context&) -> CUresult {
        const auto found = driver().events.find(event);
        if (!found) return ERROR_INVALID_HANDLE;
        return reached(found->point) ? SUCCESS : ERROR_NOT_READY;
    });
}

API cuEventSynchronize(Handle event) {
    return work_in_context([&](Lock& held, Context&) {
        const auto found = driver().events.find(event);
        return found ? wait_for(held, {found->point}) : ERROR_INVALID_HANDLE;
    });
}

API cuEventDestroy_v2(Handle event) {
    return work_in_context([&](Lock&, Context&) {
        return driver().events.remove(event) ? SUCCESS : ERROR_INVALID_HANDLE;
    });
}

// ---- Memory -------------------------------------------------------------------------------------

API cuMemAlloc_v2(CUdeviceptr* address, size_t size) {
    return work_in_context([&](Lock&, Context& context) -> CUresult {
        Driver& all = driver();
        size_t& used = all.used[context.physical];
        if (!size) return ERROR_INVALID_VALUE;
        if (size > all.settings.memory || used + rounded(size, GRANULE) > all.settings.memory)
            return ERROR_OUT_OF_MEMORY;
        const auto made = new_memory(size);
        if (!made) return ERROR_OUT_OF_MEMORY;
        made->device = context.physical;
        made->context = &context;
        memset(made->base, 0xcd, size);  // nobody may count on zeros
        used += rounded(size, GRANULE);
        *address = device_address(made->base);
        all.allocations[*address] = made;
        return SUCCESS;
    });
}

// Waits for all work, as the documentation says.
API cuMemFree_v2(CUdeviceptr address) {
    return work_in_context([&](Lock& held, Context&) -> CUresult {
        Driver& all = driver();
        const auto is_own = [&] {
            const auto found = all.allocations.find(address);
            return found != all.allocations.end() && !found->second->physical;
        };
        if (!address) return SUCCESS;
        if (!is_own()) return ERROR_INVALID_VALUE;
        for (const auto& context : all.contexts)
            if (const CUresult result = wait_for(held, all_work_of(*context))) return result;
        if (!is_own()) return ERROR_INVALID_VALUE;  // freed by another thread in the meantime
        const auto memory = all.allocations[address];
        all.used[memory->device] -= rounded(memory->size, GRANULE);
        all.allocations.erase(address);
        return SUCCESS;
    });
}

API cuMemGetInfo_v2(size_t* free, size_t* total) {
    return work_in_context([&](Lock&, Context& context) {
        *total = driver().settings.memory;
        *free = *total - driver().used[context.physical];
        return SUCCESS;
    });
}

API cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* size, CUdeviceptr address) {
    return work_in_context([&](Lock&, Context&) -> CUresult {
        const auto found = allocation_at(address, 1);
        if (!found) return ERROR_NOT_FOUND;
        if (base) *base = device_address(found->base);
        if (size) *size = found->size;
        return SUCCESS;
    });
}

// Whether all pages of a range are mapped.
static bool is_mapped(uintptr_t address, size_t size) {
    const size_t page = size_t(sysconf(_SC_PAGESIZE));
    const uintptr_t first = address / page * page;
    const size_t bytes = rounded(address + size - first, page);
    std::vector<unsigned char> pages(bytes / page);
    return !mincore(reinterpret_cast<void*>(first), bytes, pages.data());
}

API cuMemHostRegister_v2(void* pointer, size_t size, unsigned flags) {
    return work_in_context([&](Lock&, Context& context) -> CUresult {
        Driver& all = driver();
        const auto address = reinterpret_cast<uintptr_t>(pointer);
        if (!all.settings.may_register) return ERROR_NOT_PERMITTED;
        if (!size || flags > 15 || !is_mapped(address, size)) return ERROR_INVALID_VALUE;
        for (const auto& [base, range] : all.registered)
            if (base < address + size && address < base + range.size)
                return ERROR_HOST_MEMORY_ALREADY_REGISTERED;
        all.registered[address] = {size, context.ordinal};
        return SUCCESS;
    });
}

API cuMemHostUnregister(void* pointer) {
    return work_in_context([&](Lock&, Context&) {
        const bool found = driver().registered.erase(reinterpret_cast<uintptr_t>(pointer));
        return found ? SUCCESS : ERROR_HOST_MEMORY_NOT_REGISTERED;
    });
}

// Where all addresses are in one space, the device uses those of the host.
API cuMemHostGetDevicePointer_v2(CUdeviceptr* address, void* pointer, unsigned flags) {
    return work_in_context([&](Lock&, Context&) {
        *address = reinterpret_cast<uintptr_t>(pointer);
        const bool pinned = place_of(*address, 1).kind == Place::PINNED;
        return pinned && !flags ? SUCCESS : ERROR_INVALID_VALUE;
    });
}

API cuPointerGetAttribute(void* value, int attribute, CUdeviceptr address) {
    return work_in_context([&](Lock&, Context&) -> CUresult {
        const Place place = place_of(address, 1);
        const bool device = place.kind == Place::DEVICE;
        if (!device && place.kind != Place::PINNED) return ERROR_INVALID_VALUE;
        const auto& registered = driver().registered;
        if (attribute == 2) {  // MEMORY_TYPE: DEVICE or HOST
            *static_cast<unsigned*>(value) = device ? 2 : 1;
        } else if (attribute == 9) {  // DEVICE_ORDINAL
            *static_cast<int*>(value) = device
                ? ordinal_of(place.memory->device)
                : std::prev(registered.upper_bound(address))->second.ordinal;
        } else if (attribute == 10) {  // IS_LEGACY_CUDA_IPC_CAPABLE
            *static_cast<bool*>(value) = device && !place.memory->physical;
        } else {
            return ERROR_NOT_SUPPORTED;
        }
        return SUCCESS;
    });
}

API cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, size_t size, Handle stream) {
    return work_in_context([&](Lock& held, Context& context) {
        return copy(held, stream_of(context, stream), target, source, size, false);
    });
}

API cuMemcpy(CUdeviceptr target, CUdeviceptr source, size_t size) {
    return work_in_context([&](Lock& held, Context& context) {
        return copy(held, context.legacy, target, source, size, true);
    });
}

// A copy whose one end is said to be the host's.
static CUresult copy_with_host(CUdeviceptr device, const void* host, bool to_host, size_t size,
                               Handle stream, bool synchronous) {
    return work_in_context([&](Lock& held, Context& context) -> CUresult {
        const auto address = static_cast<CUdeviceptr>(reinterpret_cast<uintptr_t>(host));
        if (size && (is_device_address(address) || place_of(device, size).kind == Place::PAGEABLE))
            return ERROR_INVALID_VALUE;
        const CUdeviceptr target = to_host ? address : device, source = to_host ? device : address;
        return copy(held, stream_of(context, stream), target, source, size, synchronous);
    });
}

API cuMemcpyHtoD_v2(CUdeviceptr target, const void* source, size_t size) {
    return copy_with_host(target, source, false, size, nullptr, true);
}

API cuMemcpyDtoH_v2(void* target, CUdeviceptr source, size_t size) {
    return copy_with_host(source, target, true, size, nullptr, true);
}

API cuMemcpyHtoDAsync_v2(CUdeviceptr target, const void* source, size_t size, Handle stream) {
    return copy_with_host(target, source, false, size, stream, false);
}

API cuMemcpyDtoHAsync_v2(void* target, CUdeviceptr source, size_t size, Handle stream) {
    return copy_with_host(source, target, true, size, stream, false);
}

API cuMemsetD8Async(CUdeviceptr target, unsigned char value, size_t size, Handle stream) {
    return with_stream(stream, [&](Lock&, const std::shared_ptr<Stream>& found) {
        const Context& context = *found->context;
        if (!reaches(context, place_of(target, size))) return ERROR_INVALID_VALUE;
        push(found, [=, &context]() -> CUresult {
            Lock looking(driver().mutex);
            const std::vector<Place> places = {place_of(target, size)};
            if (!reaches(context, places[0])) return ERROR_ILLEGAL_ADDRESS;
            return use(looking, places, [&] { memset(places[0].at, value, size); });
        });
        return SUCCESS;
    });
}

// ---- Memory that is made, placed and opened apart -----------------------------------------------

struct Location {
    int type, id;
};

struct Properties {  // CUmemAllocationProp
    int type, handle_types;
    Location location;
    void* windows;
    unsigned char compression, rdma;
    unsigned short usage;
    unsigned char reserved[4];
};

struct Access {  // CUmemAccessDesc
    Location location;
    int flags;
};

static const int DESCRIPTOR = 1;  // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
static const int ON_DEVICE = 1;   // CU_MEM_LOCATION_TYPE_DEVICE
static const int READ_WRITE = 3;  // CU_MEM_ACCESS_FLAGS_PROT_READWRITE

void Physical::close_file() {
    if (fd >= 0) close(fd);
    fd = -1;
}

Physical::~Physical() {
    close_file();
    if (counted) driver().used[device] -= size;
}

static Handle handle_of(CUdeviceptr number) { return reinterpret_cast<Handle>(number); }

API cuMemGetAllocationGranularity(size_t* granule, const Properties* wanted, int) {
    return about_device(wanted->location.id, [&](Context&) { return *granule = GRANULE, SUCCESS; });
}

// A file in memory of which nobody may count on zeros, or -1.
static int new_file(int device, size_t size) {
    const int fd = memfd_create(("fake_cuda_of_" + std::to_string(device)).c_str(), MFD_CLOEXEC);
    if (fd < 0) return -1;
    void* all = MAP_FAILED;
    if (!ftruncate(fd, off_t(size))) all = mmap(nullptr, size, READABLE, MAP_SHARED, fd, 0);
    if (all == MAP_FAILED) {
        close(fd);
        return -1;
    }
    memset(all, 0xcd, size);
    munmap(all, size);
    return fd;
}

API cuMemCreate(CUdeviceptr* handle, size_t size, const Properties* wanted, unsigned long long) {
    return work_in_context([&](Lock&, Context&) -> CUresult {
        Driver& all = driver();
        const Location& place = wanted->location;
        const Context* home = context_of(place.id);
        if (wanted->type != 1 || place.type != ON_DEVICE || !home || !size || size % GRANULE)
            return ERROR_INVALID_VALUE;
        size_t& used = all.used[home->physical];
        if (size > all.settings.memory || used + size > all.settings.memory)
            return ERROR_OUT_OF_MEMORY;
        const int fd = new_file(home->physical, size);
        if (fd < 0) return ERROR_OUT_OF_MEMORY;
        used += size;
        const bool shareable = wanted->handle_types & DESCRIPTOR;
        auto made = std::make_shared<Physical>(fd, size, home->physical, true, shareable);
        *handle = reinterpret_cast<CUdeviceptr>(all.physical.add(std::move(made)));
        return SUCCESS;
    });
}

// What is mapped stays, and so does what other processes have a descriptor of.
API cuMemRelease(CUdeviceptr handle) {
    return work_in_context([&](Lock&, Context&) -> CUresult {
        const auto found = driver().physical.find(handle_of(handle));
        if (!found) return ERROR_INVALID_VALUE;
        found->close_file();  // without a handle nobody maps or exports it
        driver().physical.remove(handle_of(handle));
        return SUCCESS;
    });
}

API cuMemExportToShareableHandle(void* descriptor, CUdeviceptr handle, int type,
                                 unsigned long long) {
    return work_in_context([&](Lock&, Context&) -> CUresult {
        const auto found = driver().physical.find(handle_of(handle));
        if (!found || type != DESCRIPTOR || !found->shareable) return ERROR_INVALID_VALUE;
        const int copy = fcntl(found->fd, F_DUPFD_CLOEXEC, 3);
        *static_cast<int*>(descriptor) = copy;
        return copy < 0 ? ERROR_INVALID_VALUE : SUCCESS;
    });
}

// The device that a descriptor's memory is of, or -1 for any other file.
static int device_of_file(int fd) {
    char target[128] = {};
    const auto link = "/proc/self/fd/" + std::to_string(fd);
    int device = -1;
    if (readlink(link.c_str(), target, 127) > 0)
        sscanf(target, "/memfd:fake_cuda_of_%d", &device);
    return device;
}

API cuMemImportFromShareableHandle(CUdeviceptr* handle, void* descriptor, int type) {
    return work_in_context([&](Lock&, Context&) -> CUresult {
        Driver& all = driver();
        const int given = static_cast<int>(reinterpret_cast<intptr_t>(descriptor));
        if (!all.settings.ipc) return ERROR_NOT_SUPPORTED;
        const int device = device_of_file(given);
        if (type != DESCRIPTOR || device < 0) return ERROR_INVALID_VALUE;
        if (ordinal_of(device) < 0) return ERROR_INVALID_DEVICE;
        const int fd = fcntl(given, F_DUPFD_CLOEXEC, 3);
        if (fd < 0) return ERROR_INVALID_VALUE;
        const auto size = static_cast<size_t>(lseek(fd, 0, SEEK_END));
        auto made = std::make_shared<Physical>(fd, size, device, false, true);
        *handle = reinterpret_cast<CUdeviceptr>(all.physical.add(std::move(made)));
        return SUCCESS;
    });
}

API cuMemAddressReserve(CUdeviceptr* address, size_t size, size_t, CUdeviceptr,
                        unsigned long long) {
    return work_in_context([&](Lock&, Context&) -> CUresult {
        if (!size || size % GRANULE) return ERROR_INVALID_VALUE;
        void* base = mmap(nullptr, size, PROT_NONE, NO_MEMORY, -1, 0);
        if (base == MAP_FAILED) return ERROR_OUT_OF_MEMORY;
        *address = device_address(base);
        driver().reserved[*address] = {static_cast<char*>(base), size};
        return SUCCESS;
    });
}

API cuMemAddressFree(CUdeviceptr address, size_t size) {
    return work_in_context([&](Lock&, Context&) -> CUresult {
        Driver& all = driver();
        const auto found = all.reserved.find(address);
        const bool fits = found != all.reserved.end() && found->second.size == size;
        if (!fits || all.allocations.count(address)) return ERROR_INVALID_VALUE;
        munmap(found->second.base, size);
        all.reserved.erase(found);
        return SUCCESS;
    });
}

API cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUdeviceptr handle,
             unsigned long long) {
    return work_in_context([&](Lock&, Context&) -> CUresult {
        Driver& all = driver();
        const auto made = all.physical.find(handle_of(handle));
        const auto place = all.reserved.find(address);
        if (!made || offset || size > made->size || place == all.reserved.end() ||
            place->second.size != size || all.allocations.count(address))
            return ERROR_INVALID_VALUE;
        char* base = place->second.base;
        if (mmap(base, size, READABLE, MAP_SHARED | MAP_FIXED, made->fd, 0) == MAP_FAILED)
            return ERROR_MAP_FAILED;
        auto mapped = std::make_shared<Allocation>();
        mapped->base = base;
        mapped->size = size;
        mapped->device = made->device;
        mapped->physical = made;
        all.allocations[address] = std::move(mapped);
        return SUCCESS;
    });
}

// All of what cuMemMap has mapped at an address.
static std::shared_ptr<Allocation> mapped_at(CUdeviceptr address, size_t size) {
    const auto found = allocation_at(address, size);
    const bool all = found && device_address(found->base) == address && found->size == size;
    return all && found->physical ? found : nullptr;
}

API cuMemSetAccess(CUdeviceptr address, size_t size, const Access* wanted, size_t count) {
    return work_in_context([&](Lock&, Context&) -> CUresult {
        const auto found = mapped_at(address, size);
        if (!found) return ERROR_INVALID_VALUE;
        for (const Access* each = wanted; each != wanted + count; ++each) {
            const Context* user = context_of(each->location.id);
            if (!user || each->location.type != ON_DEVICE || each->flags != READ_WRITE)
                return ERROR_INVALID_VALUE;
            if (user->physical != found->device && !driver().settings.peers)
                return ERROR_PEER_ACCESS_UNSUPPORTED;
            found->users.insert(user->physical);
        }
        return SUCCESS;
    });
}

// Nothing waits for work that is still to come. What runs there already does so to its end, lest
// this process crash; it is wrong nevertheless.
API cuMemUnmap(CUdeviceptr address, size_t size) {
    return work_in_context([&](Lock& held, Context&) -> CUresult {
        const auto found = mapped_at(address, size);
        if (!found) return ERROR_INVALID_VALUE;
        found->unmapped = true;
        while (found.use_count() > 2) {  // the table has it, and this function
            held.unlock();
            std::this_thread::sleep_for(std::chrono::microseconds(20));
            held.lock();
        }
        mmap(found->base, size, PROT_NONE, NO_MEMORY | MAP_FIXED, -1, 0);
        driver().allocations.erase(address);
        return SUCCESS;
    });
}

// ---- Kernels: the C++ compiler's version of what NVRTC would have compiled ----------------------

static std::string text_of(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

static std::string hash_of(const std::string& text) {
    uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
    for (const unsigned char byte : text) hash = (hash ^ byte) * 0x100000001b3;
    char hex[17];
    snprintf(hex, sizeof hex, "%016llx", static_cast<unsigned long long>(hash));
    return hex;
}

// cuda_on_host.h says how it is compiled: the eight fields of the name are eight macros.
static std::vector<std::string> compiler_command(const std::string& name, const std::string& source,
                                                 const std::string& header) {
    static const char* const macros[] = {"GIVEN", "KEPT", "WRITTEN", "OP",
                                         "INPUTS", "SCALED", "DIVIDED"};
    std::vector<std::string> command = {
        "g++", "-shared", "-fPIC", "-O1", "-std=c++17", "-ffp-contract=off", "-fno-strict-aliasing",
        "-DALLFOLD_SOURCE=\"" + source + "\"", "-DALLFOLD_NAME=" + name};
    std::istringstream fields(name);
    std::string field;
    std::getline(fields, field, '_');
    for (const char* macro : macros) {
        if (!std::getline(fields, field, '_') || field.empty()) return {};
        command.push_back("-DALLFOLD_" + std::string(macro) + "=" + field);
    }
    if (std::getline(fields, field)) return {};
    command.insert(command.end(), {"-x", "c++", header});
    return command;
}

static bool compile(std::vector<std::string> command, const std::string& path) {
    static std::atomic<int> last{0};
    const std::string part =
        path + "." + std::to_string(getpid()) + "." + std::to_string(++last) + ".part";
    command.insert(command.end(), {"-o", part});
    std::vector<char*> arguments;
    for (auto& each : command) arguments.push_back(each.data());
    arguments.push_back(nullptr);
    pid_t compiler = 0;
    if (posix_spawnp(&compiler, "g++", nullptr, nullptr, arguments.data(), environ)) return false;
    while (waitpid(compiler, nullptr, 0) < 0 && errno == EINTR) {}
    return !rename(part.c_str(), path.c_str());  // without the compiler's success there is no file
}

// Several processes may compile the same kernel at once; the last one's file stays.
static bool load_kernel(const std::string& name, Function& function) {
    const char* folder = getenv("FAKE_CUDA_CACHE");
    const char* files = getenv("FAKE_CUDA_SOURCES");
    const std::string cache = folder ? folder : "", sources = files ? files : "";
    const size_t middle = sources.find(':');
    if (middle == std::string::npos || cache.empty()) {
        fprintf(stderr, "fake CUDA: FAKE_CUDA_SOURCES or FAKE_CUDA_CACHE is not set\n");
        return false;
    }
    const std::string source = sources.substr(0, middle), header = sources.substr(middle + 1);
    const auto command = compiler_command(name, source, header);
    if (command.empty()) return false;
    std::string key = text_of(source) + text_of(header);  // wherever they are
    for (const auto& each : compiler_command(name, "", "")) key += each + "\n";
    const std::string path = cache + "/" + name + "-" + hash_of(key) + ".so";
    if (access(path.c_str(), R_OK) && !compile(command, path)) return false;
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "fake CUDA: %s\n", dlerror());
        return false;
    }
    function.run = reinterpret_cast<decltype(function.run)>(dlsym(library, "run_kernel"));
    const auto* size =
        static_cast<const unsigned long long*>(dlsym(library, "kernel_arguments_size"));
    function.arguments = size ? *size : 0;
    return function.run && size;
}

// An image is PTX, which is text, or an ELF file, which says itself how long it is.
static std::string image_at(const void* image) {
    const char* bytes = static_cast<const char*>(image);
    if (memcmp(bytes, "\177ELF", 4)) return bytes;
    uint64_t sections;
    uint16_t entry, entries;
    memcpy(&sections, bytes + 40, sizeof sections);
    memcpy(&entry, bytes + 58, sizeof entry);
    memcpy(&entries, bytes + 60, sizeof entries);
    return {bytes, sections + size_t(entry) * entries};
}

API cuModuleLoadData(Handle* module, const void* image) {
    return work_in_context([&](Lock&, Context& context) -> CUresult {
        if (!image || !*static_cast<const char*>(image)) return ERROR_INVALID_IMAGE;
        *module = driver().modules.add(std::make_shared<Module>(Module{&context, image_at(image)}));
        return SUCCESS;
    });
}

API cuModuleLoadDataEx(Handle* module, const void* image, unsigned, void*, void**) {
    return cuModuleLoadData(module, image);
}

API cuModuleUnload(Handle module) {
    return work_in_context([&](Lock&, Context&) -> CUresult {
        const auto found = driver().modules.find(module);
        if (!found) return ERROR_INVALID_HANDLE;
        driver().functions.remove_where([&](const Function& each) { return each.module == found; });
        driver().modules.remove(module);
        return SUCCESS;
    });
}

API cuModuleGetFunction(Handle* function, Handle module, const char* name) {
    return work_in_context([&](Lock& held, Context&) -> CUresult {
        const auto found = driver().modules.find(module);
        if (!found) return ERROR_INVALID_HANDLE;
        // What a compiler has made must have the kernel; tests may give any other text.
        const std::string& image = found->image;
        const bool compiled = image[0] == '\177' || image.find(".version") != std::string::npos;
        if (compiled && image.find(name) == std::string::npos) return ERROR_NOT_FOUND;
        auto made = std::make_shared<Function>();
        made->module = found;
        held.unlock();  // the compiler takes seconds
        const bool loaded = load_kernel(name, *made);
        held.lock();
        if (!loaded) return ERROR_NOT_FOUND;
        *function = driver().functions.add(made);
        return SUCCESS;
    });
}

// Put the CPU's addresses in the place of a kernel's; false where one may not be used.
static bool translate(const Context& context, std::vector<uint64_t>& words,
                      std::vector<Place>& places) {
    for (auto& word : words) {
        const bool host = word >= 0x100000000000 && word <= 0x7fffffffffff;
        if (!host && !is_device_address(word)) continue;
        places.push_back(place_of(word, 1));
        if (!reaches(context, places.back())) return false;
        word = reinterpret_cast<uintptr_t>(places.back().at);
    }
    return true;
}

API cuLaunchKernel(Handle function, unsigned grid, unsigned grid_y, unsigned grid_z, unsigned block,
                   unsigned block_y, unsigned block_z, unsigned, Handle stream, void** parameters,
                   void** extra) {
    return with_stream(stream, [&](Lock&, const std::shared_ptr<Stream>& found) {
        const Context& context = *found->context;
        const auto kernel = driver().functions.find(function);
        if (!kernel || kernel->module->context != &context || current.back() != &context)
            return ERROR_INVALID_HANDLE;
        // Kernels of one dimension, with one argument; more is not needed here.
        const bool plain = grid_y == 1 && grid_z == 1 && block_y == 1 && block_z == 1;
        if (!plain || !grid || !block || block > 1024 || !parameters || !parameters[0] || extra)
            return ERROR_INVALID_VALUE;
        std::vector<uint64_t> arguments(rounded(kernel->arguments, 8) / 8);
        memcpy(arguments.data(), parameters[0], kernel->arguments);
        push(found, [=, &context]() -> CUresult {
            Lock looking(driver().mutex);
            std::vector<uint64_t> words = arguments;
            std::vector<Place> places;
            if (!translate(context, words, places)) return ERROR_ILLEGAL_ADDRESS;
            return use(looking, places, [&] { kernel->run(grid, block, words.data()); });
        });
        return SUCCESS;
    });
}

// ---- Errors and symbols -------------------------------------------------------------------------

API cuGetErrorName(CUresult result, const char** name) {
    switch (result) {
#define RESULT_NAME(word, number, text) \
    case number: *name = "CUDA_" #word; return SUCCESS;
        RESULTS(RESULT_NAME)
        default: *name = nullptr; return ERROR_INVALID_VALUE;
    }
}

API cuGetErrorString(CUresult result, const char** text) {
    switch (result) {
#define RESULT_TEXT(word, number, words) \
    case number: *text = words; return SUCCESS;
        RESULTS(RESULT_TEXT)
        default: *text = nullptr; return ERROR_INVALID_VALUE;
    }
}

// NVRTC looks for a cache of compiled kernels here, and believes a driver that does not refuse.
API cuGetExportTable(const void** table, const Uuid*) {
    *table = nullptr;
    return ERROR_NOT_FOUND;
}

// Per-thread default streams (flag 2) would need functions of their own; there are none.
API cuGetProcAddress_v2(const char* symbol, void** address, int, uint64_t flags, int* status) {
    static void* const library = [] {
        Dl_info here;
        dladdr(reinterpret_cast<void*>(&cuGetErrorName), &here);
        return dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    }();
    *address = nullptr;
    for (const char* version : {"_v3", "_v2", ""})
        if (!*address && !(flags & 2))
            *address = dlsym(library, (std::string(symbol) + version).c_str());
    if (status) *status = *address ? 0 : 1;
    return SUCCESS;
}

API cuGetProcAddress(const char* symbol, void** address, int version, uint64_t flags) {
    return cuGetProcAddress_v2(symbol, address, version, flags, nullptr);
}
