/* What the stand-in is told, and what it counts. */
#include "standin.h"

struct settings settings = {.devices = 1, .mib = 80 << 10, .pin = 1};
struct counters counters;
pthread_mutex_t standin_lock = PTHREAD_MUTEX_INITIALIZER;
__thread int current_device;
__thread cudaError_t last_error;

static const struct { const char *name; long *at; } SETTINGS[] = {
    {"late", &settings.late}, {"poison", &settings.poison}, {"devices", &settings.devices},
    {"mib", &settings.mib}, {"pin", &settings.pin}, {"trace", &settings.trace},
};

/* 0, or -1 for a name that is not known. */
API int standin_set(const char *name, long value) {
    for (size_t i = 0; i < sizeof SETTINGS / sizeof *SETTINGS; i++)
        if (!strcmp(name, SETTINGS[i].name)) {
            LOCKED(*SETTINGS[i].at = value);
            return 0;
        }
    return -1;
}

/* How a process is told that nobody can call: STANDIN=late=1,mib=1024. */
__attribute__((constructor)) static void begin(void) {
    const char *said = getenv("STANDIN");
    char *text = strdup(said ? said : ""), *rest = text;
    for (char *pair; (pair = strsep(&rest, ","));) {
        char *value = strchr(pair, '=');
        if (!*pair) continue;
        if (value) *value++ = 0;
        if (!value || standin_set(pair, atol(value))) {
            fprintf(stderr, "standin: STANDIN=%s is not understood at %s: say late=1,mib=1024\n", said, pair);
            exit(2);
        }
    }
    free(text);
}

static long queued(void) {
    long found = 0;
    for (struct CUstream_st *s = streams; s; s = s->next)
        for (struct op *op = s->first; op; op = op->next) found += !op->rubbish;
    return found;
}

/* -1 for a name that is not known. */
API long standin_get(const char *name) {
    long found = -1;
    pthread_mutex_lock(&standin_lock);
    if (!strcmp(name, "captured")) found = counters.captured;
    else if (!strcmp(name, "replayed")) found = counters.replayed;
    else if (!strcmp(name, "kernels")) found = counters.kernels;
    else if (!strcmp(name, "largest_to_host")) found = counters.largest_to_host;
    else if (!strcmp(name, "queued")) found = queued();
    else if (!strncmp(name, "used", 4)) found = (long)taken(atoi(name + 4)); /* used0, used1, ... */
    for (size_t i = 0; i < sizeof SETTINGS / sizeof *SETTINGS; i++)
        if (!strcmp(name, SETTINGS[i].name)) found = *SETTINGS[i].at;
    pthread_mutex_unlock(&standin_lock);
    return found;
}

/* A copy from a device to the host has so many bytes; 0: count anew. */
void count_to_host(size_t nbytes) {
    if (!nbytes || (long)nbytes > counters.largest_to_host) counters.largest_to_host = (long)nbytes;
}
API void standin_to_host(size_t nbytes) { LOCKED(count_to_host(nbytes)); }
