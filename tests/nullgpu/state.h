// What the files of the pretended GPU share. runtime.cpp says what it is.
#pragma once
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <mutex>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace pretended {

// What the driver reports of an H100 with 80 GB.
constexpr double kDefaultGib = 79.1;
constexpr int kMultiprocessors = 132;
constexpr int kMajor = 9, kMinor = 0;  // compute capability, of an H100
constexpr size_t kPage = 2u << 20;     // in which memory is mapped

inline double number(const char* variable, double otherwise) {
  const char* text = getenv(variable);
  return text ? atof(text) : otherwise;
}

inline int num_devices() { return static_cast<int>(number("PRETENDED_GPUS", 1)); }
inline size_t capacity() { return static_cast<size_t>(number("PRETENDED_GIB", kDefaultGib) * (1ull << 30)); }

// Bytes that this process has on its device; a process uses one.
size_t bytes_used();
bool take(size_t bytes);  // false: out of memory
void give_back(size_t bytes);

// Memory of the host that takes no room until it is touched, which no-op kernels never do.
void* map(size_t bytes);

// Addresses that are on the device or in pinned memory: torch asks about both.
enum class Kind { kNeither, kDevice, kPinned };
void remember(const void* address, size_t bytes, Kind kind);
size_t forget(const void* address);  // its bytes; 0 if it is not known
Kind kind_of(const void* address);

int current_device();
void set_device(int device);

// A line in the file that PRETENDED_LOG names, where it is set: a kernel, product, wait, copy or collective.
void log(const char* format, ...) __attribute__((format(printf, 1, 2)));

// The value of an attribute of the device; driver and runtime number them alike.
int attribute(int which);

}  // namespace pretended
