/* Memory of the devices, which is the host's, and host memory that is pinned. */
#include "standin.h"
#include <sys/mman.h>

static struct block *blocks, *mappings;
static size_t used[MOST_DEVICES], others[MOST_DEVICES]; /* others: what another process holds */
static unsigned long serials;

static bool covers(const struct block *b, const char *at) { return at >= b->begin && at < b->begin + b->nbytes; }
static struct block *in(struct block *list, const void *at) {
    while (list && !covers(list, at)) list = list->next;
    return list;
}
struct block *block_at(const void *at) { return in(blocks, at); }
struct block *mapping_at(const void *at) { return in(mappings, at); }
bool is_mapped(const void *at) {
    struct block *b = block_at(at);
    return b && (b->kind != RESERVED || mapping_at(at));
}

struct block *keep(void *begin, size_t nbytes, enum kind kind, int device) {
    struct block **list = kind == MAPPED ? &mappings : &blocks, *made = malloc(sizeof *made);
    *made = (struct block){begin, nbytes, kind, device, ++serials, *list};
    return *list = made;
}
size_t forget(const void *begin, enum kind kind) {
    for (struct block **at = kind == MAPPED ? &mappings : &blocks; *at; at = &(*at)->next)
        if ((*at)->begin == (char *)begin && (*at)->kind == kind) {
            struct block *b = *at;
            size_t nbytes = b->nbytes;
            *at = b->next;
            free(b);
            return nbytes;
        }
    return 0;
}

size_t whole(size_t nbytes) { return (nbytes + GRANULARITY - 1) / GRANULARITY * GRANULARITY; }
size_t taken(int device) { return device >= 0 && device < MOST_DEVICES ? used[device] + others[device] : 0; }
bool take(int device, size_t nbytes) {
    if (taken(device) + nbytes > (size_t)settings.mib << 20) return false;
    used[device] += nbytes;
    return true;
}
void give(int device, size_t nbytes) { used[device] -= nbytes; }

/* Another process holds so much of a device from now on. */
API void standin_hold(int device, size_t nbytes) { LOCKED(others[device] = nbytes); }

/* Torch has given this memory back to its allocator. Work that is queued behind on its stream may have it; what another
 * stream still reads there is lost, and so is what a graph reads. */
API void standin_give_back(void *begin, size_t nbytes, cudaStream_t stream) {
    LOCKED(
        graphs_lose(begin, nbytes);
        struct CUstream_st *s = stream_of(stream);
        if (settings.poison && block_at(begin) && !s->capturing)
            queue(s, (struct op){FILL, .to = begin, .value = POISON, .nbytes = nbytes, .rubbish = true});
    );
}

API cudaError_t cudaMalloc(void **out, size_t nbytes) {
    TRACE();
    cudaError_t error = cudaErrorMemoryAllocation;
    nbytes = whole(nbytes);
    pthread_mutex_lock(&standin_lock);
    if (take(current_device, nbytes)) {
        *out = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (*out == MAP_FAILED) give(current_device, nbytes);
        else keep(*out, nbytes, DEVICE, current_device), error = cudaSuccess;
    }
    pthread_mutex_unlock(&standin_lock);
    if (!error && settings.poison) memset(*out, POISON, nbytes);
    return error ? failed(error) : cudaSuccess;
}
/* It waits for the device, as the runtime does. Who reads there afterwards dies. */
API cudaError_t cudaFree(void *p) {
    TRACE();
    if (!p) return cudaSuccess;
    pthread_mutex_lock(&standin_lock);
    struct block *b = block_at(p);
    int device = b ? b->device : 0;
    if (b) drain_device(device);
    size_t nbytes = forget(p, DEVICE);
    if (nbytes) {
        give(device, nbytes);
        graphs_lose(p, nbytes);
        munmap(p, nbytes);
    }
    pthread_mutex_unlock(&standin_lock);
    return nbytes ? cudaSuccess : failed(cudaErrorInvalidValue);
}
API cudaError_t cudaMallocAsync(void **p, size_t n, cudaStream_t s) { return cudaMalloc(p, n); }
API cudaError_t cudaFreeAsync(void *p, cudaStream_t s) { return cudaFree(p); }

API cudaError_t cudaHostAlloc(void **out, size_t nbytes, unsigned flags) {
    nbytes = nbytes ? nbytes : 1;
    *out = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*out == MAP_FAILED) return failed(cudaErrorMemoryAllocation);
    LOCKED(keep(*out, nbytes, PINNED, current_device));
    return cudaSuccess;
}
API cudaError_t cudaFreeHost(void *p) {
    LOCKED(
        drain_device(current_device);
        size_t nbytes = forget(p, PINNED);
        if (nbytes) munmap(p, nbytes);
    );
    return cudaSuccess;
}
API cudaError_t cudaHostRegister(void *p, size_t nbytes, unsigned flags) {
    TRACE();
    cudaError_t error = cudaSuccess;
    if (!settings.pin) return failed(cudaErrorMemoryAllocation);
    LOCKED(
        if (block_at(p)) error = cudaErrorHostMemoryAlreadyRegistered;
        else keep(p, nbytes, PINNED, current_device);
    );
    return error ? failed(error) : cudaSuccess;
}
/* The driver does not wait here for copies that still read it: neither does this. Late ones read what is there then. */
API cudaError_t cudaHostUnregister(void *p) {
    TRACE();
    size_t nbytes;
    LOCKED(nbytes = forget(p, PINNED));
    return nbytes ? cudaSuccess : failed(cudaErrorHostMemoryNotRegistered);
}
API cudaError_t cudaHostGetDevicePointer(void **out, void *p, unsigned flags) { *out = p; return cudaSuccess; }
API cudaError_t cudaMemGetInfo(size_t *unused, size_t *all) {
    LOCKED(*all = (size_t)settings.mib << 20; *unused = *all - taken(current_device));
    return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *p) {
    memset(out, 0, sizeof *out);
    pthread_mutex_lock(&standin_lock);
    struct block *b = block_at(p);
    out->type = !b ? cudaMemoryTypeUnregistered : b->kind == PINNED ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    out->device = b ? b->device : -2;
    out->devicePointer = b ? (void *)p : NULL;
    out->hostPointer = b && b->kind == PINNED ? (void *)p : NULL;
    pthread_mutex_unlock(&standin_lock);
    return cudaSuccess;
}
