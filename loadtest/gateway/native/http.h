/* What the benchmark's server and client share: a clock, and just enough HTTP/1.1 to know where a message ends. */
#ifndef HOTSWAP_BENCH_HTTP_H
#define HOTSWAP_BENCH_HTTP_H

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#define SECOND_NS 1000000000LL
#define MAX_FD 16384

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * SECOND_NS + t.tv_nsec;
}

static void die(const char *what) {
    perror(what);
    exit(1);
}

static void *must(void *memory) {
    if (!memory) die("out of memory");
    return memory;
}

static struct sockaddr_in loopback(int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
}

/* A message's head is NUL-terminated in place of its last byte while a header is looked up. */
typedef struct {
    long content_length; /* -1: not given */
    int chunked;
} framing;

static framing read_framing(char *head, size_t length) {
    char kept = head[length - 1];
    head[length - 1] = 0;
    char *size = strcasestr(head, "\ncontent-length:");
    framing found = {.content_length = size ? strtol(size + 16, NULL, 10) : -1};
    found.chunked = strcasestr(head, "\ntransfer-encoding: chunked") != NULL;
    head[length - 1] = kept;
    return found;
}

#endif
