// A GPU that computes nothing: cuBLAS, cuBLASLt, NCCL and NVML. See runtime.cpp.
//
// Without the libraries' headers, so that a function that ignores its arguments need not list them: what C calls is
// found by its name alone. Handles are pointers that nobody follows, and 0 is each library's success.
#include "state.h"

#include <cstring>

using namespace pretended;

#define SUCCEEDS(name) \
  EXPORTED int name() { return 0; }
#define SUCCEEDS_AND_IS_LOGGED(name) \
  EXPORTED int name() {              \
    log("product %s", #name);        \
    return 0;                        \
  }
#define NOT_SUPPORTED(name) \
  EXPORTED int name() { return 801; }

static int handle_in(void** handle) {
  static char anything;
  *handle = &anything;
  return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// CUDA's driver: torch requires that these exist. Parts of a GPU (green contexts), and memory that NVSwitch writes to
// several GPUs at once (multicast), are not pretended, and an attribute of the device says so.

NOT_SUPPORTED(cuGreenCtxCreate)
NOT_SUPPORTED(cuGreenCtxDestroy)
NOT_SUPPORTED(cuGreenCtxStreamCreate)
NOT_SUPPORTED(cuCtxFromGreenCtx)
NOT_SUPPORTED(cuDevSmResourceSplitByCount)
NOT_SUPPORTED(cuDeviceGetDevResource)
NOT_SUPPORTED(cuDevResourceGenerateDesc)
NOT_SUPPORTED(cuMulticastCreate)
NOT_SUPPORTED(cuMulticastAddDevice)
NOT_SUPPORTED(cuMulticastBindMem)
NOT_SUPPORTED(cuMulticastUnbind)

// ---------------------------------------------------------------------------------------------------------------------
// cuBLAS

EXPORTED int cublasCreate_v2(void** handle) { return handle_in(handle); }
EXPORTED int cublasGetMathMode(void*, int* mode) { return *mode = 0; }
EXPORTED int cublasGetPointerMode_v2(void*, int* mode) { return *mode = 0; }
SUCCEEDS(cublasDestroy_v2)
SUCCEEDS(cublasSetStream_v2)
SUCCEEDS(cublasSetWorkspace_v2)
SUCCEEDS(cublasSetMathMode)
SUCCEEDS(cublasSetPointerMode_v2)
SUCCEEDS(cublasSetSmCountTarget)
SUCCEEDS_AND_IS_LOGGED(cublasGemmEx)
SUCCEEDS_AND_IS_LOGGED(cublasGemmStridedBatchedEx)
SUCCEEDS_AND_IS_LOGGED(cublasSgemm_v2)
SUCCEEDS_AND_IS_LOGGED(cublasSgemmStridedBatched)
SUCCEEDS_AND_IS_LOGGED(cublasSgemv_v2)
SUCCEEDS_AND_IS_LOGGED(cublasSdot_v2)

EXPORTED int cublasLtCreate(void** handle) { return handle_in(handle); }
EXPORTED int cublasLtMatmulDescCreate(void** description) { return handle_in(description); }
EXPORTED int cublasLtMatrixLayoutCreate(void** layout) { return handle_in(layout); }
EXPORTED int cublasLtMatmulPreferenceCreate(void** preference) { return handle_in(preference); }
SUCCEEDS(cublasLtDestroy)
SUCCEEDS(cublasLtMatmulDescDestroy)
SUCCEEDS(cublasLtMatmulDescSetAttribute)
SUCCEEDS(cublasLtMatrixLayoutDestroy)
SUCCEEDS(cublasLtMatrixLayoutSetAttribute)
SUCCEEDS(cublasLtMatmulPreferenceDestroy)
SUCCEEDS(cublasLtMatmulPreferenceSetAttribute)
SUCCEEDS_AND_IS_LOGGED(cublasLtMatmul)

// One algorithm, which needs no workspace: cublasLtMatmulHeuristicResult_t has 96 bytes, and zeros mean that.
EXPORTED int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* found,
                                            int* count) {
  memset(found, 0, 96);
  *count = 1;
  return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// NCCL: a communicator knows its size and rank, and a collective is a line in the log.

struct Communicator {
  int size, rank;
};
static int communicator_in(Communicator** communicator, int size, int rank) {
  log("nccl communicator of %d ranks, rank %d", size, rank);
  *communicator = new Communicator{size, rank};
  return 0;
}
struct UniqueId {  // passed by value
  char bytes[128];
};

EXPORTED int ncclGetVersion(int* version) {
  *version = 22809;  // 2.28.9
  return 0;
}
EXPORTED int ncclGetUniqueId(UniqueId* id) {
  memset(id, 1, sizeof *id);
  return 0;
}
EXPORTED int ncclCommInitRank(Communicator** out, int size, UniqueId, int rank) {
  return communicator_in(out, size, rank);
}
EXPORTED int ncclCommInitRankConfig(Communicator** out, int size, UniqueId, int rank, void*) {
  return communicator_in(out, size, rank);
}
EXPORTED int ncclCommInitRankScalable(Communicator** out, int size, int rank, int, UniqueId*, void*) {
  return communicator_in(out, size, rank);
}
// How many ranks have this color is not known without asking them; torch does not ask for the size of a group's part.
EXPORTED int ncclCommSplit(Communicator* whole, int color, int key, Communicator** out, void*) {
  *out = nullptr;
  return color < 0 ? 0 : communicator_in(out, whole->size, key);
}
EXPORTED int ncclCommCount(Communicator* communicator, int* size) {
  *size = communicator->size;
  return 0;
}
EXPORTED int ncclCommUserRank(Communicator* communicator, int* rank) {
  *rank = communicator->rank;
  return 0;
}
EXPORTED int ncclCommGetAsyncError(Communicator*, int* error) { return *error = 0; }
EXPORTED const char* ncclGetErrorString(int) { return "no error"; }
EXPORTED const char* ncclGetLastError(Communicator*) { return "no error"; }
EXPORTED int ncclRedOpCreatePreMulSum(int* operation) {
  *operation = 5;  // the first number that is not one of NCCL's own operations
  return 0;
}
SUCCEEDS(ncclCommAbort)
SUCCEEDS(ncclCommDestroy)
SUCCEEDS(ncclCommFinalize)
SUCCEEDS(ncclGroupStart)
SUCCEEDS(ncclGroupEnd)
SUCCEEDS(ncclRedOpDestroy)
SUCCEEDS(ncclCommRegister)
SUCCEEDS(ncclCommDeregister)
SUCCEEDS(ncclCommWindowRegister)
SUCCEEDS(ncclCommWindowDeregister)

// Reductions also have an operation: 0 is a sum, 4 an average, 5 a sum of products with a factor.
static const char* name_of(int operation) {
  switch (operation) {
    case 0: return "sum";
    case 2: return "max";
    case 3: return "min";
    case 4: return "average";
    case 5: return "sum of products";
    default: return "other";
  }
}
static int collective(const char* name, size_t count, int type, const Communicator* communicator,
                      const char* operation = "none") {
  log("nccl %s of %zu numbers, type %d, %d ranks, operation %s", name, count, type, communicator->size, operation);
  return 0;
}
EXPORTED int ncclAllReduce(const void*, void*, size_t count, int type, int operation, Communicator* communicator) {
  return collective("all-reduce", count, type, communicator, name_of(operation));
}
EXPORTED int ncclReduceScatter(const void*, void*, size_t count, int type, int operation, Communicator* communicator) {
  return collective("reduce-scatter", count, type, communicator, name_of(operation));
}
EXPORTED int ncclReduce(const void*, void*, size_t count, int type, int operation, int, Communicator* communicator) {
  return collective("reduce", count, type, communicator, name_of(operation));
}
EXPORTED int ncclAllGather(const void*, void*, size_t count, int type, Communicator* communicator) {
  return collective("all-gather", count, type, communicator);
}
EXPORTED int ncclAlltoAll(const void*, void*, size_t count, int type, Communicator* communicator) {
  return collective("all-to-all", count, type, communicator);
}
EXPORTED int ncclBroadcast(const void*, void*, size_t count, int type, int, Communicator* communicator) {
  return collective("broadcast", count, type, communicator);
}
EXPORTED int ncclSend(const void*, size_t count, int type, int, Communicator* communicator) {
  return collective("send", count, type, communicator);
}
EXPORTED int ncclRecv(void*, size_t count, int type, int, Communicator* communicator) {
  return collective("receive", count, type, communicator);
}

// ---------------------------------------------------------------------------------------------------------------------
// NVML, which torch loads as libnvidia-ml.so.1, a link to this library. No NVLink, no fabric between hosts.

constexpr int kNotSupported = 3;

EXPORTED int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = num_devices();
  return 0;
}
EXPORTED int nvmlDeviceGetHandleByIndex_v2(unsigned, void** device) { return handle_in(device); }
EXPORTED int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) { return handle_in(device); }
EXPORTED int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count) { return *count = 0; }
EXPORTED int nvmlDeviceGetNvLinkRemoteDeviceType() { return kNotSupported; }
EXPORTED int nvmlDeviceGetNvLinkRemotePciInfo_v2() { return kNotSupported; }
EXPORTED int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = 13000;
  return 0;
}
SUCCEEDS(nvmlInit_v2)
SUCCEEDS(nvmlDeviceGetGpuFabricInfoV)  // the caller's answer stands: no fabric
