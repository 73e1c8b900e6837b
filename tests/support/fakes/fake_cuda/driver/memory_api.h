// Calls: memory that is allocated, memory of the host, copies.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <iterator>
#include <memory>
#include <vector>

#include "streams_api.h"

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
    return work_in_context([&](Lock& held, Context& context) {
        if (driver().settings.release_waits) wait_for(held, all_work_of(context));
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
