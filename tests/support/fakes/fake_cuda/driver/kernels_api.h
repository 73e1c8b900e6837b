// Calls: kernels, in the C++ compiler's version of what NVRTC would have compiled.
#pragma once

#include <dlfcn.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "streams_api.h"

extern char** environ;

static std::string text_of(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

static std::string hash_of(const std::string& text) {
    uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
    for (const unsigned char byte : text) hash = (hash ^ byte) * 0x100000001b3;
    char hex[17];
    snprintf(hex, sizeof hex, "%016llx", static_cast<unsigned long long>(hash));
    return hex;
}

// cuda_on_host.h says how it is compiled: the eight fields of the name are eight macros.
static std::vector<std::string> compiler_command(const std::string& name, const std::string& source,
                                                 const std::string& header) {
    static const char* const macros[] = {"GIVEN", "KEPT", "WRITTEN", "OP",
                                         "INPUTS", "SCALED", "DIVIDED"};
    std::vector<std::string> command = {
        "g++", "-shared", "-fPIC", "-O1", "-std=c++17", "-ffp-contract=off", "-fno-strict-aliasing",
        "-DALLFOLD_SOURCE=\"" + source + "\"", "-DALLFOLD_NAME=" + name};
    std::istringstream fields(name);
    std::string field;
    std::getline(fields, field, '_');
    for (const char* macro : macros) {
        if (!std::getline(fields, field, '_') || field.empty()) return {};
        command.push_back("-DALLFOLD_" + std::string(macro) + "=" + field);
    }
    if (std::getline(fields, field)) return {};
    command.insert(command.end(), {"-x", "c++", header});
    return command;
}

static bool compile(std::vector<std::string> command, const std::string& path) {
    static std::atomic<int> last{0};
    const std::string part =
        path + "." + std::to_string(getpid()) + "." + std::to_string(++last) + ".part";
    command.insert(command.end(), {"-o", part});
    std::vector<char*> arguments;
    for (auto& each : command) arguments.push_back(each.data());
    arguments.push_back(nullptr);
    pid_t compiler = 0;
    if (posix_spawnp(&compiler, "g++", nullptr, nullptr, arguments.data(), environ)) return false;
    while (waitpid(compiler, nullptr, 0) < 0 && errno == EINTR) {}
    return !rename(part.c_str(), path.c_str());  // without the compiler's success there is no file
}

// Several processes may compile the same kernel at once; the last one's file stays.
static bool load_kernel(const std::string& name, Function& function) {
    const char* folder = getenv("FAKE_CUDA_CACHE");
    const char* files = getenv("FAKE_CUDA_SOURCES");
    const std::string cache = folder ? folder : "", sources = files ? files : "";
    const size_t middle = sources.find(':');
    if (middle == std::string::npos || cache.empty()) {
        fprintf(stderr, "fake CUDA: FAKE_CUDA_SOURCES or FAKE_CUDA_CACHE is not set\n");
        return false;
    }
    const std::string source = sources.substr(0, middle), header = sources.substr(middle + 1);
    const auto command = compiler_command(name, source, header);
    if (command.empty()) return false;
    std::string key = text_of(source) + text_of(header);  // wherever they are
    for (const auto& each : compiler_command(name, "", "")) key += each + "\n";
    const std::string path = cache + "/" + name + "-" + hash_of(key) + ".so";
    if (access(path.c_str(), R_OK) && !compile(command, path)) return false;
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "fake CUDA: %s\n", dlerror());
        return false;
    }
    function.run = reinterpret_cast<decltype(function.run)>(dlsym(library, "run_kernel"));
    const auto* size =
        static_cast<const unsigned long long*>(dlsym(library, "kernel_arguments_size"));
    function.arguments = size ? *size : 0;
    return function.run && size;
}

// An image is PTX, which is text, or an ELF file, which says itself how long it is.
static std::string image_at(const void* image) {
    const char* bytes = static_cast<const char*>(image);
    if (memcmp(bytes, "\177ELF", 4)) return bytes;
    uint64_t sections;
    uint16_t entry, entries;
    memcpy(&sections, bytes + 40, sizeof sections);
    memcpy(&entry, bytes + 58, sizeof entry);
    memcpy(&entries, bytes + 60, sizeof entries);
    return {bytes, sections + size_t(entry) * entries};
}

API cuModuleLoadData(Handle* module, const void* image) {
    return work_in_context([&](Lock&, Context& context) -> CUresult {
        if (!image || !*static_cast<const char*>(image)) return ERROR_INVALID_IMAGE;
        *module = driver().modules.add(std::make_shared<Module>(Module{&context, image_at(image)}));
        return SUCCESS;
    });
}

API cuModuleLoadDataEx(Handle* module, const void* image, unsigned, void*, void**) {
    return cuModuleLoadData(module, image);
}

API cuModuleUnload(Handle module) {
    return work_in_context([&](Lock&, Context&) -> CUresult {
        const auto found = driver().modules.find(module);
        if (!found) return ERROR_INVALID_HANDLE;
        driver().functions.remove_where([&](const Function& each) { return each.module == found; });
        driver().modules.remove(module);
        return SUCCESS;
    });
}

API cuModuleGetFunction(Handle* function, Handle module, const char* name) {
    return work_in_context([&](Lock& held, Context&) -> CUresult {
        const auto found = driver().modules.find(module);
        if (!found) return ERROR_INVALID_HANDLE;
        // What a compiler has made must have the kernel; tests may give any other text.
        const std::string& image = found->image;
        const bool compiled = image[0] == '\177' || image.find(".version") != std::string::npos;
        if (compiled && image.find(name) == std::string::npos) return ERROR_NOT_FOUND;
        auto made = std::make_shared<Function>();
        made->module = found;
        held.unlock();  // the compiler takes seconds
        const bool loaded = load_kernel(name, *made);
        held.lock();
        if (!loaded) return ERROR_NOT_FOUND;
        *function = driver().functions.add(made);
        return SUCCESS;
    });
}

// Put the CPU's addresses in the place of a kernel's; false where one may not be used.
static bool translate(const Context& context, std::vector<uint64_t>& words,
                      std::vector<Place>& places) {
    for (auto& word : words) {
        const bool host = word >= 0x100000000000 && word <= 0x7fffffffffff;
        if (!host && !is_device_address(word)) continue;
        places.push_back(place_of(word, 1));
        if (!reaches(context, places.back())) return false;
        word = reinterpret_cast<uintptr_t>(places.back().at);
    }
    return true;
}

API cuLaunchKernel(Handle function, unsigned grid, unsigned grid_y, unsigned grid_z, unsigned block,
                   unsigned block_y, unsigned block_z, unsigned, Handle stream, void** parameters,
                   void** extra) {
    return with_stream(stream, [&](Lock&, const std::shared_ptr<Stream>& found) {
        const Context& context = *found->context;
        const auto kernel = driver().functions.find(function);
        if (!kernel || kernel->module->context != &context || current.back() != &context)
            return ERROR_INVALID_HANDLE;
        // Kernels of one dimension, with one argument; more is not needed here.
        const bool plain = grid_y == 1 && grid_z == 1 && block_y == 1 && block_z == 1;
        if (!plain || !grid || !block || block > 1024 || !parameters || !parameters[0] || extra)
            return ERROR_INVALID_VALUE;
        std::vector<uint64_t> arguments(rounded(kernel->arguments, 8) / 8);
        memcpy(arguments.data(), parameters[0], kernel->arguments);
        push(found, [=, &context]() -> CUresult {
            Lock looking(driver().mutex);
            std::vector<uint64_t> words = arguments;
            std::vector<Place> places;
            if (!translate(context, words, places)) return ERROR_ILLEGAL_ADDRESS;
            return use(looking, places, [&] { kernel->run(grid, block, words.data()); });
        });
        return SUCCESS;
    });
}
