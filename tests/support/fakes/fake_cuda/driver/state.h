// What there is: contexts, streams, events, memory, modules; one driver for the process.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "settings.h"
#include "types.h"

using Lock = std::unique_lock<std::mutex>;

struct Stream;
struct Context;

// A point in the work of a stream: reached when so many operations are done.
struct Point {
    std::shared_ptr<Stream> stream;
    uint64_t number = 0;
};

struct Operation {
    std::function<CUresult()> work;  // runs without the lock
    std::vector<Point> after;
};

struct Stream {
    Context* context;
    bool blocking;  // has an order with the legacy default stream
    std::mt19937 dawdling;
    std::deque<Operation> queue;
    uint64_t given = 0, done = 0;
    bool closed = false;
};

struct Event {
    Context* context;
    Point point;  // without a stream: never recorded
};

// Memory that has no address yet, or several: cuMemCreate's. Destroyed with the driver's lock held.
struct Physical {
    int fd;
    size_t size;
    int device;    // physical
    bool counted;  // as memory of this process
    bool shareable;

    Physical(int fd, size_t size, int device, bool counted, bool shareable)
        : fd(fd), size(size), device(device), counted(counted), shareable(shareable) {}
    Physical(const Physical&) = delete;
    void close_file();
    ~Physical();
};

// Memory that has an address in this process.
struct Allocation {
    char* base;
    size_t size;
    int device = 0;  // physical
    // Of cuMemAlloc:
    Context* context = nullptr;
    void* mapping = nullptr;  // with the pages around it
    size_t mapped = 0;
    // Of cuMemMap:
    std::shared_ptr<Physical> physical;
    std::set<int> users;    // physical devices, of cuMemSetAccess
    bool unmapped = false;  // what still runs there ends first

    ~Allocation() {
        if (mapping) munmap(mapping, mapped);
    }
};

struct Reserved {
    char* base;
    size_t size;
};

struct HostRange {
    size_t size;
    int ordinal;
};

struct Module {
    Context* context;
    std::string image;
};

struct Function {
    std::shared_ptr<Module> module;
    void (*run)(unsigned grid, unsigned block, const void* arguments);
    size_t arguments;
};

struct Context {
    int ordinal;   // in this process
    int physical;  // on this machine
    Handle handle = nullptr;
    int retained = 0;
    std::shared_ptr<Stream> legacy;
    std::vector<std::shared_ptr<Stream>> streams;  // until they are drained, legacy among them
    std::set<int> peers;                           // physical devices whose memory kernels may use
};

// Handles are numbers that are never used twice, so that a stale one is always known as such.
static Handle new_handle() {
    static std::atomic<uintptr_t> last{0xfacade000000};
    return reinterpret_cast<Handle>(last += 16);
}

template <typename T>
class Table {
  public:
    Handle add(std::shared_ptr<T> what) {
        const Handle handle = new_handle();
        live_[handle] = std::move(what);
        return handle;
    }

    std::shared_ptr<T> find(Handle handle) const {
        const auto found = live_.find(handle);
        return found == live_.end() ? nullptr : found->second;
    }

    bool remove(Handle handle) { return live_.erase(handle) > 0; }

    void remove_where(const std::function<bool(const T&)>& condition) {
        for (auto each = live_.begin(); each != live_.end();)
            each = condition(*each->second) ? live_.erase(each) : std::next(each);
    }

  private:
    std::unordered_map<Handle, std::shared_ptr<T>> live_;
};

struct Driver {
    std::mutex mutex;  // of everything below
    std::condition_variable changed;
    Settings settings;
    std::atomic<bool> initialised{false};
    CUresult sticky = SUCCESS;
    long executed = 0;
    unsigned streams_made = 0;
    std::vector<std::shared_ptr<Context>> contexts;  // by ordinal
    Table<Context> context_handles;
    Table<Stream> streams;
    Table<Event> events;
    Table<Module> modules;
    Table<Function> functions;
    std::map<CUdeviceptr, std::shared_ptr<Allocation>> allocations;
    Table<Physical> physical;
    std::map<CUdeviceptr, Reserved> reserved;
    std::map<uintptr_t, HostRange> registered;
    std::map<int, size_t> used;  // bytes by physical device
};

// Never destroyed: the threads of streams run until the process has gone.
static Driver& driver() {
    static Driver* const only = new Driver;
    return *only;
}

static thread_local std::vector<Context*> current;

static CUresult work_in_context(const std::function<CUresult(Lock&, Context&)>& work) {
    Driver& all = driver();
    if (!all.initialised) return ERROR_NOT_INITIALIZED;
    Lock held(all.mutex);
    if (all.sticky) return all.sticky;
    if (current.empty()) return ERROR_INVALID_CONTEXT;
    if (!current.back()->retained) return ERROR_CONTEXT_IS_DESTROYED;
    return work(held, *current.back());
}

// The device's number in this process, or -1 where it sees none of this physical number.
static int ordinal_of(int physical) {
    for (const auto& context : driver().contexts)
        if (context->physical == physical) return context->ordinal;
    return -1;
}

static Context* context_of(CUdevice device) {
    const auto& contexts = driver().contexts;
    return device >= 0 && device < int(contexts.size()) ? contexts[size_t(device)].get() : nullptr;
}
