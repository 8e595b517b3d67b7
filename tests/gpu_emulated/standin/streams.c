/* Streams and events. What is queued runs at once, or as late as the rules of CUDA allow (`late`): when somebody waits
 * for the stream, for an event behind it, or for the device. Who reads without having waited reads old bytes then. */
#include "standin.h"
#include <dlfcn.h>
#include <time.h>

struct CUevent_st { struct CUstream_st *stream; unsigned long recorded, done; double at; };
static struct CUstream_st defaults[MOST_DEVICES]; /* the default stream of each device */
struct CUstream_st *streams;
static pthread_cond_t moved = PTHREAD_COND_INITIALIZER;

__attribute__((constructor(101))) static void begin(void) {
    for (int i = 0; i < MOST_DEVICES; i++) {
        defaults[i] = (struct CUstream_st){.end = &defaults[i].first, .device = i, .next = streams};
        streams = &defaults[i];
    }
}
struct CUstream_st *stream_of(cudaStream_t s) { return (uintptr_t)s < 3 ? &defaults[current_device] : s; }

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}

/* Another thread runs work of this stream, which may be Python's: it must be able to. */
static void wait_for_runner(void) {
    static int (*check)(void);
    static void *(*save)(void);
    static void (*restore)(void *);
    if (!check) {
        check = dlsym(RTLD_DEFAULT, "PyGILState_Check");
        save = dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
        restore = dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
    }
    void *state = check && check() ? save() : NULL;
    pthread_cond_wait(&moved, &standin_lock);
    if (!state) return;
    pthread_mutex_unlock(&standin_lock); /* who has Python's lock may want this one */
    restore(state);
    pthread_mutex_lock(&standin_lock);
}

static void drain_until(struct CUstream_st *s, struct CUevent_st *event, unsigned long turn);
static void run(struct op *op) {
    switch (op->what) {
    case COPY: memmove(op->to, op->from, op->nbytes); break;
    case COPY_ROWS:
        for (size_t r = 0; r < op->rows; r++)
            memmove((char *)op->to + r * op->pitch, (char *)op->from + r * op->from_pitch, op->nbytes);
        break;
    case FILL:
        if (!op->rubbish || is_mapped(op->to)) memset(op->to, op->value, op->nbytes);
        break;
    case MARK: if (op->turn > op->event->done) op->event->done = op->turn, op->event->at = now_ms(); break;
    case WAIT: if (op->event->stream) drain_until(op->event->stream, op->event, op->turn); break;
    case CALL:
        pthread_mutex_unlock(&standin_lock);
        op->call(op->data);
        pthread_mutex_lock(&standin_lock);
    }
}
static void drain_until(struct CUstream_st *s, struct CUevent_st *event, unsigned long turn) {
    while (!(event && event->done >= turn) && (s->first || s->running)) {
        if (s->running) {
            if (pthread_equal(s->runner, pthread_self())) return; /* it waits for itself: the work at hand goes first */
            wait_for_runner();
            continue;
        }
        struct op *op = s->first;
        s->first = op->next;
        if (!s->first) s->end = &s->first;
        s->running = true, s->runner = pthread_self();
        run(op);
        s->running = false;
        pthread_cond_broadcast(&moved);
        free(op->owned);
        free(op->spans);
        free(op);
    }
}
void drain(struct CUstream_st *s) { drain_until(s, NULL, 0); }
static bool has_rubbish(const struct CUstream_st *s) {
    for (const struct op *op = s->first; op; op = op->next)
        if (op->rubbish) return true;
    return false;
}
/* Streams on which memory was given back come first: others that read there without a wait read rubbish. */
void drain_device(int device) {
    for (int all = 0; all < 2; all++)
        for (struct CUstream_st *s = streams; s; s = s->next)
            if (s->device == device && (all || has_rubbish(s))) drain(s);
}
void queue(struct CUstream_st *s, struct op op) {
    struct op *made = malloc(sizeof *made);
    *made = op;
    made->next = NULL;
    if (s->capturing && op.what != MARK && op.what != WAIT) {
        capture(s->capturing, made);
        return;
    }
    *s->end = made;
    s->end = &made->next;
    if (!settings.late) drain(s);
}

/* The driver reads pageable memory before the call returns, and pinned memory when the copy runs; a copy to pageable
 * memory returns when it is done. */
static void queue_copy(struct op op, cudaStream_t stream) {
    struct CUstream_st *s = stream_of(stream);
    struct block *from = block_at(op.from), *to = block_at(op.to);
    size_t nbytes = op.what == COPY ? op.nbytes : op.nbytes * op.rows;
    if (!nbytes) return;
    if (from && from->kind != PINNED && (!to || to->kind == PINNED)) count_to_host(nbytes);
    if (!from && op.what == COPY) {
        op.owned = malloc(nbytes);
        op.from = memcpy(op.owned, op.from, nbytes);
    }
    queue(s, op);
    if (!s->capturing && (!to || (!from && op.what != COPY))) drain(s);
}
API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind k, cudaStream_t s) {
    TRACE();
    LOCKED(queue_copy((struct op){COPY, .to = to, .from = from, .nbytes = n}, s));
    return cudaSuccess;
}
API cudaError_t cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t n, cudaStream_t s) {
    return cudaMemcpyAsync(to, from, n, cudaMemcpyDeviceToDevice, s);
}
API cudaError_t cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind k) {
    LOCKED(queue_copy((struct op){COPY, .to = to, .from = from, .nbytes = n}, 0); drain(stream_of(0)));
    return cudaSuccess;
}
API cudaError_t cudaMemcpy2DAsync(void *to, size_t pitch, const void *from, size_t from_pitch, size_t width, size_t rows, enum cudaMemcpyKind k, cudaStream_t s) {
    LOCKED(queue_copy((struct op){COPY_ROWS, .to = to, .from = from, .nbytes = width, .pitch = pitch, .from_pitch = from_pitch, .rows = rows}, s));
    return cudaSuccess;
}
API cudaError_t cudaMemsetAsync(void *to, int value, size_t n, cudaStream_t s) {
    LOCKED(queue(stream_of(s), (struct op){FILL, .to = to, .value = value, .nbytes = n}));
    return cudaSuccess;
}
API cudaError_t cudaMemset(void *to, int value, size_t n) {
    LOCKED(queue(stream_of(0), (struct op){FILL, .to = to, .value = value, .nbytes = n}); drain(stream_of(0)));
    return cudaSuccess;
}

/* Work of Python's. `spans`: addresses and sizes of the device memory that it reads and writes, by turns. */
API int standin_call(cudaStream_t s, cudaHostFn_t call, void *data, const uintptr_t *spans, size_t count) {
    struct op op = {CALL, .call = call, .data = data, .span_count = count};
    op.spans = calloc(count + 1, sizeof *op.spans);
    pthread_mutex_lock(&standin_lock);
    for (size_t i = 0; i < count; i++) {
        struct block *b = block_at((void *)spans[2 * i]);
        op.spans[i] = (struct span){(char *)spans[2 * i], spans[2 * i + 1], b ? b->serial : 0};
    }
    queue(stream_of(s), op);
    pthread_mutex_unlock(&standin_lock);
    return 0;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *data) { return standin_call(s, f, data, NULL, 0); }

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority) {
    TRACE();
    struct CUstream_st *s = calloc(1, sizeof *s);
    *s = (struct CUstream_st){.end = &s->first, .device = current_device, .priority = priority};
    LOCKED(s->next = streams; streams = s);
    *out = s;
    return cudaSuccess;
}
API cudaError_t cudaStreamCreate(cudaStream_t *out) { return cudaStreamCreateWithPriority(out, 0, 0); }
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned f) { return cudaStreamCreateWithPriority(out, f, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t s) { return cudaSuccess; } /* what is queued runs on */
API cudaError_t cudaStreamSynchronize(cudaStream_t s) {
    TRACE();
    struct CUstream_st *of = stream_of(s);
    if (of->capturing) return failed(cudaErrorStreamCaptureUnsupported);
    LOCKED(drain(of));
    return cudaSuccess;
}
API cudaError_t cudaStreamQuery(cudaStream_t s) {
    struct CUstream_st *of = stream_of(s);
    bool busy;
    LOCKED(busy = of->first || of->running; drain(of)); /* who asks again is told that it is done */
    return busy ? cudaErrorNotReady : cudaSuccess;
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) {
    TRACE();
    LOCKED(if (e->recorded > e->done) queue(stream_of(s), (struct op){WAIT, .event = e, .turn = e->recorded}));
    return cudaSuccess;
}
API cudaError_t cudaStreamGetPriority(cudaStream_t s, int *p) { *p = stream_of(s)->priority; return cudaSuccess; }
API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return cudaSuccess; }
API cudaError_t cudaDeviceSynchronize(void) { TRACE(); LOCKED(drain_device(current_device)); return cudaSuccess; }

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) { *e = calloc(1, sizeof **e); return cudaSuccess; }
API cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t e) { return cudaSuccess; } /* what is queued may still name it */
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags) {
    TRACE();
    LOCKED(e->stream = stream_of(s); queue(e->stream, (struct op){MARK, .event = e, .turn = ++e->recorded}));
    return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return cudaEventRecordWithFlags(e, s, 0); }
API cudaError_t cudaEventSynchronize(cudaEvent_t e) {
    TRACE();
    LOCKED(if (e->stream) drain_until(e->stream, e, e->recorded));
    return cudaSuccess;
}
API cudaError_t cudaEventQuery(cudaEvent_t e) {
    bool busy;
    LOCKED(busy = e->recorded > e->done; if (e->stream) drain_until(e->stream, e, e->recorded));
    return busy ? cudaErrorNotReady : cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) {
    *ms = b->at > a->at ? (float)(b->at - a->at) : 0.001f;
    return cudaSuccess;
}
