// Streams: threads that do what they are given, in its order, late.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "state.h"

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
