// Calls: devices and contexts.
#pragma once

#include <cstdio>
#include <functional>
#include <iterator>
#include <map>
#include <memory>

#include "memory.h"

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
    return about_device(device, [&](Context& context) {
        const auto found = values.find(attribute);
        *value = found == values.end() ? 0 : found->second;
        if (context.physical == driver().settings.old_device) {
            if (attribute == 75) *value = 6;
            if (attribute == 76) *value = 1;
        }
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
