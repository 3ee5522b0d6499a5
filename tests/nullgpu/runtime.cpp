// A GPU that computes nothing: CUDA's runtime.
//
// What it is: the functions of CUDA's runtime, its driver (driver.cpp), cuBLAS, NCCL and NVML (libraries.cpp) that torch
// calls, as one library that is loaded before the real ones. It reports H100s. Kernels and matrix products do nothing,
// memory on the device is memory of the host that is never touched, and everything is finished when it is launched.
// What is copied from the device is 0, except for short copies that come back as they went.
//
// Why it is here: a CUDA build of torch runs train.py on it without a GPU, with torch's own dispatcher, caching
// allocator, autograd, inductor, Triton's compiler, streams and process groups. It shows crashes, errors of the
// compiler, waits of the host, which kernels and collectives are launched in which order, and how much memory the
// allocator takes.
//
// What it cannot show: numbers (all are 0), times, races between streams, and whether ranks call matching collectives:
// NCCL's calls return at once. A path that is decided by a number on the device takes one side only. cuDNN is not pretended; TORCH_CUDNN_SDPA_DEPRIORITIZED=1 makes attention choose another kernel.
//
// What it costs: as much memory of the host as torch itself, and the time of the compilers.
#include "state.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <cstdarg>
#include <cstring>
#include <ctime>
#include <iterator>
#include <map>
#include <string>
#include <unordered_map>

namespace pretended {

static std::mutex mutex;
static size_t used = 0;
static thread_local int device = 0;

size_t bytes_used() { return used; }

bool take(size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  if (used + bytes > capacity()) return false;
  used += bytes;
  return true;
}

void give_back(size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  used -= bytes;
}

void* map(size_t bytes) {
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return address == MAP_FAILED ? nullptr : address;
}

struct Range {
  size_t bytes;
  Kind kind;
};
static std::map<const char*, Range>& ranges() {
  static auto* by_address = new std::map<const char*, Range>;  // outlives the destructors of libraries
  return *by_address;
}
static std::mutex ranges_mutex;

void remember(const void* address, size_t bytes, Kind kind) {
  std::lock_guard<std::mutex> lock(ranges_mutex);
  ranges()[static_cast<const char*>(address)] = {bytes, kind};
}
size_t forget(const void* address) {
  std::lock_guard<std::mutex> lock(ranges_mutex);
  auto found = ranges().find(static_cast<const char*>(address));
  if (found == ranges().end()) return 0;
  size_t bytes = found->second.bytes;
  ranges().erase(found);
  return bytes;
}
Kind kind_of(const void* pointer) {
  const char* address = static_cast<const char*>(pointer);
  std::lock_guard<std::mutex> lock(ranges_mutex);
  auto after = ranges().upper_bound(address);
  if (after == ranges().begin()) return Kind::kNeither;
  auto& [begin, range] = *std::prev(after);
  return address < begin + range.bytes ? range.kind : Kind::kNeither;
}

int current_device() { return device; }
void set_device(int number) { device = number; }

void log(const char* format, ...) {
  // Opened once and never closed: threads of torch still launch while the process ends.
  static FILE* file = getenv("PRETENDED_LOG") ? fopen(getenv("PRETENDED_LOG"), "a") : nullptr;
  if (!file) return;
  std::lock_guard<std::mutex> lock(mutex);
  va_list arguments;
  va_start(arguments, format);
  vfprintf(file, format, arguments);
  va_end(arguments);
  fputc('\n', file);
  fflush(file);
}

// A line of the caller's own: what the lines after it belong to.
EXPORTED void pretended_mark(const char* text) { log("mark %s", text); }

int attribute(int which) {
  switch (which) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 48 << 10;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 227 << 10;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 228 << 10;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrClockRate: return 1980000;        // kHz
    case cudaDevAttrMemoryClockRate: return 2619000;  // kHz
    case cudaDevAttrGlobalMemoryBusWidth: return 5120;
    case cudaDevAttrMultiProcessorCount: return kMultiprocessors;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrL2CacheSize: return 50 << 20;
    case cudaDevAttrComputeCapabilityMajor: return kMajor;
    case cudaDevAttrComputeCapabilityMinor: return kMinor;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrCooperativeLaunch:
    case 102:  // CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, which the runtime has no name for
    case 103:  // CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
      return 1;
    default: return 0;
  }
}

}  // namespace pretended

using namespace pretended;

// ---------------------------------------------------------------------------------------------------------------------
// Kernels: compiled into torch's libraries, which register them by the address of a function of the host

static std::unordered_map<const void*, std::string>& kernel_names() {
  static auto* names = new std::unordered_map<const void*, std::string>;  // outlives the destructors of libraries
  return *names;
}

static cudaError_t launch(const void* kernel, cudaStream_t stream) {
  auto found = kernel_names().find(kernel);
  log("kernel %s stream %p", found == kernel_names().end() ? "?" : found->second.c_str(), (void*)stream);
  return cudaSuccess;
}

EXPORTED void** __cudaRegisterFatBinary(void*) {
  static void* handle[1];
  return handle;
}
EXPORTED void __cudaRegisterFatBinaryEnd(void**) {}
EXPORTED void __cudaUnregisterFatBinary(void**) {}
EXPORTED char __cudaInitModule(void**) { return 1; }
EXPORTED void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
EXPORTED void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*, void*, void*,
                                     void*, int*) {
  kernel_names()[function] = name;
}

// `kernel<<<grid, block, shared, stream>>>(...)` pushes the four, and the function that it calls pops them.
struct Configuration {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
static thread_local Configuration pushed;

EXPORTED unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  pushed = {grid, block, shared, stream};
  return 0;
}
EXPORTED cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = pushed.grid;
  *block = pushed.block;
  *shared = pushed.shared;
  *static_cast<void**>(stream) = pushed.stream;
  return cudaSuccess;
}
EXPORTED cudaError_t __cudaGetKernel(void** kernel, const void* function) {
  *kernel = const_cast<void*>(function);
  return cudaSuccess;
}
EXPORTED cudaError_t __cudaLaunchKernel(void* kernel, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return launch(kernel, stream);
}
EXPORTED cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return launch(kernel, stream);
}
EXPORTED cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return launch(kernel, stream);
}
EXPORTED cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void**) {
  return launch(kernel, config->stream);
}
EXPORTED cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->binaryVersion = attributes->ptxVersion = 10 * kMajor + kMinor;
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->maxDynamicSharedSizeBytes = 48 << 10;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
EXPORTED cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int threads, size_t) {
  *blocks = threads > 0 && threads < 1024 ? 2048 / threads : 2;
  if (*blocks > 32) *blocks = 32;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* kernel,
                                                                            int threads, size_t shared, unsigned) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, kernel, threads, shared);
}
EXPORTED cudaError_t cudaGetSymbolAddress(void** address, const void*) {
  static char room[1 << 20];
  *address = room;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) {
  return cudaSuccess;
}

// ---------------------------------------------------------------------------------------------------------------------
// Devices and errors

static thread_local cudaError_t last_error = cudaSuccess;

static cudaError_t fail(cudaError_t error) {
  last_error = error;
  return error;
}

EXPORTED cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
EXPORTED cudaError_t cudaPeekAtLastError() { return last_error; }
EXPORTED const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory" : "not pretended";
}
EXPORTED const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }

EXPORTED cudaError_t cudaGetDeviceCount(int* count) {
  *count = num_devices();
  return cudaSuccess;
}
EXPORTED cudaError_t cudaGetDevice(int* device) {
  *device = current_device();
  return cudaSuccess;
}
EXPORTED cudaError_t cudaSetDevice(int device) {
  set_device(device);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }
EXPORTED cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  *value = attribute(which);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  memset(properties, 0, sizeof *properties);
  strcpy(properties->name, "NVIDIA H100 80GB HBM3");  // what `titanlite.observe` has a peak for
  properties->uuid.bytes[0] = static_cast<char>(device);
  properties->totalGlobalMem = capacity();
  properties->major = kMajor;
  properties->minor = kMinor;
  properties->multiProcessorCount = kMultiprocessors;
  properties->warpSize = attribute(cudaDevAttrWarpSize);
  properties->maxThreadsPerBlock = attribute(cudaDevAttrMaxThreadsPerBlock);
  for (int i = 0; i < 3; ++i) {
    properties->maxThreadsDim[i] = attribute(cudaDevAttrMaxBlockDimX + i);
    properties->maxGridSize[i] = attribute(cudaDevAttrMaxGridDimX + i);
  }
  properties->sharedMemPerBlock = attribute(cudaDevAttrMaxSharedMemoryPerBlock);
  properties->sharedMemPerBlockOptin = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  properties->sharedMemPerMultiprocessor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  properties->regsPerBlock = attribute(cudaDevAttrMaxRegistersPerBlock);
  properties->regsPerMultiprocessor = attribute(cudaDevAttrMaxRegistersPerMultiprocessor);
  properties->maxThreadsPerMultiProcessor = attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
  properties->maxBlocksPerMultiProcessor = attribute(cudaDevAttrMaxBlocksPerMultiprocessor);
  properties->l2CacheSize = attribute(cudaDevAttrL2CacheSize);
  properties->memoryBusWidth = attribute(cudaDevAttrGlobalMemoryBusWidth);
  properties->totalConstMem = 64 << 10;
  properties->concurrentKernels = properties->cooperativeLaunch = properties->unifiedAddressing = 1;
  properties->pciBusID = device;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  snprintf(text, length, "0000:%02x:00.0", device);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
EXPORTED cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaDeviceSynchronize() {
  log("wait for the device");
  return cudaSuccess;
}
EXPORTED cudaError_t cudaProfilerStart() { return cudaSuccess; }
EXPORTED cudaError_t cudaProfilerStop() { return cudaSuccess; }

// Functions of the driver by name, as torch and the runtime of other libraries ask for them: the newest version first.
EXPORTED cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                      cudaDriverEntryPointQueryResult* result) {
  *function = dlsym(RTLD_DEFAULT, (std::string(name) + "_v2").c_str());
  if (!*function) *function = dlsym(RTLD_DEFAULT, name);
  if (!*function) fprintf(stderr, "the pretended GPU has no %s\n", name);
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// ---------------------------------------------------------------------------------------------------------------------
// Memory

EXPORTED cudaError_t cudaMalloc(void** address, size_t bytes) {
  if (!take(bytes)) return fail(cudaErrorMemoryAllocation);
  *address = map(bytes);
  if (!*address) {
    give_back(bytes);
    return fail(cudaErrorMemoryAllocation);
  }
  remember(*address, bytes, Kind::kDevice);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaFree(void* address) {
  if (size_t bytes = forget(address)) {
    munmap(address, bytes);
    give_back(bytes);
  }
  return cudaSuccess;
}
EXPORTED cudaError_t cudaMallocAsync(void** address, size_t bytes, cudaStream_t) { return cudaMalloc(address, bytes); }
EXPORTED cudaError_t cudaFreeAsync(void* address, cudaStream_t) { return cudaFree(address); }
EXPORTED cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = capacity();
  *free = capacity() - bytes_used();
  return cudaSuccess;
}
EXPORTED cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  *pool = nullptr;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) {
  log("pin %zu", bytes);
  *address = map(bytes);
  if (!*address) return fail(cudaErrorMemoryAllocation);
  remember(*address, bytes, Kind::kPinned);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaFreeHost(void* address) {
  if (size_t bytes = forget(address)) munmap(address, bytes);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned) {
  remember(address, bytes, Kind::kPinned);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaHostUnregister(void* address) {
  forget(address);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  memset(attributes, 0, sizeof *attributes);
  Kind kind = kind_of(address);
  attributes->type = kind == Kind::kDevice   ? cudaMemoryTypeDevice
                     : kind == Kind::kPinned ? cudaMemoryTypeHost
                                             : cudaMemoryTypeUnregistered;
  attributes->device = current_device();
  attributes->devicePointer = attributes->hostPointer = const_cast<void*>(address);
  return cudaSuccess;
}

// What is read from the device is 0, for numbers that mean nothing are better all alike: token ids that are read as floats
// in memory that is used again would be NaN in one run and not in the next. Except for what the host wrote there at the
// same address in the same size, if it is short: counts that only travel through a collective come back.
constexpr size_t kShort = 4096;
static std::unordered_map<const void*, std::string>& written() {
  static auto* by_address = new std::unordered_map<const void*, std::string>;
  return *by_address;
}
static std::mutex written_mutex;

static void copy(void* to, const void* from, size_t bytes, const char* how) {
  bool to_device = kind_of(to) == Kind::kDevice;
  bool from_device = kind_of(from) == Kind::kDevice;
  const char* where = !to_device ? from_device ? "from the device" : "on the host"
                      : from_device ? "on the device" : "to the device";
  log("copy %s, %s: %zu", where, how, bytes);
  if (!to_device && !from_device) {
    memmove(to, from, bytes);
    return;
  }
  std::lock_guard<std::mutex> lock(written_mutex);
  if (to_device) {
    written().erase(to);
    if (!from_device && bytes <= kShort) written()[to].assign(static_cast<const char*>(from), bytes);
    return;
  }
  auto found = written().find(from);
  if (found != written().end() && found->second.size() == bytes)
    memcpy(to, found->second.data(), bytes);
  else
    memset(to, 0, bytes);
}
EXPORTED cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  copy(to, from, bytes, "waits");
  return cudaSuccess;
}
EXPORTED cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  copy(to, from, bytes, "in a stream");
  return cudaSuccess;
}
EXPORTED cudaError_t cudaMemcpy2DAsync(void*, size_t, const void*, size_t, size_t width, size_t height, cudaMemcpyKind,
                                       cudaStream_t) {
  log("copy rows: %zu", width * height);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaMemcpyPeerAsync(void*, int, const void*, int, size_t bytes, cudaStream_t) {
  log("copy to a peer: %zu", bytes);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaMemset(void*, int, size_t) { return cudaSuccess; }  // untouched memory is zero already
EXPORTED cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t) { return cudaSuccess; }

// ---------------------------------------------------------------------------------------------------------------------
// Streams and events: what is launched is finished. Graphs are not captured.

struct Stream {
  int priority;
};
struct Event {
  double time;
};

static double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + 1e-9 * time.tv_nsec;
}

EXPORTED cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  *stream = reinterpret_cast<cudaStream_t>(new Stream{priority});
  return cudaSuccess;
}
EXPORTED cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
EXPORTED cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
EXPORTED cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }  // torch keeps its streams to the end
EXPORTED cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  bool own = stream > cudaStreamPerThread;  // not one of the handles that mean the default streams
  *priority = own ? reinterpret_cast<Stream*>(stream)->priority : 0;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
EXPORTED cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  log("wait for stream %p", (void*)stream);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
EXPORTED cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                              cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                              size_t*) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
EXPORTED cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) { return fail(cudaErrorNotSupported); }
EXPORTED cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* data, unsigned) {
  callback(stream, cudaSuccess, data);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) {
  function(data);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new Event{now()});
  return cudaSuccess;
}
EXPORTED cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
EXPORTED cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<Event*>(event);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  reinterpret_cast<Event*>(event)->time = now();
  return cudaSuccess;
}
EXPORTED cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
EXPORTED cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
EXPORTED cudaError_t cudaEventSynchronize(cudaEvent_t) {
  log("wait for an event");
  return cudaSuccess;
}
EXPORTED cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  *milliseconds = 1000 * (reinterpret_cast<Event*>(end)->time - reinterpret_cast<Event*>(begin)->time);
  return cudaSuccess;
}
