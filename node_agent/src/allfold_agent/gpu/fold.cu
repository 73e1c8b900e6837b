// The fold of N inputs into M outputs: each input element is read once, each output written once.
//
// gpu/kernels.py compiles it for one variant at a time, given as macros:
//
//   ALLFOLD_NAME      of the kernel
//   ALLFOLD_GIVEN     type of the inputs: a DType's label
//   ALLFOLD_KEPT      type in which they are folded
//   ALLFOLD_WRITTEN   type of the outputs
//   ALLFOLD_OP        sum, product, min, max, band, bor, bxor or move
//   ALLFOLD_INPUTS    how many
//   ALLFOLD_SCALED    1: each input is multiplied by the factor first
//   ALLFOLD_DIVIDED   1: the result is divided by the divisor before it is rounded
//
// Its results are, bit for bit, those of arithmetic/kernels.py on the CPU, but for the sign of a zero
// that is a minimum or maximum and for which bits a NaN has. So it must be compiled without
// contraction to fused multiply-adds, without flushing of subnormals and with IEEE division.
//
// An output may be the memory of an input: no pointer is __restrict__, and every thread reads its
// elements of all inputs before it writes them to any output.

#ifndef ALLFOLD_FOLD
#define ALLFOLD_FOLD

// Constants are enumerators: a constexpr variable would take memory of the device.
enum : int { MAX_OPERANDS = 128 };  // as in gpu/kernels.py

// The kernel's only parameter. kernels.py packs it.
template <int INPUTS>
struct Arguments {
    unsigned long long numel;
    unsigned long long head;  // elements before the first one at which all pointers are aligned
    double factor;
    double divisor;
    unsigned long long targets;  // how many outputs
    void* outputs[MAX_OPERANDS];
    const void* inputs[INPUTS];
};

// ---------------------------------------------------------------------------------------- types

struct Float16 {
    unsigned short bits;
};
struct BFloat16 {
    unsigned short bits;
};
struct Bool {
    unsigned char byte;
};

using type_float32 = float;
using type_float64 = double;
using type_float16 = Float16;
using type_bfloat16 = BFloat16;
using type_int8 = signed char;
using type_int16 = short;
using type_int32 = int;
using type_int64 = long long;
using type_uint8 = unsigned char;
using type_bool = Bool;

#ifndef ALLFOLD_ON_HOST  // where the tests compile this for the CPU, they bring these two
__device__ __forceinline__ float half_to_float(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
__device__ __forceinline__ unsigned short float_to_half(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#endif

union FloatBits {
    float value;
    unsigned bits;
};

__device__ __forceinline__ float brain_to_float(unsigned short bits) {
    FloatBits wide;
    wide.bits = static_cast<unsigned>(bits) << 16;
    return wide.value;
}

__device__ __forceinline__ unsigned short float_to_brain(float value) {
    FloatBits wide;
    wide.value = value;
    // Rounding could carry a NaN's payload away, and make it an infinity.
    if (value != value) return static_cast<unsigned short>(wide.bits >> 16 | 0x40);
    const unsigned tie_to_even = 0x7fff + (wide.bits >> 16 & 1);
    return static_cast<unsigned short>((wide.bits + tie_to_even) >> 16);
}

template <typename To, typename From>
struct Convert;
template <typename Same>
struct Convert<Same, Same> {
    static __device__ __forceinline__ Same apply(Same value) { return value; }
};
template <>
struct Convert<float, Float16> {
    static __device__ __forceinline__ float apply(Float16 half) { return half_to_float(half.bits); }
};
template <>
struct Convert<float, BFloat16> {
    static __device__ __forceinline__ float apply(BFloat16 half) {
        return brain_to_float(half.bits);
    }
};
template <>
struct Convert<Float16, float> {
    static __device__ __forceinline__ Float16 apply(float value) { return {float_to_half(value)}; }
};
template <>
struct Convert<BFloat16, float> {
    static __device__ __forceinline__ BFloat16 apply(float value) {
        return {float_to_brain(value)};
    }
};

// ---------------------------------------------------------------------------------- reductions

// Signed overflow is undefined in C++; that of unsigned integers wraps. Floats stay what they are.
__device__ __forceinline__ float wrapping(float value) { return value; }
__device__ __forceinline__ double wrapping(double value) { return value; }
__device__ __forceinline__ unsigned wrapping(int value) { return value; }
__device__ __forceinline__ unsigned long long wrapping(long long value) { return value; }

// What is compared: of half types their value.
template <typename Plain>
__device__ __forceinline__ Plain compared(Plain value) {
    return value;
}
__device__ __forceinline__ float compared(Float16 half) { return half_to_float(half.bits); }
__device__ __forceinline__ float compared(BFloat16 half) { return brain_to_float(half.bits); }

struct op_sum {
    template <typename T>
    static __device__ __forceinline__ T apply(T one, T other) {
        return static_cast<T>(wrapping(one) + wrapping(other));
    }
    static __device__ __forceinline__ Bool apply(Bool one, Bool other) {
        return {static_cast<unsigned char>((one.byte | other.byte) != 0)};
    }
};

struct op_product {
    template <typename T>
    static __device__ __forceinline__ T apply(T one, T other) {
        return static_cast<T>(wrapping(one) * wrapping(other));
    }
    static __device__ __forceinline__ Bool apply(Bool one, Bool other) {
        return {static_cast<unsigned char>((one.byte != 0) & (other.byte != 0))};
    }
};

// NaN wins. Of two equal values, which only zeros of either sign tell apart, the later one does, as
// where torch compares whole vectors; in the rest of a tensor, torch takes the earlier one.
struct op_min {
    template <typename T>
    static __device__ __forceinline__ T apply(T one, T other) {
        const auto left = compared(one), right = compared(other);
        return left < right || left != left ? one : other;
    }
    static __device__ __forceinline__ Bool apply(Bool one, Bool other) {
        return op_product::apply(one, other);
    }
};

struct op_max {
    template <typename T>
    static __device__ __forceinline__ T apply(T one, T other) {
        const auto left = compared(one), right = compared(other);
        return left > right || left != left ? one : other;
    }
    static __device__ __forceinline__ Bool apply(Bool one, Bool other) {
        return op_sum::apply(one, other);
    }
};

struct op_band {
    template <typename T>
    static __device__ __forceinline__ T apply(T one, T other) {
        return static_cast<T>(one & other);
    }
    static __device__ __forceinline__ Bool apply(Bool one, Bool other) {
        return op_product::apply(one, other);
    }
};

struct op_bor {
    template <typename T>
    static __device__ __forceinline__ T apply(T one, T other) {
        return static_cast<T>(one | other);
    }
    static __device__ __forceinline__ Bool apply(Bool one, Bool other) {
        return op_sum::apply(one, other);
    }
};

struct op_bxor {
    template <typename T>
    static __device__ __forceinline__ T apply(T one, T other) {
        return static_cast<T>(one ^ other);
    }
    static __device__ __forceinline__ Bool apply(Bool one, Bool other) {
        return {static_cast<unsigned char>((one.byte != 0) != (other.byte != 0))};
    }
};

struct op_move {
    template <typename T>
    static __device__ __forceinline__ T apply(T, T other) {
        return other;
    }
};

// Only types that a variant may multiply or divide in are ever asked for the first form.
template <bool WANTED>
struct Arithmetic {
    template <typename T>
    static __device__ __forceinline__ T scale(T value, double factor) {
        return value * static_cast<T>(factor);
    }
    template <typename T>
    static __device__ __forceinline__ T divide(T value, double divisor) {
        return value / static_cast<T>(divisor);
    }
};
template <>
struct Arithmetic<false> {
    template <typename T>
    static __device__ __forceinline__ T scale(T value, double) {
        return value;
    }
    template <typename T>
    static __device__ __forceinline__ T divide(T value, double) {
        return value;
    }
};

// ------------------------------------------------------------------------------------- the fold

enum : int {
    THREADS = 256,      // of a block at most; as in kernels.py
    BLOCKS = 4,         // on a multiprocessor at once, as in kernels.py; more leave few registers
    GROUP = 8,          // inputs loaded before the first is used
    BYTES_ASKED = 64,   // that a thread has under way at least, where there are enough
    VECTOR_BYTES = 16,  // the widest load and store
};

// Neighbouring elements.
template <typename T, int WIDTH>
struct Pack {
    T at[WIDTH];
};

// One load or store moves a whole pack. Loads of CUDA's vector types are wide whatever surrounds
// them. Stores are not: here the compiler would store word by word, so they are written out.
template <int BYTES>
struct Moved;
template <>
struct Moved<1> {
    using Type = unsigned char;
};
template <>
struct Moved<2> {
    using Type = unsigned short;
};
template <>
struct Moved<4> {
    using Type = unsigned;
};
template <>
struct Moved<8> {
    using Type = uint2;
};
template <>
struct Moved<16> {
    using Type = uint4;
};

template <typename T>
__device__ __forceinline__ void put(T* to, T value) {
    *to = value;
}
#ifndef ALLFOLD_ON_HOST
__device__ __forceinline__ void put(uint2* to, uint2 value) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)),
                 "r"(value.x), "r"(value.y)
                 : "memory");
}
__device__ __forceinline__ void put(uint4* to, uint4 value) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
                 "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
                 : "memory");
}
#endif

template <typename T, int WIDTH>
__device__ __forceinline__ Pack<T, WIDTH> load(const T* from) {
    using Whole = typename Moved<sizeof(T) * WIDTH>::Type;
    const Whole whole = *reinterpret_cast<const Whole*>(from);
    Pack<T, WIDTH> pack;
    memcpy(&pack, &whole, sizeof pack);
    return pack;
}

template <typename T, int WIDTH>
__device__ __forceinline__ void store(T* to, const Pack<T, WIDTH>& pack) {
    typename Moved<sizeof(T) * WIDTH>::Type whole;
    memcpy(&whole, &pack, sizeof pack);
    put(reinterpret_cast<decltype(whole)*>(to), whole);
}

template <typename Given, typename Kept, typename Written, typename Op, int INPUTS, bool SCALED,
          bool DIVIDED>
struct Fold {
    enum : int {
        LARGEST = sizeof(Given) > sizeof(Written) ? sizeof(Given) : sizeof(Written),
        // Narrow types that become wider ones are loaded in smaller packs, so that the stores of a
        // warp are contiguous.
        WIDTH = VECTOR_BYTES / LARGEST,
        FIRST = INPUTS < GROUP ? INPUTS : GROUP,
        REST = (INPUTS - FIRST) % GROUP,
        UNDER_WAY = FIRST * WIDTH * sizeof(Given),
        PACKS = UNDER_WAY >= BYTES_ASKED ? 1 : BYTES_ASKED / UNDER_WAY,
    };

    const Arguments<INPUTS>& arguments;

    __device__ __forceinline__ const Given* input(int index) const {
        return static_cast<const Given*>(arguments.inputs[index]);
    }

    __device__ __forceinline__ Kept taken(Given given) const {
        return Arithmetic<SCALED>::scale(Convert<Kept, Given>::apply(given), arguments.factor);
    }

    // Folds inputs begin .. begin + COUNT into kept; the very first input becomes it.
    template <int COUNT, int ELEMENTS, int AT_ONCE, bool BEGINS>
    __device__ __forceinline__ void take(Pack<Kept, ELEMENTS> (&kept)[AT_ONCE], int begin,
                                         unsigned long long at, unsigned long long step) const {
        Pack<Given, ELEMENTS> loaded[COUNT > 0 ? COUNT : 1][AT_ONCE];
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
#pragma unroll
            for (int p = 0; p < AT_ONCE; ++p) 
                loaded[i][p] = load<Given, ELEMENTS>(input(begin + i) + at + p * step);
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
#pragma unroll
            for (int p = 0; p < AT_ONCE; ++p)
#pragma unroll
                for (int e = 0; e < ELEMENTS; ++e) {
                    const Kept next = taken(loaded[i][p].at[e]);
                    kept[p].at[e] = BEGINS && i == 0 ? next : Op::apply(kept[p].at[e], next);
                }
    }

    // Folds AT_ONCE packs, the first at element at, the others each step elements further.
    template <int ELEMENTS, int AT_ONCE>
    __device__ __forceinline__ void run(unsigned long long at, unsigned long long step) const {
        Pack<Kept, ELEMENTS> kept[AT_ONCE];
        take<FIRST, ELEMENTS, AT_ONCE, true>(kept, 0, at, step);
#pragma unroll 1
        for (int begin = FIRST; begin < INPUTS - REST; begin += GROUP)
            take<GROUP, ELEMENTS, AT_ONCE, false>(kept, begin, at, step);
        take<REST, ELEMENTS, AT_ONCE, false>(kept, INPUTS - REST, at, step);
        finish(kept, at, step);
    }

    template <int ELEMENTS, int AT_ONCE>
    __device__ __forceinline__ void finish(const Pack<Kept, ELEMENTS> (&kept)[AT_ONCE],
                                          unsigned long long at, unsigned long long step) const {
        Pack<Written, ELEMENTS> written[AT_ONCE];
#pragma unroll
        for (int p = 0; p < AT_ONCE; ++p)
#pragma unroll
            for (int e = 0; e < ELEMENTS; ++e)
                written[p].at[e] = Convert<Written, Kept>::apply(
                    Arithmetic<DIVIDED>::divide(kept[p].at[e], arguments.divisor));
#pragma unroll 4
        for (int o = 0; o < static_cast<int>(arguments.targets); ++o) {
            Written* const to = static_cast<Written*>(arguments.outputs[o]) + at;
#pragma unroll
            for (int p = 0; p < AT_ONCE; ++p)
                store(to + p * step, written[p]);
        }
    }

    // The share of one thread: several packs at once, then the packs left, then single elements.
    __device__ __forceinline__ void share() const {
        using Count = unsigned long long;
        const Count numel = arguments.numel, head = arguments.head;
        const Count threads = static_cast<Count>(gridDim.x) * blockDim.x;
        const Count thread = static_cast<Count>(blockIdx.x) * blockDim.x + threadIdx.x;
        const Count packs = (numel - head) / WIDTH;
        Count pack = thread;
        if constexpr (PACKS > 1)
            for (; pack + (PACKS - 1) * threads < packs; pack += PACKS * threads)
                run<WIDTH, PACKS>(head + pack * WIDTH, threads * WIDTH);
        for (; pack < packs; pack += threads) run<WIDTH, 1>(head + pack * WIDTH, 0);
        const Count packed = packs * WIDTH;
        for (Count single = thread; single < numel - packed; single += threads)
            run<1, 1>(single < head ? single : single + packed, 0);
    }
};

#define ALLFOLD_PASTE(left, right) left##right
#define ALLFOLD_TYPE(label) ALLFOLD_PASTE(type_, label)
#define ALLFOLD_REDUCTION(label) ALLFOLD_PASTE(op_, label)

#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    ALLFOLD_NAME(const Arguments<ALLFOLD_INPUTS> __grid_constant__ arguments) {
    Fold<ALLFOLD_TYPE(ALLFOLD_GIVEN), ALLFOLD_TYPE(ALLFOLD_KEPT), ALLFOLD_TYPE(ALLFOLD_WRITTEN),
         ALLFOLD_REDUCTION(ALLFOLD_OP), ALLFOLD_INPUTS, ALLFOLD_SCALED, ALLFOLD_DIVIDED>{arguments}
        .share();
}
