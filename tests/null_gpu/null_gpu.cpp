// A GPU without a GPU: the calls of the CUDA runtime, driver, NVML, cuDNN, cuBLAS and NCCL that PyTorch makes in a
// training step. Kernels do nothing, and no process waits for another one. Memory is address space with a limit. Whatever the host reads back is zero.
// Loaded before the real libraries; a call that is missing here reaches them and fails: there is no driver.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <iterator>
#include <map>
#include <mutex>
#include <sys/mman.h>
#include <vector>

#include <cuda_runtime_api.h>
#include <cudnn_version.h>
#include <cudnn_graph.h>

using Address = unsigned long long;
#define EXPORT extern "C" __attribute__((visibility("default")))

// Counters that tests read, in the order of COUNTERS in counters.py
enum { LAUNCHES, LIBRARY_CALLS, COPIES, MEMSETS, SYNCHRONIZATIONS, GRAPH_LAUNCHES, FAILED_ALLOCATIONS, COLLECTIVES,
       COUNTERS };
#pragma GCC visibility push(default)
extern "C" {
long null_gpu_counters[COUNTERS] = {};
size_t null_gpu_used = 0, null_gpu_peak = 0, null_gpu_limit = 0;  // bytes
}
#pragma GCC visibility pop

namespace {

const size_t MIB = 1 << 20, GIB = 1 << 30;
const size_t MODULE = 256 << 10, CUBLAS_HANDLE = 8 * MIB, CUDNN_HANDLE = 8 * MIB;  // round figures

double setting(const char* name, double otherwise) {
    const char* value = getenv(name);
    return value ? atof(value) : otherwise;
}

struct Card {
    const char* name;
    int major, minor, processors, shared_block, shared_processor, threads_processor;
    double gib;  // that PyTorch sees
};
const Card RTX_5090 = {"NVIDIA GeForce RTX 5090", 12, 0, 170, 101376, 102400, 1536, 31.37};
const Card RTX_2080_TI = {"NVIDIA GeForce RTX 2080 Ti", 7, 5, 68, 65536, 65536, 1024, 10.7};
const Card H100 = {"NVIDIA H100 80GB HBM3", 9, 0, 132, 232448, 233472, 2048, 79.1};

const Card& card() {
    static const int capability = int(setting("NULL_GPU_SM", 120));
    return capability == 75 ? RTX_2080_TI : capability == 90 ? H100 : RTX_5090;
}

std::recursive_mutex lock;
std::map<size_t, size_t> allocated;  // bytes by address
std::map<Address, size_t> handles;   // bytes by handle of physical memory
std::map<size_t, size_t> pinned;     // bytes by address of host memory
long captured = -1;                  // kernels in the graph that is being captured, or -1

size_t limit() {
    if (!null_gpu_limit) null_gpu_limit = size_t(setting("NULL_GPU_GIB", card().gib) * GIB);
    return null_gpu_limit;
}

bool charge(size_t bytes) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (null_gpu_used + bytes > limit()) {
        null_gpu_counters[FAILED_ALLOCATIONS]++;
        return false;
    }
    null_gpu_used += bytes;
    if (null_gpu_used > null_gpu_peak) null_gpu_peak = null_gpu_used;
    return true;
}

size_t in_pages(size_t bytes) { return (bytes + 2 * MIB - 1) / (2 * MIB) * (2 * MIB); }

// Address space that no access is allowed to: a kernel or a copy on the host's side ends the process.
Address reserve(size_t bytes) {
    void* space = mmap(nullptr, bytes + 2 * MIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return space == MAP_FAILED ? 0 : in_pages(Address(space));
}

int launch() {
    if (captured >= 0) captured++;
    else null_gpu_counters[LAUNCHES]++;
    return 0;
}

int library_call() {
    if (captured >= 0) captured++;
    else null_gpu_counters[LIBRARY_CALLS]++;
    return 0;
}

cudaError_t synchronize() {
    if (captured >= 0) return cudaErrorStreamCaptureUnsupported;
    null_gpu_counters[SYNCHRONIZATIONS]++;
    return cudaSuccess;
}

cudaError_t copy(void* to, size_t bytes, cudaMemcpyKind kind) {
    null_gpu_counters[COPIES]++;
    if (kind == cudaMemcpyDeviceToHost) memset(to, 0, bytes);
    return cudaSuccess;
}

double milliseconds() {
    using namespace std::chrono;
    return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}
double slow_plans = 0;  // milliseconds that candidates of cuDNN's search seem to take, so that the first wins

int attribute(int number) {
    switch (number) {
        case cudaDevAttrComputeCapabilityMajor: return card().major;
        case cudaDevAttrComputeCapabilityMinor: return card().minor;
        case cudaDevAttrMultiProcessorCount: return card().processors;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: return card().shared_block;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return card().shared_processor;
        case cudaDevAttrMaxThreadsPerMultiProcessor: return card().threads_processor;
        case cudaDevAttrMaxSharedMemoryPerBlock: return 48 << 10;
        case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
        case cudaDevAttrMaxThreadsPerBlock: return 1024;
        case cudaDevAttrWarpSize: return 32;
        case cudaDevAttrClockRate: return 2000000;
        case cudaDevAttrMemoryClockRate: return 14000000;
        case cudaDevAttrGlobalMemoryBusWidth: return 512;
        default: return 0;
    }
}

}  // namespace

// ---- calls that only have to succeed or to be counted, whatever their arguments. The names in the source
// differ from the symbols, because the headers declare other types.
#define SUCCEEDS(name) \
    EXPORT int ok_##name(...) __asm__(#name); \
    int ok_##name(...) { return 0; }
#define COMPUTES(name) \
    EXPORT int call_##name(...) __asm__(#name); \
    int call_##name(...) { return library_call(); }
#define LAUNCHES_KERNEL(name) \
    EXPORT int launch_##name(...) __asm__(#name); \
    int launch_##name(...) { return launch(); }

SUCCEEDS(__cudaRegisterFatBinaryEnd) SUCCEEDS(__cudaRegisterFunction) SUCCEEDS(__cudaRegisterVar)
SUCCEEDS(__cudaUnregisterFatBinary)
SUCCEEDS(cudaEventQuery) SUCCEEDS(cudaFuncSetAttribute) SUCCEEDS(cudaGetLastError) SUCCEEDS(cudaGraphDestroy)
SUCCEEDS(cudaGraphExecDestroy) SUCCEEDS(cudaGraphRetainUserObject) SUCCEEDS(cudaLaunchHostFunc)
SUCCEEDS(cudaLibraryLoadData) SUCCEEDS(cudaMemcpyToSymbol) SUCCEEDS(cudaPeekAtLastError) SUCCEEDS(cudaProfilerStart)
SUCCEEDS(cudaProfilerStop) SUCCEEDS(cudaSetDevice) SUCCEEDS(cudaStreamDestroy) SUCCEEDS(cudaStreamQuery)
SUCCEEDS(cudaStreamUpdateCaptureDependencies) SUCCEEDS(cudaStreamWaitEvent)
SUCCEEDS(cudaThreadExchangeStreamCaptureMode) SUCCEEDS(cudaUserObjectCreate) SUCCEEDS(cudaUserObjectRelease)
LAUNCHES_KERNEL(__cudaLaunchKernel) LAUNCHES_KERNEL(cudaLaunchKernel) LAUNCHES_KERNEL(cudaLaunchKernelExC)

SUCCEEDS(cuCtxSetCurrent) SUCCEEDS(cuCtxSetLimit) SUCCEEDS(cuFuncSetAttribute) SUCCEEDS(cuFuncSetCacheConfig)
SUCCEEDS(cuInit) SUCCEEDS(cuModuleUnload) SUCCEEDS(cuTensorMapEncodeTiled) SUCCEEDS(cuTensorMapEncodeIm2col)
LAUNCHES_KERNEL(cuLaunchCooperativeKernel) LAUNCHES_KERNEL(cuLaunchKernel) LAUNCHES_KERNEL(cuLaunchKernelEx)

SUCCEEDS(nvmlInit_v2) SUCCEEDS(nvmlDeviceGetGpuFabricInfoV) SUCCEEDS(nvmlDeviceGetHandleByPciBusId_v2)
SUCCEEDS(nvmlDeviceGetNvLinkRemoteDeviceType) SUCCEEDS(nvmlDeviceGetNvLinkRemotePciInfo_v2)
SUCCEEDS(nvmlSystemGetCudaDriverVersion_v2)

SUCCEEDS(cudnnBackendFinalize) SUCCEEDS(cudnnSetStream)

SUCCEEDS(cublasDestroy_v2) SUCCEEDS(cublasSetMathMode) SUCCEEDS(cublasSetPointerMode_v2)
SUCCEEDS(cublasSetSmCountTarget) SUCCEEDS(cublasSetStream_v2) SUCCEEDS(cublasSetWorkspace_v2)
SUCCEEDS(cublasLtMatmulDescDestroy) SUCCEEDS(cublasLtMatmulDescSetAttribute)
SUCCEEDS(cublasLtMatmulPreferenceDestroy) SUCCEEDS(cublasLtMatmulPreferenceSetAttribute)
SUCCEEDS(cublasLtMatrixLayoutDestroy) SUCCEEDS(cublasLtMatrixLayoutSetAttribute)
COMPUTES(cublasGemmEx) COMPUTES(cublasGemmStridedBatchedEx) COMPUTES(cublasLtMatmul) COMPUTES(cublasDotEx)
COMPUTES(cublasSgemm_v2) COMPUTES(cublasSgemmEx) COMPUTES(cublasSgemmStridedBatched) COMPUTES(cublasSgemv_v2)
COMPUTES(cublasDgemm_v2) COMPUTES(cublasDgemmStridedBatched) COMPUTES(cublasDgemv_v2)
COMPUTES(cublasSdot_v2) COMPUTES(cublasDdot_v2)

// ---- runtime: device
EXPORT cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
EXPORT cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
EXPORT cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
EXPORT cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr number, int) {
    return *value = attribute(number), cudaSuccess;
}
EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int) {  // CUDA 12: ..._v2, by a macro
    memset(found, 0, sizeof *found);
    strcpy(found->name, card().name);
    found->totalGlobalMem = limit();
    found->major = card().major;
    found->minor = card().minor;
    found->multiProcessorCount = card().processors;
    found->warpSize = 32;
    found->maxThreadsPerBlock = 1024;
    found->maxThreadsPerMultiProcessor = card().threads_processor;
    found->sharedMemPerBlock = 48 << 10;
    found->sharedMemPerBlockOptin = card().shared_block;
    found->sharedMemPerMultiprocessor = card().shared_processor;
    found->regsPerBlock = found->regsPerMultiprocessor = 65536;
    found->l2CacheSize = 96 << 20;
    found->maxGridSize[0] = INT32_MAX;
    found->maxGridSize[1] = found->maxGridSize[2] = 65535;
    found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
    found->maxThreadsDim[2] = 64;
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }
EXPORT cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int) {
    return snprintf(text, size, "0000:00:00.0"), cudaSuccess;
}
EXPORT const char* cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "out of memory" : "an error of the null GPU";
}
EXPORT const char* cudaGetErrorName(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorUnknown";
}

// ---- runtime: memory
EXPORT cudaError_t cudaMalloc(void** address, size_t bytes) {
    bytes = in_pages(bytes);
    if (!charge(bytes)) return cudaErrorMemoryAllocation;
    std::lock_guard<std::recursive_mutex> guard(lock);
    *address = (void*)reserve(bytes);
    allocated[size_t(*address)] = bytes;
    return cudaSuccess;
}
EXPORT cudaError_t cudaFree(void* address) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    auto found = allocated.find(size_t(address));
    if (found == allocated.end()) return cudaSuccess;
    munmap(address, found->second);
    null_gpu_used -= found->second;
    allocated.erase(found);
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
    *total = limit();
    *available = limit() - null_gpu_used;
    return cudaSuccess;
}
EXPORT cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    *address = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    return pinned[size_t(*address)] = bytes, cudaSuccess;
}
EXPORT cudaError_t cudaFreeHost(void* address) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    pinned.erase(size_t(address));
    return free(address), cudaSuccess;
}
EXPORT cudaError_t cudaMemcpyAsync(void* to, const void*, size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
    return copy(to, bytes, kind);
}
EXPORT cudaError_t cudaMemcpy(void* to, const void*, size_t bytes, cudaMemcpyKind kind) {
    cudaError_t error = synchronize();
    return error ? error : copy(to, bytes, kind);
}
EXPORT cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t) {
    return null_gpu_counters[MEMSETS]++, cudaSuccess;
}
EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* address) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    auto after = pinned.upper_bound(size_t(address));
    const bool host = after != pinned.begin() && size_t(address) < std::prev(after)->first + std::prev(after)->second;
    memset(found, 0, sizeof *found);
    found->type = host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    found->devicePointer = (void*)address;
    return cudaSuccess;
}

// ---- runtime: kernels
namespace { thread_local struct { dim3 grid, block; size_t shared; void* stream; } configuration; }
EXPORT void** __cudaRegisterFatBinary(void*) { static void* handle; return &handle; }
EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
    return configuration = {grid, block, shared, stream}, 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
    *grid = configuration.grid, *block = configuration.block, *shared = configuration.shared;
    return *(void**)stream = configuration.stream, cudaSuccess;
}
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void*) { return *kernel = (cudaKernel_t)1, cudaSuccess; }
EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
    memset(found, 0, sizeof *found);
    found->maxThreadsPerBlock = 1024;
    found->numRegs = 32;
    found->binaryVersion = found->ptxVersion = 10 * card().major + card().minor;
    return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
    return *blocks = 4, cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* blocks, const void*, int, size_t, unsigned) {
    return *blocks = 4, cudaSuccess;
}

// ---- runtime: streams, events, graphs. An event holds the time at which it was recorded.
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    return *least = 0, *greatest = -5, cudaSuccess;
}
EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
    return *stream = (cudaStream_t)malloc(1), cudaSuccess;
}
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
    return *stream = (cudaStream_t)malloc(1), cudaSuccess;
}
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t) { return synchronize(); }
EXPORT cudaError_t cudaDeviceSynchronize() { return synchronize(); }
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t) { return synchronize(); }
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    return *event = (cudaEvent_t) new double(0), cudaSuccess;
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete (double*)event, cudaSuccess; }
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t, unsigned) {
    return *(double*)event = milliseconds() + slow_plans, cudaSuccess;
}
EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) { return cudaEventRecordWithFlags(event, 0, 0); }
EXPORT cudaError_t cudaEventElapsedTime(float* elapsed, cudaEvent_t start, cudaEvent_t end) {
    return *elapsed = float(*(double*)end - *(double*)start), cudaSuccess;
}
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
    *status = captured >= 0 ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
// The arguments after `id`, and the name, differ between CUDA 12 and 13. PyTorch reads no more than the first.
EXPORT int capture_info(cudaStream_t, cudaStreamCaptureStatus*, Address*) __asm__("cudaStreamGetCaptureInfo");
EXPORT int capture_info_v2(cudaStream_t, cudaStreamCaptureStatus*, Address*) __asm__("cudaStreamGetCaptureInfo_v2");
int capture_info(cudaStream_t stream, cudaStreamCaptureStatus* status, Address* id) {
    if (id) *id = 1;
    return cudaStreamIsCapturing(stream, status);
}
int capture_info_v2(cudaStream_t stream, cudaStreamCaptureStatus* status, Address* id) {
    return capture_info(stream, status, id);
}
EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) { return captured = 0, cudaSuccess; }
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
    *graph = (cudaGraph_t)(captured + 1);
    return captured = -1, cudaSuccess;
}
EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* nodes) {
    return *nodes = size_t(graph) - 1, cudaSuccess;
}
EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t* program, cudaGraph_t graph, Address) {
    return *program = (cudaGraphExec_t)graph, cudaSuccess;
}
EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* program, cudaGraph_t graph, Address) {
    return *program = (cudaGraphExec_t)graph, cudaSuccess;
}
EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) {
    return null_gpu_counters[GRAPH_LAUNCHES]++, cudaSuccess;
}

// ---- driver, for Triton, and for PyTorch's expandable segments
EXPORT int cuDriverGetVersion(int* version) { return *version = CUDART_VERSION, 0; }
EXPORT int cuDeviceGetCount(int* count) { return *count = 1, 0; }
EXPORT int cuDeviceGet(int* device, int) { return *device = 0, 0; }
EXPORT int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) { return *flags = 0, *active = 1, 0; }
EXPORT int cuDevicePrimaryCtxRetain(void** context, int) { return *context = (void*)1, 0; }
EXPORT int cuCtxGetCurrent(void** context) { return *context = (void*)1, 0; }
EXPORT int cuCtxGetDevice(int* device) { return *device = 0, 0; }
EXPORT int cuCtxGetLimit(size_t* value, int) { return *value = MIB, 0; }
EXPORT int cuDeviceGetAttribute(int* value, int number, int) { return *value = attribute(number), 0; }
EXPORT int cuGetErrorString(int error, const char** text) {
    return *text = cudaGetErrorString(cudaError_t(error)), 0;
}
EXPORT int cuPointerGetAttribute(Address* value, int, Address address) { return *value = address, 0; }
EXPORT int cuPointerGetAttributes(unsigned count, const int*, void** values, Address address) {
    for (unsigned i = 0; i < count; i++) *(Address*)values[i] = address;
    return 0;
}
EXPORT int cuFuncGetAttribute(int* value, int number, void*) {
    return *value = number == 0 ? 1024 : number == 4 ? 64 : 0, 0;  // threads of a block, registers of a thread
}
EXPORT int cuModuleLoadData(void** module, const void*) {
    return *module = (void*)1, charge(MODULE) ? 0 : cudaErrorMemoryAllocation;
}
EXPORT int cuModuleLoad(void** module, const char*) { return cuModuleLoadData(module, nullptr); }
EXPORT int cuModuleGetFunction(void** function, void*, const char*) { return *function = (void*)1, 0; }
EXPORT int cuOccupancyMaxActiveClusters(int* clusters, void*, const void*) { return *clusters = 1, 0; }
EXPORT int cuStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    return cudaStreamIsCapturing(stream, status);
}
EXPORT int cuMemGetAllocationGranularity(size_t* bytes, const void*, int) { return *bytes = 2 * MIB, 0; }
EXPORT int cuMemAddressReserve(Address* address, size_t bytes, size_t, Address, Address) {
    return (*address = reserve(bytes)) ? 0 : cudaErrorMemoryAllocation;
}
EXPORT int cuMemAddressFree(Address address, size_t bytes) { return munmap((void*)address, bytes), 0; }
EXPORT int cuMemCreate(Address* handle, size_t bytes, const void*, Address) {
    static Address last = 0;
    if (!charge(bytes)) return cudaErrorMemoryAllocation;
    std::lock_guard<std::recursive_mutex> guard(lock);
    return handles[*handle = ++last] = bytes, 0;
}
EXPORT int cuMemSetAccess(Address, size_t, const void*, size_t) {  // 0: as drivers under WSL
    return setting("NULL_GPU_GROWING_SEGMENTS", 1) ? 0 : cudaErrorUnknown;
}
EXPORT int cuMemRelease(Address handle) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    null_gpu_used -= handles[handle];
    return handles.erase(handle), 0;
}
EXPORT int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) { return *count = 0, 0; }

// PyTorch asks the runtime for functions of the driver and of NVML by name.
namespace { int success() { return 0; } }
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned, Address, cudaDriverEntryPointQueryResult* result) {
    *function = dlsym(RTLD_DEFAULT, name);
    if (!*function) *function = (void*)success;
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

// ---- cuDNN: every convolution has the plans of NULL_GPU_WORKSPACES_MIB, for example "256,0", the fastest first
namespace {

struct Descriptor { cudnnBackendDescriptorType_t type; int plan = 0; };

std::vector<size_t> workspaces() {  // read each time, so that a process can change them
    std::vector<size_t> found;
    const char* text = getenv("NULL_GPU_WORKSPACES_MIB");
    for (const char* at = text ? text : "0"; at; at = strchr(at, ',')) {
        if (*at == ',') at++;
        found.push_back(size_t(atof(at)) * MIB);
    }
    return found;
}

}  // namespace

EXPORT cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
    if (!charge(CUDNN_HANDLE)) return CUDNN_STATUS_NOT_INITIALIZED;
    return *handle = (cudnnHandle_t)1, CUDNN_STATUS_SUCCESS;
}
EXPORT cudnnStatus_t cudnnGetStream(cudnnHandle_t, cudaStream_t* stream) { return *stream = 0, CUDNN_STATUS_SUCCESS; }
EXPORT size_t cudnnGetVersion() { return CUDNN_VERSION; }
EXPORT size_t cudnnGetCudartVersion() { return CUDART_VERSION; }
EXPORT const char* cudnnGetErrorString(cudnnStatus_t status) {
    return status == CUDNN_STATUS_NOT_INITIALIZED ? "CUDNN_STATUS_NOT_INITIALIZED" : "CUDNN_STATUS_INTERNAL_ERROR";
}
EXPORT cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t* made) {
    return *made = new Descriptor{type}, CUDNN_STATUS_SUCCESS;
}
EXPORT cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor) {
    return delete (Descriptor*)descriptor, CUDNN_STATUS_SUCCESS;
}
EXPORT cudnnStatus_t cudnnBackendSetAttribute(
    cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t, int64_t,
    const void* values) {
    if (name == CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG)
        ((Descriptor*)descriptor)->plan = ((Descriptor*)*(cudnnBackendDescriptor_t*)values)->plan;
    return CUDNN_STATUS_SUCCESS;
}
EXPORT cudnnStatus_t cudnnBackendGetAttribute(
    const cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t,
    int64_t wanted, int64_t* found, void* values) {
    int64_t count = 0;
    const int plan = ((Descriptor*)descriptor)->plan;
    if (name == CUDNN_ATTR_ENGINEHEUR_RESULTS) {
        count = int64_t(workspaces().size());
        for (int64_t i = 0; values && i < wanted && i < count; i++)
            ((Descriptor*)((cudnnBackendDescriptor_t*)values)[i])->plan = int(i);
    } else if (name == CUDNN_ATTR_ENGINECFG_ENGINE) {
        count = 1;
        if (values && wanted) ((Descriptor*)*(cudnnBackendDescriptor_t*)values)->plan = plan;
    } else if (name == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE || name == CUDNN_ATTR_ENGINE_GLOBAL_INDEX ||
               name == CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT) {
        count = 1;
        if (values && wanted) *(int64_t*)values = name == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE ? int64_t(workspaces()[plan]) : plan;
    } else if (name == CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION) {
        count = sizeof "{}";
        if (values) memcpy(values, "{}", size_t(wanted < count ? wanted : count));
    }
    if (found) *found = values && wanted < count ? wanted : count;
    return CUDNN_STATUS_SUCCESS;
}
EXPORT cudnnStatus_t cudnnBackendExecute(cudnnHandle_t, cudnnBackendDescriptor_t plan, cudnnBackendDescriptor_t) {
    slow_plans += ((Descriptor*)plan)->plan;
    return cudnnStatus_t(library_call());
}

// ---- cuBLAS
EXPORT int cublasCreate_v2(void** handle) {
    return *handle = (void*)1, charge(CUBLAS_HANDLE) ? 0 : 1;  // CUBLAS_STATUS_NOT_INITIALIZED
}
EXPORT int cublasGetMathMode(void*, int* mode) { return *mode = 0, 0; }
EXPORT int cublasGetPointerMode_v2(void*, int* mode) { return *mode = 0, 0; }
EXPORT size_t cublasLtGetVersion() { return CUDART_VERSION * 10; }
EXPORT int cublasLtMatmulDescCreate(void** made, int, int) { return *made = (void*)1, 0; }
EXPORT int cublasLtMatmulPreferenceCreate(void** made) { return *made = (void*)1, 0; }
EXPORT int cublasLtMatrixLayoutCreate(void** made, int, Address, Address, long) { return *made = (void*)1, 0; }
EXPORT int cublasLtMatmulAlgoGetHeuristic(
    void*, void*, void*, void*, void*, void*, void*, int, void* results, int* found) {
    memset(results, 0, 96);  // one cublasLtMatmulHeuristicResult_t: no workspace, state success
    return *found = 1, 0;
}

// ---- NCCL: collectives succeed at once. Its header needs others that not every wheel of PyTorch brings.
struct ncclUniqueId { char internal[128]; };  // nccl.h: NCCL_UNIQUE_ID_BYTES
#define COMMUNICATES(name) \
    EXPORT int collective_##name(...) __asm__(#name); \
    int collective_##name(...) { return null_gpu_counters[COLLECTIVES]++, 0; }
COMMUNICATES(ncclAllReduce) COMMUNICATES(ncclAllGather) COMMUNICATES(ncclBroadcast) COMMUNICATES(ncclBcast)
SUCCEEDS(ncclCommAbort) SUCCEEDS(ncclCommDestroy) SUCCEEDS(ncclCommFinalize) SUCCEEDS(ncclGroupStart)
SUCCEEDS(ncclGroupEnd) SUCCEEDS(ncclGetUniqueId) SUCCEEDS(ncclCommRegister) SUCCEEDS(ncclCommDeregister)
EXPORT int nccl_version(int* version) __asm__("ncclGetVersion");
int nccl_version(int* version) { return *version = 22304, 0; }  // 2.23.4: PyTorch asks for a minimum
EXPORT const char* nccl_error(int) __asm__("ncclGetErrorString");
const char* nccl_error(int) { return "an error of the null GPU"; }
EXPORT const char* nccl_last_error(void*) __asm__("ncclGetLastError");
const char* nccl_last_error(void*) { return ""; }
EXPORT int nccl_async_error(void*, int* error) __asm__("ncclCommGetAsyncError");
int nccl_async_error(void*, int* error) { return *error = 0, 0; }
namespace { struct Communicator { int size, rank; }; }
EXPORT int comm_init(void**, int, ncclUniqueId, int, void*) __asm__("ncclCommInitRankConfig");
int comm_init(void** made, int size, ncclUniqueId, int rank, void*) { return *made = new Communicator{size, rank}, 0; }
EXPORT int comm_rank(Communicator*, int*) __asm__("ncclCommUserRank");
int comm_rank(Communicator* group, int* rank) { return *rank = group->rank, 0; }
EXPORT int comm_size(Communicator*, int*) __asm__("ncclCommCount");
int comm_size(Communicator* group, int* size) { return *size = group->size, 0; }
