// Calls: errors and symbols.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <string>

#include "settings.h"
#include "types.h"

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
