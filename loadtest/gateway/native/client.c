/* A closed-loop HTTP/1.1 load client: one thread, one epoll, one request at a time on each connection.
 *
 *     client PORT CONNECTIONS WARM_S SECONDS STAGGER_MS BODY_FILE KEY
 *
 * Asks /v1/chat/completions until SECONDS after WARM_S, and until there is an answer to tell of, however busy the machine
 * is; then prints one JSON object. Connections begin spread evenly over
 * STAGGER_MS, as the streams of real clients are. `ttft_us` is to the first body byte, `gap_us` between server-sent events
 * of a stream (several in one read have no gap between them). `all_*` count from the start, for what was used meanwhile.
 */
#include "http.h"

#define HEAD_MAX 16384

typedef struct {
    int fd;
    size_t sent; /* of the request */
    char head[HEAD_MAX];
    size_t head_len;
    int in_body, ok;
    framing body;
    long body_len;
    char tail[5]; /* the last bytes of a chunked body */
    int newline;  /* the last byte was one */
    int64_t begun, first, latest;
} connection;

typedef struct {
    float *us;
    size_t count, cap;
} sample;

static char *request;
static size_t request_len;
static int port, epoll, recording;
static sample latency, ttft, gap;
static long requests, events, all_requests, all_events, errors, reconnects;

static void observe(sample *s, int64_t ns) {
    if (s->count == s->cap) {
        s->cap = s->cap ? s->cap * 2 : 65536;
        s->us = must(realloc(s->us, s->cap * sizeof *s->us));
    }
    s->us[s->count++] = ns / 1e3f;
}

static void watch(connection *c, int operation, uint32_t for_what) {
    struct epoll_event event = {.events = for_what, .data.ptr = c};
    epoll_ctl(epoll, operation, c->fd, &event);
}

static void open_connection(connection *c) {
    int one = 1;
    struct sockaddr_in address = loopback(port);
    while ((c->fd = socket(AF_INET, SOCK_STREAM, 0)) >= 0 && connect(c->fd, (void *)&address, sizeof address)) {
        if (errno != ECONNRESET) die("client: cannot connect");
        errors++; /* it met a listener that was closing; others may be there */
        close(c->fd);
    }
    if (c->fd < 0) die("client: cannot connect");
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    watch(c, EPOLL_CTL_ADD, EPOLLIN);
}

/* Sends what the socket takes of the request. */
static void push(connection *c) {
    ssize_t sent = send(c->fd, request + c->sent, request_len - c->sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) c->sent += sent; /* a failure shows when the answer is read */
    watch(c, EPOLL_CTL_MOD, c->sent < request_len ? EPOLLIN | EPOLLOUT : EPOLLIN);
}

static void begin(connection *c) {
    c->sent = c->head_len = 0;
    c->in_body = c->newline = 0;
    c->body_len = 0;
    c->first = c->latest = 0;
    memset(c->tail, 0, sizeof c->tail);
    c->begun = now_ns();
    ssize_t sent = send(c->fd, request, request_len, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) c->sent = sent;
    if (c->sent < request_len) watch(c, EPOLL_CTL_MOD, EPOLLIN | EPOLLOUT);
}

static void begin_anew(connection *c) {
    close(c->fd);
    reconnects++;
    open_connection(c);
    begin(c);
}

static void failed(connection *c) {
    errors++;
    begin_anew(c);
}

static void answered(connection *c, int keep) {
    all_requests++;
    if (!c->ok) {
        errors++;
    } else if (recording) {
        requests++;
        observe(&latency, now_ns() - c->begun);
        if (c->first) observe(&ttft, c->first - c->begun);
    }
    if (keep)
        begin(c);
    else
        begin_anew(c);
}

static void count_events(connection *c, const char *data, size_t length, int64_t now) {
    for (size_t i = 0; i < length; i++) {
        int newline = data[i] == '\n';
        if (newline && c->newline) {
            all_events++;
            if (recording) {
                events++;
                if (c->latest) observe(&gap, now - c->latest);
            }
            c->latest = now;
            newline = 0;
        }
        c->newline = newline;
    }
}

/* 1 when the answer is complete. */
static int take_body(connection *c, const char *data, size_t length, int64_t now) {
    if (length && !c->first) c->first = now;
    c->body_len += length;
    if (!c->body.chunked) return c->body.content_length >= 0 && c->body_len >= c->body.content_length;
    count_events(c, data, length, now);
    size_t kept = length < 5 ? 5 - length : 0;
    memmove(c->tail, c->tail + 5 - kept, kept);
    memcpy(c->tail + kept, data + length - (5 - kept), 5 - kept);
    return !memcmp(c->tail, "0\r\n\r\n", 5);
}

/* Bytes of `data` that belong to the head; it is complete when `in_body` is set. */
static size_t take_head(connection *c, const char *data, size_t length) {
    size_t before = c->head_len, room = HEAD_MAX - 1 - before;
    if (length > room) length = room;
    memcpy(c->head + before, data, length);
    c->head_len += length;
    char *end = memmem(c->head, c->head_len, "\r\n\r\n", 4);
    if (!end) return length;
    c->head_len = end + 4 - c->head;
    c->in_body = 1;
    c->ok = !memcmp(c->head + 9, "200", 3);
    c->body = read_framing(c->head, c->head_len);
    if (!c->ok && errors < 3) fprintf(stderr, "client: %.*s\n", (int)c->head_len, c->head);
    return c->head_len - before;
}

static void readable(connection *c) {
    static char data[1 << 18];
    ssize_t got = recv(c->fd, data, sizeof data, MSG_DONTWAIT);
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) {
        int by_close = got == 0 && c->in_body && c->body.content_length < 0 && !c->body.chunked;
        if (by_close)
            answered(c, 0);
        else
            failed(c);
        return;
    }
    int64_t now = now_ns();
    size_t used = c->in_body ? 0 : take_head(c, data, got);
    if (!c->in_body) {
        if (c->head_len >= HEAD_MAX - 1) failed(c);
        return;
    }
    if (take_body(c, data + used, got - used, now)) answered(c, 1);
}

static int ascending(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static void print_sample(const char *name, sample *s) {
    qsort(s->us, s->count, sizeof *s->us, ascending);
    double at[] = {0.5, 0.9, 0.99, 1.0};
    printf(",\"%s\":[", name);
    for (int i = 0; i < 4; i++)
        printf("%s%.1f", i ? "," : "", s->count ? s->us[(size_t)(at[i] * (s->count - 1) + 0.5)] : 0.0);
    printf("]");
}

static void load_request(const char *file, const char *key) {
    FILE *f = fopen(file, "rb");
    if (!f || fseek(f, 0, SEEK_END)) die(file);
    long length = ftell(f);
    rewind(f);
    request = must(malloc(length + 1024 + strlen(key)));
    request_len = sprintf(request,
                          "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\naccept: */*\r\nuser-agent: bench\r\n"
                          "content-type: application/json\r\nauthorization: Bearer %s\r\ncontent-length: %ld\r\n\r\n",
                          port, key, length);
    if (fread(request + request_len, 1, length, f) != (size_t)length) die(file);
    request_len += length;
    fclose(f);
}

int main(int argc, char **argv) {
    if (argc != 8) return fprintf(stderr, "client PORT CONNECTIONS WARM_S SECONDS STAGGER_MS BODY_FILE KEY\n"), 2;
    signal(SIGPIPE, SIG_IGN);
    port = atoi(argv[1]);
    int count = atoi(argv[2]), open = 0;
    int64_t warm = atof(argv[3]) * SECOND_NS, length = atof(argv[4]) * SECOND_NS, stagger = atof(argv[5]) * 1000000;
    load_request(argv[6], argv[7]);
    epoll = epoll_create1(0);
    connection *all = must(calloc(count, sizeof *all));
    int64_t start = now_ns(), now = start;
    struct epoll_event ready[256];
    for (; now < start + warm + length || !(requests + errors); now = now_ns()) {
        for (; open < count && now - start >= stagger * open / count; open++) {
            open_connection(&all[open]);
            begin(&all[open]);
        }
        if (now >= start + warm) recording = 1;
        int n = epoll_wait(epoll, ready, 256, open < count ? 1 : 20);
        for (int i = 0; i < n; i++) {
            if (ready[i].events & EPOLLOUT) push(ready[i].data.ptr);
            if (ready[i].events & ~EPOLLOUT) readable(ready[i].data.ptr);
        }
    }
    double seconds = (now - start - warm) / 1e9;
    printf("{\"seconds\":%.4f,\"requests\":%ld,\"events\":%ld,\"all_requests\":%ld,\"all_events\":%ld,\"errors\":%ld,"
           "\"reconnects\":%ld",
           seconds, requests, events, all_requests, all_events, errors, reconnects);
    print_sample("latency_us", &latency);
    print_sample("ttft_us", &ttft);
    print_sample("gap_us", &gap);
    printf("}\n");
}
