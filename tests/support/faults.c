/* A library to preload: the n-th change of a file under a folder fails, or kills the process just before it.

   FAULT_UNDER   what the path of the file contains
   FAULT_AT      n, counted from 1
   FAULT_RANK    only in the process with this RANK
   FAULT_ERRNO   the error; without it the process is killed
   FAULT_COUNT   a file that gets one byte for every change seen

   Read at every call, so that a process can set them for itself. Changes are: making a file or a folder, writing,
   syncing, renaming, deleting. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static atomic_long seen;

/* Whether the change of this path is to fail; errno is set. */
static int faulty(const char *path) {
    const char *under = getenv("FAULT_UNDER"), *rank = getenv("FAULT_RANK"), *own = getenv("RANK");
    if (!under || !path || !strstr(path, under) || (rank && strcmp(rank, own ? own : "0"))) return 0;
    long number = atomic_fetch_add(&seen, 1) + 1;
    const char *count = getenv("FAULT_COUNT"), *at = getenv("FAULT_AT"), *error = getenv("FAULT_ERRNO");
    if (count) {
        int file = syscall(SYS_openat, AT_FDCWD, count, O_WRONLY | O_CREAT | O_APPEND, 0600);
        syscall(SYS_write, file, ".", 1);
        syscall(SYS_close, file);
    }
    if (!at || number != atol(at)) return 0;
    if (!error) kill(getpid(), SIGKILL);
    errno = error ? atoi(error) : 0;
    return 1;
}

static int faulty_descriptor(int descriptor) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return faulty(path);
}

static int faulty_at(int folder, const char *path) {
    return path[0] == '/' || folder == AT_FDCWD ? faulty(path) : faulty_descriptor(folder);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define OPENED(name)                                                                   \
    int name(const char *path, int flags, ...) {                                       \
        va_list more; va_start(more, flags); mode_t mode = va_arg(more, mode_t);       \
        va_end(more);                                                                  \
        return flags & O_CREAT && faulty(path) ? -1 : REAL(name)(path, flags, mode);   \
    }
#define OPENED_AT(name)                                                                              \
    int name(int folder, const char *path, int flags, ...) {                                         \
        va_list more; va_start(more, flags); mode_t mode = va_arg(more, mode_t);                     \
        va_end(more);                                                                                \
        return flags & O_CREAT && faulty_at(folder, path) ? -1 : REAL(name)(folder, path, flags, mode); \
    }

OPENED(open)
OPENED(open64)
OPENED_AT(openat)
OPENED_AT(openat64)
ssize_t write(int file, const void *data, size_t size) {
    return faulty_descriptor(file) ? -1 : REAL(write)(file, data, size);
}
int fsync(int file) { return faulty_descriptor(file) ? -1 : REAL(fsync)(file); }
int rename(const char *old, const char *new) { return faulty(new) ? -1 : REAL(rename)(old, new); }
int mkdir(const char *path, mode_t mode) { return faulty(path) ? -1 : REAL(mkdir)(path, mode); }
int rmdir(const char *path) { return faulty(path) ? -1 : REAL(rmdir)(path); }
int unlink(const char *path) { return faulty(path) ? -1 : REAL(unlink)(path); }
int unlinkat(int folder, const char *path, int flags) {
    return faulty_at(folder, path) ? -1 : REAL(unlinkat)(folder, path, flags);
}
