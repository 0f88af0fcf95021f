// A wall clock that is CLOCK_SHIFT seconds off, and CLOCK_JUMP more at every second look.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static long long value(const char * name) {
    const char * text = getenv(name);
    return text ? atoll(text) : 0;
}

int clock_gettime(clockid_t clock, struct timespec * now) {
    static int (*next)(clockid_t, struct timespec *);
    static atomic_long looks;
    if (!next) next = (int (*)(clockid_t, struct timespec *)) dlsym(RTLD_NEXT, "clock_gettime");
    int failed = next(clock, now);
    if (!failed && clock == CLOCK_REALTIME) now->tv_sec += value("CLOCK_SHIFT") + (looks++ % 2 ? value("CLOCK_JUMP") : 0);
    return failed;
}

time_t time(time_t * out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}

int gettimeofday(struct timeval * now, void * zone) {
    (void) zone;
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}
