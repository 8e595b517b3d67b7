/* Machine code: taken and not run, and its launches counted. No header of CUDA's: those declare the entry points with
 * arguments, which nothing here reads. */
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#define API __attribute__((visibility("default")))

extern struct { long captured, replayed, kernels; } counters;
static void *nothing[8];

API void **__cudaRegisterFatBinary(void *binary) { return nothing; }
API void __cudaRegisterFatBinaryEnd(void **h) {}
API void __cudaUnregisterFatBinary(void **h) {}
API void __cudaRegisterFunction() {}
API void __cudaRegisterVar() {}
API char __cudaInitModule(void **h) { return 1; }
API unsigned __cudaPushCallConfiguration() { return 0; }
API int __cudaPopCallConfiguration(unsigned *g, unsigned *b, size_t *m, void *s) {
    g[0] = g[1] = g[2] = b[0] = b[1] = b[2] = 1, *m = 0, *(void **)s = NULL;
    return 0;
}
API int __cudaGetKernel(void **k, const void *f) { *k = nothing; return 0; }
API int cudaFuncGetAttributes(int *attributes, const void *f) {
    memset(attributes, 0, 64); /* cudaFuncAttributes begins so: sizes, then maxThreadsPerBlock, numRegs and versions */
    attributes[6] = 1024, attributes[7] = 32, attributes[8] = attributes[9] = 90;
    return 0;
}
API int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n) { *n = 1; return 0; }
API int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n) { *n = 1; return 0; }
API int cudaGetSymbolAddress(void **p) { static char room[1 << 16]; *p = room; return 0; }

#define LAUNCHED(name) API int name() { __sync_fetch_and_add(&counters.kernels, 1); return 0; }
LAUNCHED(__cudaLaunchKernel) LAUNCHED(cudaLaunchKernel) LAUNCHED(cudaLaunchKernelExC) LAUNCHED(cudaLaunchCooperativeKernel)

#define TAKEN(name) API int name() { return 0; }
TAKEN(cudaFuncSetAttribute) TAKEN(cudaProfilerStart) TAKEN(cudaProfilerStop) TAKEN(cudaMemcpyToSymbol)
TAKEN(cudaDeviceEnablePeerAccess) TAKEN(cudaDeviceReset) TAKEN(cuTensorMapEncodeTiled)

#define REFUSED(name) API int name() { fprintf(stderr, "standin: %s is not there\n", #name); return 801; }
REFUSED(cudaDeviceGetDefaultMemPool) REFUSED(cudaDeviceGetGraphMemAttribute) REFUSED(cudaDeviceSetGraphMemAttribute)
REFUSED(cudaGraphAddNode) REFUSED(cudaGraphConditionalHandleCreate) REFUSED(cudaGraphDebugDotPrint)
REFUSED(cudaGraphNodeGetDependencies) REFUSED(cudaGraphRetainUserObject) REFUSED(cudaStreamBeginCaptureToGraph)
REFUSED(cudaStreamUpdateCaptureDependencies) REFUSED(cudaUserObjectCreate) REFUSED(cudaUserObjectRelease)
REFUSED(cudaKernelSetAttributeForDevice) REFUSED(cudaLibraryGetKernel) REFUSED(cudaLibraryLoadData) REFUSED(cudaLibraryUnload)
REFUSED(cudaIpcCloseMemHandle) REFUSED(cudaIpcGetEventHandle) REFUSED(cudaIpcGetMemHandle) REFUSED(cudaIpcOpenEventHandle)
REFUSED(cudaIpcOpenMemHandle) REFUSED(cudaMemPoolGetAttribute) REFUSED(cudaMemPoolSetAccess) REFUSED(cudaMemPoolSetAttribute)
REFUSED(cudaMemPoolTrimTo) REFUSED(cudaStreamAddCallback)
REFUSED(cuFuncGetAttribute) REFUSED(cuFuncSetAttribute) REFUSED(cuFuncSetCacheConfig) REFUSED(cuLaunchCooperativeKernel)
REFUSED(cuLaunchKernel) REFUSED(cuLinkAddData_v2) REFUSED(cuLinkComplete) REFUSED(cuLinkCreate_v2)
REFUSED(cuModuleGetFunction) REFUSED(cuModuleLoad) REFUSED(cuModuleLoadData) REFUSED(cuModuleLoadDataEx)
REFUSED(cuModuleUnload) REFUSED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
