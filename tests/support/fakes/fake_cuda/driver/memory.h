// Addresses of devices, and what may be done with them.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <iterator>
#include <memory>
#include <vector>

#include "streams.h"

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
