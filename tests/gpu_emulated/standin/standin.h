/* What the files of the stand-in share. README of what it is: docs/testing.md, "An emulated GPU". */
#pragma once
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))
#define NAME "NVIDIA H100 80GB HBM3"
#define VERSION 13000
#define GRANULARITY ((size_t)2 << 20)
#define MOST_DEVICES 16
#define POISON 0xA5 /* what memory holds that was never written, or was given back */

/* One lock guards all that is below. Work of Python's is called without it. */
extern pthread_mutex_t standin_lock;
#define LOCKED(...) do { pthread_mutex_lock(&standin_lock); __VA_ARGS__; pthread_mutex_unlock(&standin_lock); } while (0)

/* settings.c: `standin_set` and the variable STANDIN write them, before the first call of CUDA. */
struct settings {
    long late;    /* 1: what is queued runs when somebody waits for it, and not before */
    long poison;  /* 1: memory that is new or was given back holds POISON */
    long devices; /* how many there are */
    long mib;     /* memory of each */
    long pin;     /* 0: host memory cannot be registered */
    long trace;   /* 1: names of calls, on stderr */
};
extern struct settings settings;
extern struct counters {
    long captured, replayed; /* graphs */
    long kernels;            /* launches of machine code, which compute nothing */
    long largest_to_host;    /* bytes of the largest copy from a device to the host */
} counters;
void count_to_host(size_t nbytes); /* settings.c; callers hold the lock */
#define TRACE() do { if (settings.trace) fprintf(stderr, "standin: %s\n", __func__); } while (0)

extern __thread int current_device;
extern __thread cudaError_t last_error;
static inline cudaError_t failed(cudaError_t error) { return last_error = error; }

/* memory.c. Callers hold the lock. */
enum kind { DEVICE, PINNED, RESERVED, MAPPED };
struct block { char *begin; size_t nbytes; enum kind kind; int device; unsigned long serial; struct block *next; };
struct block *block_at(const void *address);                 /* of DEVICE, PINNED or RESERVED memory */
struct block *mapping_at(const void *address);               /* what is mapped there, of RESERVED memory */
bool is_mapped(const void *address);                         /* whether device memory can be read there */
struct block *keep(void *begin, size_t nbytes, enum kind kind, int device);
size_t forget(const void *begin, enum kind kind);            /* its size; 0: there is none */
bool take(int device, size_t nbytes);                        /* false: the device has not that much */
void give(int device, size_t nbytes);
size_t taken(int device);
size_t whole(size_t nbytes);                                 /* in units of GRANULARITY */

/* streams.c. Callers hold the lock, which is let go while work of Python's runs. */
struct span { char *begin; size_t nbytes; unsigned long serial; };
enum what { COPY, COPY_ROWS, FILL, MARK, WAIT, CALL };
struct op {
    enum what what;
    void *to; const void *from; void *owned; /* owned: freed when the op is done */
    size_t nbytes, pitch, from_pitch, rows;
    int value; bool rubbish; /* rubbish: nothing where the memory is unmapped by now */
    struct CUevent_st *event; unsigned long turn;
    cudaHostFn_t call; void *data;
    struct span *spans; size_t span_count;   /* of device memory that it reads or writes */
    struct op *next;
};
struct CUstream_st {
    struct op *first, **end;
    int device, priority;
    pthread_t runner; bool running;
    struct graph *capturing; unsigned long long capture_id;
    struct CUstream_st *next;
};
extern struct CUstream_st *streams;
struct CUstream_st *stream_of(cudaStream_t stream);
void queue(struct CUstream_st *stream, struct op op);
void drain(struct CUstream_st *stream);
void drain_device(int device);

/* graphs.c. Callers hold the lock. */
void capture(struct graph *graph, struct op *op);
void graphs_lose(const void *begin, size_t nbytes);          /* what graphs read there is gone */
