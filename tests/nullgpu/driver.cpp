// A GPU that computes nothing: CUDA's driver, which torch asks for expandable segments and symmetric memory, and which
// Triton and inductor use to load and launch their kernels. See runtime.cpp.
#include "state.h"

#include <cuda.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <iterator>
#include <map>

using namespace pretended;

EXPORTED CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
EXPORTED CUresult cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "not pretended";
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuGetErrorName(CUresult error, const char** text) { return cuGetErrorString(error, text); }

// ---------------------------------------------------------------------------------------------------------------------
// Devices and their only context

static CUcontext the_context() {
  static char context;
  return reinterpret_cast<CUcontext>(&context);
}
EXPORTED CUresult cuDeviceGet(CUdevice* device, int number) {
  *device = number;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuDeviceGetCount(int* count) {
  *count = num_devices();
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuDeviceGetName(char* text, int length, CUdevice) {
  snprintf(text, length, "NVIDIA H100 80GB HBM3");
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice) {
  *value = attribute(which);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  memset(uuid, device, sizeof *uuid);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  *context = the_context();
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = the_context();
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
EXPORTED CUresult cuCtxPushCurrent(CUcontext) { return CUDA_SUCCESS; }
EXPORTED CUresult cuCtxPopCurrent(CUcontext* context) { return cuCtxGetCurrent(context); }
EXPORTED CUresult cuCtxGetDevice(CUdevice* device) {
  *device = current_device();
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
EXPORTED CUresult cuCtxGetLimit(size_t* value, CUlimit) {
  *value = 1024;
  return CUDA_SUCCESS;
}

// ---------------------------------------------------------------------------------------------------------------------
// Compiled kernels. A function is a pointer to its name.

static CUmodule the_module() {
  static char module;
  return reinterpret_cast<CUmodule>(&module);
}
static CUresult launch(CUfunction function, CUstream stream) {
  log("kernel %s stream %p", reinterpret_cast<const char*>(function), (void*)stream);
  return CUDA_SUCCESS;
}

EXPORTED CUresult cuModuleLoadData(CUmodule* module, const void*) {
  *module = the_module();
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuModuleLoadDataEx(CUmodule* module, const void*, unsigned, CUjit_option*, void**) {
  return cuModuleLoadData(module, nullptr);
}
EXPORTED CUresult cuModuleLoad(CUmodule* module, const char*) { return cuModuleLoadData(module, nullptr); }
EXPORTED CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
EXPORTED CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  *function = reinterpret_cast<CUfunction>(strdup(name));  // loaded once for each kernel, never unloaded by torch
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuFuncGetAttribute(int* value, CUfunction_attribute which, CUfunction) {
  *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : which == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : 0;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
EXPORTED CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
EXPORTED CUresult cuLaunchKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                 unsigned, CUstream stream, void**, void**) {
  return launch(function, stream);
}
EXPORTED CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned,
                                            unsigned, unsigned, CUstream stream, void**) {
  return launch(function, stream);
}
EXPORTED CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void**, void**) {
  return launch(function, config->hStream);
}
EXPORTED CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int, size_t) {
  *blocks = 2;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig*) {
  *clusters = 2;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                         const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                                         CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                         CUtensorMapFloatOOBfill) {
  return CUDA_SUCCESS;
}

// ---------------------------------------------------------------------------------------------------------------------
// Memory that is reserved, created and mapped in separate calls: expandable segments, and memory that ranks share.

struct Physical {
  size_t bytes;
  void* address = nullptr;  // where it is mapped
  int file = -1;            // once it is shared: the memory of a file without a name, which other processes map too
  int holders = 1;          // who must release it: the creator, each mapping, each import
};
static std::mutex physical_mutex;

static Physical* physical(CUmemGenericAllocationHandle handle) { return reinterpret_cast<Physical*>(handle); }

static void* map_at(CUdeviceptr address, const Physical* memory) {
  int flags = MAP_FIXED | MAP_NORESERVE | (memory->file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED);
  return mmap(reinterpret_cast<void*>(address), memory->bytes, PROT_READ | PROT_WRITE, flags, memory->file, 0);
}
static void release(Physical* memory) {
  if (--memory->holders) return;
  give_back(memory->bytes);
  if (memory->file >= 0) close(memory->file);
  delete memory;
}

EXPORTED CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*,
                                                CUmemAllocationGranularity_flags) {
  *bytes = kPage;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  void* reserved = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = reinterpret_cast<CUdeviceptr>(reserved);
  remember(reserved, bytes, Kind::kDevice);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  forget(reinterpret_cast<void*>(address));
  munmap(reinterpret_cast<void*>(address), bytes);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp*,
                              unsigned long long) {
  if (!take(bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = reinterpret_cast<CUmemGenericAllocationHandle>(new Physical{bytes});
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  std::lock_guard<std::mutex> lock(physical_mutex);
  release(physical(handle));
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle*, void*) { return CUDA_ERROR_NOT_SUPPORTED; }

// Which memory is mapped at an address: `cuMemUnmap` gets no handle.
static std::map<CUdeviceptr, Physical*>& mappings() {
  static auto* at = new std::map<CUdeviceptr, Physical*>;
  return *at;
}
EXPORTED CUresult cuMemMap(CUdeviceptr address, size_t, size_t, CUmemGenericAllocationHandle handle,
                           unsigned long long) {
  std::lock_guard<std::mutex> lock(physical_mutex);
  Physical* memory = physical(handle);
  if (map_at(address, memory) == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  memory->address = reinterpret_cast<void*>(address);
  ++memory->holders;
  mappings()[address] = memory;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
  std::lock_guard<std::mutex> lock(physical_mutex);
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE, flags, -1, 0);  // reserved still
  for (auto at = mappings().lower_bound(address); at != mappings().end() && at->first < address + bytes;) {
    release(at->second);
    at = mappings().erase(at);
  }
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }
EXPORTED CUresult cuMemGetAddressRange(CUdeviceptr* begin, size_t* bytes, CUdeviceptr address) {
  std::lock_guard<std::mutex> lock(physical_mutex);
  auto after = mappings().upper_bound(address);
  if (after == mappings().begin()) return CUDA_ERROR_NOT_FOUND;
  auto at = std::prev(after);
  if (begin) *begin = at->first;
  if (bytes) *bytes = at->second->bytes;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemExportToShareableHandle(void* out, CUmemGenericAllocationHandle handle,
                                               CUmemAllocationHandleType type, unsigned long long) {
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
  std::lock_guard<std::mutex> lock(physical_mutex);
  Physical* memory = physical(handle);
  if (memory->file < 0) {
    memory->file = memfd_create("pretended GPU", MFD_CLOEXEC);
    if (memory->file < 0 || ftruncate(memory->file, memory->bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    if (memory->address) map_at(reinterpret_cast<CUdeviceptr>(memory->address), memory);
  }
  *static_cast<int*>(out) = dup(memory->file);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* shared,
                                                 CUmemAllocationHandleType type) {
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
  int file = dup(static_cast<int>(reinterpret_cast<intptr_t>(shared)));
  off_t bytes = lseek(file, 0, SEEK_END);
  if (bytes <= 0) return CUDA_ERROR_INVALID_VALUE;
  auto* memory = new Physical{static_cast<size_t>(bytes)};
  memory->file = file;
  take(memory->bytes);  // a peer's memory, which is counted here as well; it is small
  *handle = reinterpret_cast<CUmemGenericAllocationHandle>(memory);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp*, CUmemGenericAllocationHandle) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
EXPORTED CUresult cuPointerGetAttribute(void* value, CUpointer_attribute which, CUdeviceptr address) {
  if (which == CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
    *static_cast<CUdeviceptr*>(value) = address;
  else
    *static_cast<int*>(value) = 0;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemsetD32Async(CUdeviceptr, unsigned, size_t, CUstream) { return CUDA_SUCCESS; }
EXPORTED CUresult cuStreamWriteValue32(CUstream, CUdeviceptr, cuuint32_t, unsigned) { return CUDA_SUCCESS; }
