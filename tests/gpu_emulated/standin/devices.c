/* What the devices say of themselves: to CUDA's runtime, and to NVML as far as torch and vLLM ask it. */
#include "standin.h"

API cudaError_t cudaGetDeviceCount(int *n) { *n = (int)settings.devices; return cudaSuccess; }
API cudaError_t cudaGetDevice(int *d) { *d = current_device; return cudaSuccess; }
API cudaError_t cudaSetDevice(int d) {
    if (d < 0 || d >= settings.devices) return failed(cudaErrorInvalidDevice);
    current_device = d;
    return cudaSuccess;
}
API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, NAME);
    p->totalGlobalMem = (size_t)settings.mib << 20;
    p->major = 9, p->multiProcessorCount = 132, p->warpSize = 32;
    p->sharedMemPerBlock = 49152, p->sharedMemPerBlockOptin = 232448, p->sharedMemPerMultiprocessor = 233472;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->maxThreadsPerBlock = 1024, p->maxThreadsPerMultiProcessor = 2048, p->maxBlocksPerMultiProcessor = 32;
    p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
    p->l2CacheSize = 50 << 20, p->memoryBusWidth = 5120, p->totalConstMem = 65536;
    p->unifiedAddressing = p->canMapHostMemory = p->concurrentKernels = p->cooperativeLaunch = 1;
    p->hostRegisterSupported = p->streamPrioritiesSupported = 1, p->asyncEngineCount = 3, p->pciBusID = 1 + d;
    return cudaSuccess;
}
static int attribute(int a) {
    switch (a) {
    case cudaDevAttrComputeCapabilityMajor: return 9;
    case cudaDevAttrComputeCapabilityMinor: return 0;
    case cudaDevAttrMultiProcessorCount: return 132;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233472;
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrCooperativeLaunch: case cudaDevAttrHostRegisterSupported: return 1;
    default: return 0;
    }
}
API cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) { *v = attribute(a); return cudaSuccess; }
API cudaError_t cudaDeviceGetPCIBusId(char *out, int n, int d) { snprintf(out, n, "00000000:%02X:00.0", 1 + d); return cudaSuccess; }
API cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 0; return cudaSuccess; }
API cudaError_t cudaDriverGetVersion(int *v) { *v = VERSION; return cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int *v) { *v = VERSION; return cudaSuccess; }
API cudaError_t cudaGetLastError(void) { cudaError_t e = last_error; last_error = cudaSuccess; return e; }
API cudaError_t cudaPeekAtLastError(void) { return last_error; }
API const char *cudaGetErrorString(cudaError_t e) {
    switch (e) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    default: return "an error of the stand-in";
    }
}
API const char *cudaGetErrorName(cudaError_t e) {
    return e == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : e ? "cudaErrorUnknown" : "cudaSuccess";
}

/* the driver */
API CUresult cuInit(unsigned f) { return CUDA_SUCCESS; }
API CUresult cuDriverGetVersion(int *v) { *v = VERSION; return CUDA_SUCCESS; }
API CUresult cuDeviceGet(CUdevice *d, int n) { *d = n; return CUDA_SUCCESS; }
API CUresult cuDeviceGetCount(int *n) { *n = (int)settings.devices; return CUDA_SUCCESS; }
API CUresult cuDeviceGetName(char *out, int n, CUdevice d) { snprintf(out, n, NAME); return CUDA_SUCCESS; }
API CUresult cuDeviceTotalMem_v2(size_t *n, CUdevice d) { *n = (size_t)settings.mib << 20; return CUDA_SUCCESS; }
API CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute a, CUdevice d) { *v = attribute(a); return CUDA_SUCCESS; }
API CUresult cuGetErrorString(CUresult e, const char **s) { *s = e ? "an error of the stand-in" : "no error"; return CUDA_SUCCESS; }
API CUresult cuGetErrorName(CUresult e, const char **s) { *s = e ? "CUDA_ERROR" : "CUDA_SUCCESS"; return CUDA_SUCCESS; }

/* NVML */
static int number_of(void *handle) { return (int)(uintptr_t)handle - 1; }
#define ANSWER(name, ...) API int name(__VA_ARGS__)
ANSWER(nvmlInit_v2, void) { return 0; }
ANSWER(nvmlInit, void) { return 0; }
ANSWER(nvmlInitWithFlags, unsigned f) { return 0; }
ANSWER(nvmlShutdown, void) { return 0; }
ANSWER(nvmlDeviceGetCount_v2, unsigned *n) { *n = (unsigned)settings.devices; return 0; }
ANSWER(nvmlDeviceGetHandleByIndex_v2, unsigned i, void **h) { *h = (void *)(uintptr_t)(i + 1); return i < settings.devices ? 0 : 2; }
ANSWER(nvmlDeviceGetHandleByPciBusId_v2, const char *id, void **h) {
    unsigned bus = 0;
    if (sscanf(id, "%*x:%x", &bus) != 1 || !bus || bus > settings.devices) return 2;
    *h = (void *)(uintptr_t)bus;
    return 0;
}
ANSWER(nvmlDeviceGetHandleByUUID, const char *id, void **h) {
    const char *end = strrchr(id, '-');
    uintptr_t n = end ? strtoul(end + 1, NULL, 16) : 0;
    *h = (void *)n;
    return n && n <= (uintptr_t)settings.devices ? 0 : 2;
}
ANSWER(nvmlDeviceGetIndex, void *h, unsigned *i) { *i = (unsigned)number_of(h); return 0; }
ANSWER(nvmlDeviceGetName, void *h, char *out, unsigned n) { snprintf(out, n, NAME); return 0; }
ANSWER(nvmlDeviceGetUUID, void *h, char *out, unsigned n) { snprintf(out, n, "GPU-00000000-0000-0000-0000-%012lx", (long)h); return 0; }
ANSWER(nvmlDeviceGetCudaComputeCapability, void *h, int *major, int *minor) { *major = 9; *minor = 0; return 0; }
ANSWER(nvmlDeviceGetMemoryInfo, void *h, unsigned long long *out) {
    LOCKED(out[0] = (size_t)settings.mib << 20; out[2] = taken(number_of(h)); out[1] = out[0] - out[2]);
    return 0;
}
ANSWER(nvmlSystemGetDriverVersion, char *out, unsigned n) { snprintf(out, n, "580.159.04"); return 0; }
ANSWER(nvmlSystemGetCudaDriverVersion_v2, int *v) { *v = VERSION; return 0; }
ANSWER(nvmlDeviceGetComputeRunningProcesses, void *h, unsigned *n, void *out) { *n = 0; return 0; } /* where memory is short */
API const char *nvmlErrorString(int e) { return e ? "an error of the stand-in" : "no error"; }
#define NOT_SUPPORTED(name) API int name(void) { return 3; }
NOT_SUPPORTED(nvmlDeviceGetNvLinkRemoteDeviceType) NOT_SUPPORTED(nvmlDeviceGetNvLinkRemotePciInfo_v2)
NOT_SUPPORTED(nvmlDeviceGetGpuFabricInfoV) NOT_SUPPORTED(nvmlDeviceGetP2PStatus)
NOT_SUPPORTED(nvmlDeviceGetPciInfo_v3) NOT_SUPPORTED(nvmlDeviceGetPciInfo)
