// Calls: streams and events.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>

#include "devices_api.h"

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
