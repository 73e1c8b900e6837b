/*
CUDA's words for a C++ compiler: fold.cu as a shared library that runs on the CPU.

This header is what is compiled; it includes the kernel's source and then defines the entry:

  g++ -shared -fPIC -O1 -std=c++17 -ffp-contract=off -fno-strict-aliasing \
      '-DALLFOLD_SOURCE="/path/to/allfold_agent/gpu/fold.cu"' \
      -DALLFOLD_NAME=fold_bfloat16_float32_bfloat16_sum_4_0_1 \
      -DALLFOLD_GIVEN=bfloat16 -DALLFOLD_KEPT=float32 -DALLFOLD_WRITTEN=bfloat16 \
      -DALLFOLD_OP=sum -DALLFOLD_INPUTS=4 -DALLFOLD_SCALED=0 -DALLFOLD_DIVIDED=1 \
      -x c++ cuda_on_host.h -o kernel.so

The eight macros are the kernel's name and its seven fields, split at "_", as they are: the same
that Variant.options of kernels.py gives to NVRTC.

The library has one entry for a launch, and the size of the kernel's argument struct:

  extern "C" void run_kernel(unsigned grid, unsigned block, const void* arguments);
  extern "C" const unsigned long long kernel_arguments_size;

The entry runs every thread of every block, one after the other, and returns. So the kernel
must not wait for other threads (it does not: there is no __syncthreads here). Several threads
may call it at once. The arguments are the bytes of kernels.arguments(), aligned to 8.

For many kernels in one library, a file defines the macros, includes this header and undefines
them, again and again; with -DALLFOLD_ENTRY_BY_NAME the entries are called run_<ALLFOLD_NAME>.
*/

#ifndef ALLFOLD_ON_HOST
#define ALLFOLD_ON_HOST

#include <cstring>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
// A kernel's parameter is passed by value; a copy for each of thousands of threads takes long here.
#define __grid_constant__ &

struct uint2 {
    unsigned x, y;
};
struct uint4 {
    unsigned x, y, z, w;
};
struct Dimensions {
    unsigned x, y, z;
};

static thread_local Dimensions threadIdx, blockIdx, blockDim, gridDim;

// On a GPU an instruction each; round to nearest, ties to even, NaN stays NaN.
static inline float half_to_float(unsigned short bits) {
    _Float16 half;
    std::memcpy(&half, &bits, sizeof bits);
    return static_cast<float>(half);
}

static inline unsigned short float_to_half(float value) {
    const _Float16 half = static_cast<_Float16>(value);
    unsigned short bits;
    std::memcpy(&bits, &half, sizeof bits);
    return bits;
}

template <typename Kernel, typename Arguments>
static void run_all_threads(Kernel kernel, unsigned grid, unsigned block, const Arguments& arguments) {
    gridDim = {grid, 1, 1};
    blockDim = {block, 1, 1};
    threadIdx = blockIdx = {0, 0, 0};
    for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < block; ++threadIdx.x) kernel(arguments);
}

#define ALLFOLD_JOIN_TOKENS(left, right) left##right
#define ALLFOLD_JOINED(left, right) ALLFOLD_JOIN_TOKENS(left, right)

#endif

#include ALLFOLD_SOURCE

#ifdef ALLFOLD_ENTRY_BY_NAME
#define ALLFOLD_ENTRY ALLFOLD_JOINED(run_, ALLFOLD_NAME)
#else
#define ALLFOLD_ENTRY run_kernel
extern "C" const unsigned long long kernel_arguments_size;
const unsigned long long kernel_arguments_size = sizeof(Arguments<ALLFOLD_INPUTS>);
#endif

extern "C" void ALLFOLD_ENTRY(unsigned grid, unsigned block, const void* arguments) {
    run_all_threads(
        ALLFOLD_NAME, grid, block, *static_cast<const Arguments<ALLFOLD_INPUTS>*>(arguments));
}

#undef ALLFOLD_ENTRY
