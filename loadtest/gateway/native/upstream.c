/* A fast stand-in for an instance: canned OpenAI answers, one thread, one epoll.
 *
 *     upstream [PORT]        0 or nothing: any free port; the port is the first line printed
 *
 * A chat completion is answered whole (about 1.2 KB), or, with "stream": true, in "max_tokens" chunks, each a write of
 * its own as an engine's are: the first at once, the others "seed" milliseconds apart (0 or none: without a pause). As an
 * instance of this project does, it stamps token ids and the weight version into the chunks for who asks for that.
 * Other paths are what routers ask a worker when they start. Requests come one at a time on a connection; the parameters
 * are looked for at both ends of the body only, so that a long prompt costs nothing here.
 */
#include "http.h"

#define PARAMETERS_WITHIN 2048 /* bytes from either end of a request body */

typedef struct {
    char *in; /* the request so far */
    size_t in_len, in_cap;
    size_t head_len; /* 0: its end has not been seen */
    framing body;
    char *out; /* what the socket did not take */
    size_t out_len, out_sent;
    long chunks_left; /* of the stream being sent; -1: none is */
    int resumable;    /* with chunks that another instance could go on from */
    int64_t pace_ns, due_ns;
} connection;

static connection *connections[MAX_FD];
static int paced[MAX_FD], paced_count; /* descriptors whose next chunk waits for its time */
static int epoll, timer;
typedef struct {
    char bytes[4096];
    size_t len;
} canned;

static canned whole, stream_head[2], chunk[2], last[2]; /* of streams: plain ones, and resumable ones */

static void drop(int fd) {
    connection *c = connections[fd];
    connections[fd] = NULL;
    for (int i = 0; i < paced_count; i++) /* its number may be another connection's soon */
        if (paced[i] == fd) paced[i] = -1;
    free(c->in);
    free(c->out);
    free(c);
    close(fd);
}

/* Sends, keeping what the socket does not take. 0 if the connection is gone. */
static int answer(int fd, const char *data, size_t length) {
    connection *c = connections[fd];
    if (c->out_len == c->out_sent) {
        c->out_len = c->out_sent = 0;
        ssize_t sent = send(fd, data, length, MSG_NOSIGNAL);
        if (sent < 0 && errno != EAGAIN) return drop(fd), 0;
        if (sent == (ssize_t)length) return 1;
        if (sent > 0) data += sent, length -= sent;
    }
    c->out = must(realloc(c->out, c->out_len + length));
    memcpy(c->out + c->out_len, data, length);
    c->out_len += length;
    struct epoll_event both = {.events = EPOLLIN | EPOLLOUT, .data.fd = fd};
    epoll_ctl(epoll, EPOLL_CTL_MOD, fd, &both);
    return 1;
}

static void writable(int fd) {
    connection *c = connections[fd];
    while (c->out_sent < c->out_len) {
        ssize_t sent = send(fd, c->out + c->out_sent, c->out_len - c->out_sent, MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno != EAGAIN) drop(fd);
            return;
        }
        c->out_sent += sent;
    }
    struct epoll_event in = {.events = EPOLLIN, .data.fd = fd};
    epoll_ctl(epoll, EPOLL_CTL_MOD, fd, &in);
}

static void answer_json(int fd, const char *json) {
    char page[8192];
    int length = snprintf(page, sizeof page,
                          "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%s",
                          strlen(json), json);
    answer(fd, page, length);
}

/* The integer after `"name":`, near one end of the body, or `otherwise`. */
static long parameter(const char *body, size_t length, const char *name, long otherwise) {
    char key[64];
    int key_len = snprintf(key, sizeof key, "\"%s\"", name);
    const char *at = memmem(body, length < PARAMETERS_WITHIN ? length : PARAMETERS_WITHIN, key, key_len);
    if (!at && length > PARAMETERS_WITHIN)
        at = memmem(body + length - PARAMETERS_WITHIN, PARAMETERS_WITHIN, key, key_len);
    if (!at) return otherwise;
    for (at += key_len; *at == ' ' || *at == ':';) at++;
    if (*at == 't') return 1; /* true */
    return *at >= '0' && *at <= '9' ? strtol(at, NULL, 10) : otherwise;
}

/* One chunk, and the end after the last. 0 if the connection is gone. */
static int step(int fd) {
    connection *c = connections[fd];
    canned *next = c->chunks_left-- > 0 ? &chunk[c->resumable] : &last[c->resumable];
    return answer(fd, next->bytes, next->len);
}

static void begin_stream(int fd, const char *body, size_t length) {
    connection *c = connections[fd];
    c->resumable = memmem(c->in, c->head_len, "\nx-hotswap-resumable: 1", 23) != NULL;
    long fallback = parameter(body, length, "max_completion_tokens", 64);
    c->chunks_left = parameter(body, length, "max_tokens", fallback);
    c->pace_ns = parameter(body, length, "seed", 0) * 1000000;
    if (!answer(fd, stream_head[c->resumable].bytes, stream_head[c->resumable].len) || !step(fd)) return;
    if (c->pace_ns) {
        c->due_ns = now_ns() + c->pace_ns;
        paced[paced_count++] = fd;
        return;
    }
    while (c->chunks_left >= 0)
        if (!step(fd)) return;
}

static void handle(int fd, const char *head, const char *body, size_t length) {
    if (!strncmp(head, "POST /v1/", 9) && !memmem(head, 48, "render", 6)) {
        if (parameter(body, length, "stream", 0) == 1)
            begin_stream(fd, body, length);
        else
            answer(fd, whole.bytes, whole.len);
    } else if (!strncmp(head, "GET /v1/models", 14)) {
        answer_json(fd, "{\"object\":\"list\",\"data\":[{\"id\":\"mock\",\"object\":\"model\",\"created\":1700000000,"
                        "\"owned_by\":\"vllm\",\"root\":\"mock\",\"max_model_len\":32768}]}");
    } else if (memmem(head, 40, "info", 4)) {
        answer_json(fd, "{\"model_path\":\"mock\",\"model_id\":\"mock\",\"served_model_name\":\"mock\","
                        "\"tokenizer_path\":\"mock\",\"version\":\"0.1\",\"is_generation\":true}");
    } else if (!strncmp(head, "GET /version", 12)) {
        answer_json(fd, "{\"version\":\"0.11.0\"}");
    } else if (!strncmp(head, "POST", 4)) { /* tokenizing for a cache-aware policy: 200 token ids */
        char ids[4096] = "{\"tokens\":[0", *end = ids + strlen(ids);
        for (int i = 1; i < 200; i++) end += sprintf(end, ",%d", 1000 + i);
        strcpy(end, "],\"count\":200,\"max_model_len\":32768}");
        answer_json(fd, ids);
    } else {
        answer_json(fd, "{}");
    }
}

/* Answers the request that has arrived, if it has. 1 if another may be in the buffer. */
static int next_request(int fd) {
    connection *c = connections[fd];
    if (c->chunks_left >= 0) return 0; /* still answering the one before */
    if (!c->head_len) {
        char *end = memmem(c->in, c->in_len, "\r\n\r\n", 4);
        if (!end) return 0;
        c->head_len = end + 4 - c->in;
        c->body = read_framing(c->in, c->head_len);
    }
    size_t length = c->body.content_length > 0 ? c->body.content_length : 0;
    if (c->body.chunked) { /* taken as it is: only its end matters */
        if (c->in_len < c->head_len + 5 || memcmp(c->in + c->in_len - 5, "0\r\n\r\n", 5)) return 0;
        length = c->in_len - c->head_len;
    }
    size_t total = c->head_len + length;
    if (c->in_len < total) return 0;
    handle(fd, c->in, c->in + c->head_len, length);
    if (!(c = connections[fd])) return 0;
    memmove(c->in, c->in + total, c->in_len - total);
    c->in_len -= total;
    c->head_len = 0;
    return 1;
}

static void readable(int fd) {
    connection *c = connections[fd];
    if (c->in_cap - c->in_len < 65536) {
        c->in_cap = c->in_cap ? c->in_cap * 2 : 131072;
        c->in = must(realloc(c->in, c->in_cap + 1));
    }
    ssize_t got = recv(fd, c->in + c->in_len, c->in_cap - c->in_len, 0);
    if (got == 0 || (got < 0 && errno != EAGAIN)) {
        drop(fd);
    } else if (got > 0) {
        c->in_len += got;
        c->in[c->in_len] = 0;
        while (connections[fd] && next_request(fd)) {}
    }
}

static void accept_all(int listener) {
    int fd, one = 1;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
        if (fd >= MAX_FD) {
            close(fd);
            continue;
        }
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        connections[fd] = must(calloc(1, sizeof(connection)));
        connections[fd]->chunks_left = -1;
        struct epoll_event in = {.events = EPOLLIN, .data.fd = fd};
        epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &in);
    }
}

/* Sends the chunks whose time has come, and sets the timer for the next. */
static void pace(void) {
    int64_t now = now_ns(), soonest = INT64_MAX;
    int kept = 0;
    for (int i = 0; i < paced_count; i++) {
        int fd = paced[i];
        if (fd < 0) continue;
        connection *c = connections[fd];
        if (c->due_ns <= now) {
            if (!step(fd) || c->chunks_left < 0) continue;
            c->due_ns += c->pace_ns;
        }
        if (c->due_ns < soonest) soonest = c->due_ns;
        paced[kept++] = fd;
    }
    paced_count = kept;
    if (!kept) return;
    struct itimerspec at = {.it_value = {soonest / SECOND_NS, soonest % SECOND_NS}};
    timerfd_settime(timer, TFD_TIMER_ABSTIME, &at, NULL);
}

static void can(canned *c, const char *format, ...) {
    va_list values;
    va_start(values, format);
    c->len = vsnprintf(c->bytes, sizeof c->bytes, format, values);
    va_end(values);
    if (c->len >= sizeof c->bytes) die("upstream: a canned answer is too long");
}

#define HEAD "HTTP/1.1 200 OK\r\ndate: Thu, 01 Jan 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
#define CHUNK_OF(choice, more)                                                                                         \
    "data: {\"id\":\"chatcmpl-0123456789abcdef0123456789abcdef\",\"object\":\"chat.completion.chunk\",\"created\":"    \
    "1700000000,\"model\":\"mock\",\"choices\":[{\"index\":0," choice "}]" more "}\n\n"
#define TOKEN "\"delta\":{\"content\":\" token\"},\"logprobs\":null,\"finish_reason\":null"
#define STOP "\"delta\":{},\"logprobs\":null,\"finish_reason\":\"stop\""
#define SPANS                                                                                                          \
    ",\"weight_versions\":[{\"version\":1,\"start\":0,\"end\":50}],"                                                   \
    "\"prompt_weight_versions\":[{\"version\":1,\"start\":0,\"end\":180}]"
#define USAGE ",\"weight_version\":1,\"hotswap_usage\":{\"prompt_tokens\":180,\"completion_tokens\":50}"
#define DONE "data: [DONE]\n\n"

static void can_chunk(canned *c, const char *event, const char *end) {
    can(c, "%zx\r\n%s\r\n%s", strlen(event), event, end);
}

static void can_answers(void) {
    char words[2048] = "", body[3072];
    for (int i = 0; i < 200; i++) strcat(words, i % 7 ? " token" : " word");
    snprintf(body, sizeof body,
             "{\"id\":\"chatcmpl-0123456789abcdef0123456789abcdef\",\"object\":\"chat.completion\",\"created\":1700000000,"
             "\"model\":\"mock\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"%s\","
             "\"tool_calls\":[]},\"logprobs\":null,\"finish_reason\":\"stop\",\"stop_reason\":null}],\"usage\":{"
             "\"prompt_tokens\":180,\"total_tokens\":380,\"completion_tokens\":200}}",
             words);
    can(&whole, HEAD "content-type: application/json\r\ncontent-length: %zu\r\n\r\n%s", strlen(body), body);
    for (int resumable = 0; resumable < 2; resumable++)
        can(&stream_head[resumable],
            HEAD "content-type: text/event-stream; charset=utf-8\r\n%stransfer-encoding: chunked\r\n\r\n",
            resumable ? "x-hotswap-resumable: 1\r\n" : "");
    can_chunk(&chunk[0], CHUNK_OF(TOKEN, ""), "");
    can_chunk(&chunk[1], CHUNK_OF(TOKEN ",\"token_ids\":[1234]", ",\"weight_version\":1"), "");
    can_chunk(&last[0], CHUNK_OF(STOP, "") DONE, "0\r\n\r\n");
    can_chunk(&last[1], CHUNK_OF(STOP SPANS ",\"token_ids\":[]", USAGE) DONE, "0\r\n\r\n");
}

static int listen_on(int port) {
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    struct sockaddr_in address = loopback(port);
    socklen_t size = sizeof address;
    if (bind(listener, (void *)&address, size) || listen(listener, 4096)) die("upstream: cannot listen");
    getsockname(listener, (void *)&address, &size);
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    return listener;
}

int main(int argc, char **argv) {
    can_answers();
    epoll = epoll_create1(0);
    timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    int listener = listen_on(argc > 1 ? atoi(argv[1]) : 0);
    int always[] = {listener, timer};
    for (int i = 0; i < 2; i++) {
        struct epoll_event in = {.events = EPOLLIN, .data.fd = always[i]};
        epoll_ctl(epoll, EPOLL_CTL_ADD, always[i], &in);
    }
    struct epoll_event events[256];
    for (;;) {
        int count = epoll_wait(epoll, events, 256, -1), waiting = paced_count;
        for (int i = 0; i < count; i++) {
            int fd = events[i].data.fd;
            if (fd == listener) {
                accept_all(listener);
            } else if (fd == timer) {
                uint64_t times;
                if (read(timer, &times, sizeof times) > 0) waiting = -1; /* due */
            } else {
                if (connections[fd] && events[i].events & EPOLLOUT) writable(fd);
                if (connections[fd] && events[i].events & ~EPOLLOUT) readable(fd);
            }
        }
        if (paced_count != waiting) pace();
    }
}
