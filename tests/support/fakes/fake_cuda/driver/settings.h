// What a process may set, in its environment.
#pragma once

#include <cstdlib>
#include <cstring>
#include <random>
#include <sstream>
#include <string>
#include <vector>

static long number_setting(const char* name, long otherwise) {
    const char* text = getenv(name);
    return text && *text ? strtol(text, nullptr, 10) : otherwise;
}

static bool word_setting(const char* name, const char* word) {
    const char* text = getenv(name);
    return text && !strcmp(text, word);
}

struct Settings {
    int devices = static_cast<int>(number_setting("FAKE_CUDA_DEVICES", 1));
    bool peers = !word_setting("FAKE_CUDA_PEERS", "none");
    bool ipc = number_setting("FAKE_CUDA_IPC", 1);
    bool may_register = number_setting("FAKE_CUDA_REGISTER", 1);
    bool words = number_setting("FAKE_CUDA_STREAM_WORDS", 1);
    size_t memory = static_cast<size_t>(number_setting("FAKE_CUDA_MEMORY_MB", 4096)) << 20;
    long delay_us = number_setting("FAKE_CUDA_DELAY_US", 200);
    long seed = number_setting("FAKE_CUDA_SEED", std::random_device()() & 0x7fffffff);
    bool release_waits = number_setting("FAKE_CUDA_RELEASE_WAITS", 0);
    long old_device = number_setting("FAKE_CUDA_OLD_DEVICE", -1);
    long hang_after = number_setting("FAKE_CUDA_HANG_DEVICE_AFTER", -1);
};

using Uuid = unsigned char[16];

static void uuid_of(int physical, Uuid& uuid) {
    static const Uuid all = {0xfa, 0x4e, 0xc0, 0xda, 0, 0, 0x40, 0, 0x80, 0, 0, 0, 0, 0, 0, 0};
    memcpy(uuid, all, sizeof all);
    uuid[15] = static_cast<unsigned char>(physical);
}

// As the real driver does, what comes behind an unknown device is not seen. UUIDs are not known.
static std::vector<int> visible_devices(int devices) {
    std::vector<int> visible;
    const char* text = getenv("CUDA_VISIBLE_DEVICES");
    if (!text) {
        for (int device = 0; device < devices; ++device) visible.push_back(device);
        return visible;
    }
    std::istringstream names(text);
    for (std::string name; std::getline(names, name, ',');) {
        char* end = nullptr;
        const long device = strtol(name.c_str(), &end, 10);
        if (name.empty() || *end || device < 0 || device >= devices) break;
        visible.push_back(int(device));
    }
    return visible;
}
