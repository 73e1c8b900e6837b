// The driver's types and numbers, as cuda.h has them.
#pragma once

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
