/* Virtual memory management of the driver, by Linux's own mappings: a handle is a memfd, reserved addresses may not be
 * touched, and who reads an address that was unmapped dies. What the driver refuses is refused here. */
#include "standin.h"
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

struct handle { int fd; size_t nbytes; int device, mapped; bool released; };

static __thread void *context;
API CUresult cuCtxGetCurrent(CUcontext *c) { *c = context; return CUDA_SUCCESS; }
API CUresult cuCtxSetCurrent(CUcontext c) { context = c; return CUDA_SUCCESS; }
API CUresult cuCtxGetDevice(CUdevice *d) { *d = current_device; return CUDA_SUCCESS; }
API CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { *c = (CUcontext)&settings; return CUDA_SUCCESS; }
API CUresult cuDevicePrimaryCtxGetState(CUdevice d, unsigned *f, int *active) {
    if (f) *f = 0;
    *active = 1;
    return CUDA_SUCCESS;
}
API CUresult cuPointerGetAttribute(void *out, CUpointer_attribute a, CUdeviceptr p) {
    *(unsigned *)out = a == CU_POINTER_ATTRIBUTE_MEMORY_TYPE ? CU_MEMORYTYPE_DEVICE : 0;
    return CUDA_SUCCESS;
}
API CUresult cuMemGetAllocationGranularity(size_t *n, const CUmemAllocationProp *p, CUmemAllocationGranularity_flags f) {
    *n = GRANULARITY;
    return CUDA_SUCCESS;
}

API CUresult cuMemAddressReserve(CUdeviceptr *out, size_t n, size_t alignment, CUdeviceptr at, unsigned long long f) {
    if (!n || n % GRANULARITY) return CUDA_ERROR_INVALID_VALUE;
    char *raw = mmap(NULL, n + GRANULARITY, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED) return CUDA_ERROR_INVALID_VALUE;
    char *begin = (char *)whole((size_t)raw);
    LOCKED(keep(begin, n, RESERVED, current_device));
    *out = (CUdeviceptr)begin;
    return CUDA_SUCCESS;
}
API CUresult cuMemAddressFree(CUdeviceptr p, size_t n) {
    TRACE();
    size_t nbytes = 0;
    LOCKED(if (!mapping_at((void *)p)) nbytes = forget((void *)p, RESERVED));
    if (nbytes != n) return CUDA_ERROR_INVALID_VALUE;
    munmap((void *)p, n);
    return CUDA_SUCCESS;
}
static void *map_at(void *p, size_t n, int fd, size_t offset, int flags) {
    return mmap(p, n, PROT_NONE, flags | MAP_FIXED, fd, (off_t)offset);
}
API CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t n, const CUmemAllocationProp *p, unsigned long long f) {
    TRACE();
    bool fits;
    if (!n || n % GRANULARITY) return CUDA_ERROR_INVALID_VALUE;
    LOCKED(fits = take(p->location.id, n));
    if (!fits) return CUDA_ERROR_OUT_OF_MEMORY;
    struct handle *h = calloc(1, sizeof *h);
    *h = (struct handle){.fd = memfd_create("standin", MFD_CLOEXEC), .nbytes = n, .device = p->location.id};
    void *at = h->fd < 0 || ftruncate(h->fd, (off_t)n) ? MAP_FAILED : mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_SHARED, h->fd, 0);
    if (at == MAP_FAILED) {
        LOCKED(give(h->device, n));
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (settings.poison) memset(at, POISON, n);
    munmap(at, n);
    *out = (CUmemGenericAllocationHandle)h;
    return CUDA_SUCCESS;
}
static void end(struct handle *h) { /* a handle that is mapped keeps its memory */
    if (!h->released || h->mapped) return;
    give(h->device, h->nbytes);
    close(h->fd);
    free(h);
}
API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    TRACE();
    struct handle *h = (struct handle *)handle;
    LOCKED(h->released = true; end(h));
    return CUDA_SUCCESS;
}
/* Which handle is mapped where: as many as there are mappings. */
static struct place { char *at; struct handle *handle; struct place *next; } *places;
API CUresult cuMemMap(CUdeviceptr p, size_t n, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long f) {
    TRACE();
    struct handle *h = (struct handle *)handle;
    CUresult error = CUDA_SUCCESS;
    pthread_mutex_lock(&standin_lock);
    struct block *range = block_at((void *)p);
    if (!range || range->kind != RESERVED || p % GRANULARITY || offset + n > h->nbytes || mapping_at((void *)p)) error = CUDA_ERROR_INVALID_VALUE;
    else if (map_at((void *)p, n, h->fd, offset, MAP_SHARED) == MAP_FAILED) error = CUDA_ERROR_INVALID_VALUE;
    else {
        keep((void *)p, n, MAPPED, h->device);
        struct place *made = malloc(sizeof *made);
        *made = (struct place){(char *)p, h, places};
        places = made;
        h->mapped++;
    }
    pthread_mutex_unlock(&standin_lock);
    return error;
}
/* It does not wait for the device: work that is queued and reads there dies. */
API CUresult cuMemUnmap(CUdeviceptr p, size_t n) {
    TRACE();
    CUresult error = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&standin_lock);
    for (struct place **at = &places; *at; at = &(*at)->next)
        if ((*at)->at == (char *)p) {
            struct place *place = *at;
            *at = place->next;
            forget((void *)p, MAPPED);
            map_at((void *)p, n, -1, 0, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE);
            place->handle->mapped--;
            end(place->handle);
            free(place);
            error = CUDA_SUCCESS;
            break;
        }
    pthread_mutex_unlock(&standin_lock);
    return error;
}
API CUresult cuMemSetAccess(CUdeviceptr p, size_t n, const CUmemAccessDesc *d, size_t count) {
    TRACE();
    return mprotect((void *)p, n, PROT_READ | PROT_WRITE) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

/* Every other entry point exists, and is refused when it is called. */
static CUresult unsupported(void) {
    if (settings.trace) fprintf(stderr, "standin: an entry point that is not there\n");
    return CUDA_ERROR_NOT_SUPPORTED;
}
static void *entry(const char *name) {
    char with[128];
    void *found = dlsym(RTLD_DEFAULT, name);
    for (int v = 2; !found && v < 4; v++) {
        snprintf(with, sizeof with, "%s_v%d", name, v);
        found = dlsym(RTLD_DEFAULT, with);
    }
    if (!found && settings.trace) fprintf(stderr, "standin: asked for %s, which is not there\n", name);
    return found ? found : (void *)unsupported;
}
API CUresult cuGetProcAddress_v2(const char *name, void **out, int version, cuuint64_t f, CUdriverProcAddressQueryResult *status) {
    *out = entry(name);
    if (status) *status = CU_GET_PROC_ADDRESS_SUCCESS;
    return CUDA_SUCCESS;
}
API cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned version, unsigned long long f, enum cudaDriverEntryPointQueryResult *status) {
    *out = entry(name);
    if (status) *status = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
