// Calls: memory that is made, placed and opened apart, so that processes can share it.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <thread>

#include "memory_api.h"

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

// Unless it is asked to, nothing waits for work that is still to come. What runs there already does so to its end, lest
// this process crash; it is wrong nevertheless.
API cuMemUnmap(CUdeviceptr address, size_t size) {
    return work_in_context([&](Lock& held, Context& context) -> CUresult {
        if (driver().settings.release_waits) wait_for(held, all_work_of(context));
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
