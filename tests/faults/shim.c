/* Library for LD_PRELOAD: shifts the clock of a process, and slows its writes to a folder down.

   The file FAULTS_SHIM has two 64-bit integers: seconds that the clock is ahead, and microseconds by which each write,
   flush and change of a name in the folder FAULTS_SLOW is delayed. All processes map this file, so that a change of the
   file takes effect at once. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t none[2], *shim = none;
static const char *folder;

__attribute__((constructor)) static void start(void) {
    const char *name = getenv("FAULTS_SHIM");
    int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    void *map = file < 0 ? MAP_FAILED : mmap(NULL, 16, PROT_READ, MAP_SHARED, file, 0);
    if (map != MAP_FAILED)
        shim = map;
    if (file >= 0)
        close(file);
    folder = getenv("FAULTS_SLOW");
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* ---- the clock ---- */

int clock_gettime(clockid_t clock, struct timespec *time) {
    static __typeof__(&clock_gettime) real;
    if (!real)
        real = REAL(clock_gettime);
    int status = real(clock, time);
    if (!status && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        time->tv_sec += shim[0];
    return status;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec time;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &time);
    now->tv_sec = time.tv_sec;
    now->tv_usec = time.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result)
        *result = now.tv_sec;
    return now.tv_sec;
}

/* ---- the disk ---- */

static void delay(const char *path) {
    if (shim[1] && folder && path && !strncmp(path, folder, strlen(folder)))
        usleep(shim[1]);
}

static void delay_name(const char *path) {
    if (shim[1] && path && *path != '/') {
        char full[4096], here[2048];
        if (getcwd(here, sizeof here) && snprintf(full, sizeof full, "%s/%s", here, path) < (int)sizeof full)
            delay(full);
    } else
        delay(path);
}

static void delay_file(int file) {
    if (shim[1]) {
        char link[64], path[4096];
        snprintf(link, sizeof link, "/proc/self/fd/%d", file);
        ssize_t length = readlink(link, path, sizeof path - 1);
        path[length > 0 ? length : 0] = 0;
        delay(path);
    }
}

#define ON_FILE(type, name, file, parameters, arguments)                                                               \
    type name parameters {                                                                                             \
        delay_file(file);                                                                                              \
        return REAL(name) arguments;                                                                                   \
    }
#define ON_NAME(type, name, path, parameters, arguments)                                                               \
    type name parameters {                                                                                             \
        delay_name(path);                                                                                              \
        return REAL(name) arguments;                                                                                   \
    }

ON_FILE(ssize_t, write, file, (int file, const void *from, size_t size), (file, from, size))
ON_FILE(ssize_t, writev, file, (int file, const struct iovec *from, int count), (file, from, count))
ON_FILE(ssize_t, pwrite, file, (int file, const void *from, size_t size, off_t at), (file, from, size, at))
ON_FILE(ssize_t, pwrite64, file, (int file, const void *from, size_t size, off64_t at), (file, from, size, at))
ON_FILE(int, fsync, file, (int file), (file))
ON_FILE(int, fdatasync, file, (int file), (file))
ON_NAME(int, rename, to, (const char *from, const char *to), (from, to))
ON_NAME(int, unlink, path, (const char *path), (path))
ON_NAME(int, mkdir, path, (const char *path, mode_t mode), (path, mode))
