/* Graphs: the work that was captured, and the addresses that it reads and writes, which must stay. A replay queues the
 * work anew. It is refused where memory was freed, or unmapped, that the graph takes in. */
#include "standin.h"

struct graph { struct op *first, **end; const void *lost; struct graph *next; };
static struct graph *graphs;
static const struct graph EMPTY;

static struct span span_of(const void *begin, size_t nbytes) {
    struct block *b = block_at(begin);
    return (struct span){(char *)begin, nbytes, b ? b->serial : 0};
}
void capture(struct graph *graph, struct op *op) {
    if (op->what != CALL) { /* those of Python's work were said */
        op->spans = calloc(2, sizeof *op->spans);
        size_t nbytes = op->rows ? op->nbytes * op->rows : op->nbytes;
        op->spans[op->span_count++] = span_of(op->to, nbytes);
        if (op->from) op->spans[op->span_count++] = span_of(op->from, nbytes);
    }
    *graph->end = op;
    graph->end = &op->next;
}

static bool is_there(const struct span *span) {
    struct block *b = block_at(span->begin);
    if (!span->serial) return true; /* pageable memory of the host */
    if (!b || b->serial != span->serial) return false;
    return is_mapped(span->begin);
}
void graphs_lose(const void *begin, size_t nbytes) {
    const char *first = begin, *last = first + nbytes;
    for (struct graph *g = graphs; g; g = g->next)
        for (struct op *op = g->first; op; op = op->next)
            for (size_t i = 0; i < op->span_count; i++) {
                struct span *span = &op->spans[i];
                if (span->nbytes && span->begin < last && first < span->begin + span->nbytes) g->lost = span->begin;
            }
}

API cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) {
    *status = stream_of(s)->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *g, const cudaGraphNode_t **d, const cudaGraphEdgeData **e, size_t *n) {
    struct CUstream_st *of = stream_of(s);
    cudaStreamIsCapturing(s, status);
    if (id) *id = of->capture_id;
    if (g) *g = (cudaGraph_t)of->capturing;
    if (d) *d = NULL;
    if (e) *e = NULL;
    if (n) *n = 0;
    return cudaSuccess;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return cudaSuccess; }
API cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode) {
    static unsigned long long ids;
    TRACE();
    struct graph *made = malloc(sizeof *made);
    *made = EMPTY;
    made->end = &made->first;
    LOCKED(
        struct CUstream_st *of = stream_of(s);
        drain(of);
        made->next = graphs, graphs = made;
        of->capturing = made, of->capture_id = ++ids;
    );
    return cudaSuccess;
}
API cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *g) {
    TRACE();
    LOCKED(
        struct CUstream_st *of = stream_of(s);
        *g = (cudaGraph_t)of->capturing;
        of->capturing = NULL;
        counters.captured++;
    );
    return *g ? cudaSuccess : failed(cudaErrorIllegalState);
}
API cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t *nodes, size_t *n) {
    *n = 0;
    LOCKED(for (struct op *op = ((struct graph *)g)->first; op; op = op->next) (*n)++);
    return cudaSuccess;
}
/* One graph for both: it is kept until it is not replayed any more. */
API cudaError_t cudaGraphInstantiate(cudaGraphExec_t *e, cudaGraph_t g, unsigned long long f) { *e = (cudaGraphExec_t)g; return cudaSuccess; }
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *e, cudaGraph_t g, unsigned long long f) { return cudaGraphInstantiate(e, g, f); }
API cudaError_t cudaGraphUpload(cudaGraphExec_t e, cudaStream_t s) { return cudaSuccess; }
API cudaError_t cudaGraphDestroy(cudaGraph_t g) { return cudaSuccess; }
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t e) {
    LOCKED(
        for (struct graph **at = &graphs; *at; at = &(*at)->next)
            if (*at == (struct graph *)e) {
                *at = (*at)->next;
                break;
            }
    );
    return cudaSuccess;
}
API cudaError_t cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t s) {
    TRACE();
    struct graph *g = (struct graph *)e;
    pthread_mutex_lock(&standin_lock);
    for (struct op *op = g->first; op && !g->lost; op = op->next)
        for (size_t i = 0; i < op->span_count && !g->lost; i++)
            if (!is_there(&op->spans[i])) g->lost = op->spans[i].begin;
    const void *lost = g->lost;
    if (!lost) {
        counters.replayed++;
        for (struct op *op = g->first; op; op = op->next) {
            struct op again = *op;
            again.owned = NULL, again.spans = NULL, again.span_count = 0; /* the graph's own */
            queue(stream_of(s), again);
        }
    }
    pthread_mutex_unlock(&standin_lock);
    if (!lost) return cudaSuccess;
    fprintf(stderr, "standin: a graph takes in memory at %p that was freed or unmapped since its capture\n", lost);
    return failed(cudaErrorIllegalAddress);
}
