/* What if the operating system refuses a call: any one, or all from one on?
 *
 * Loaded before libc (LD_PRELOAD), it counts the calls that take a descriptor, memory of a file, space
 * or the disk, and lets those fail that it was told to; or else those by which our native modules
 * ask Python for memory. It also finds out who uses a descriptor that
 * he has closed: its number is taken by a canary at once, so that nothing else ever gets it.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { NUMBERS = 65536, UNKNOWN = 0, OPEN = 1, CLOSED = 2 };

static atomic_long calls, fails_at, refused;
static atomic_bool counts, fails_on, of_memory;
static atomic_int state[NUMBERS], stale_uses;
static char first_stale[128];
static int canary = -1;

/* The function of libc that this library stands before. */
#define REAL(name) ((__typeof__(&name))real(#name))

static void *real(const char *name) {
    void *found = dlsym(RTLD_NEXT, name);
    if (found == NULL)
        abort();
    return found;
}

/* --- for Python ------------------------------------------------------------------------------- */

/* Count from now on, and let call `at` fail; 0: none. `on`: and all behind it. `memory`: count what
 * asks for memory, and nothing else. */
void faults_begin(long at, int on, int memory) {
    calls = refused = 0;
    fails_at = at;
    fails_on = on != 0;
    of_memory = memory != 0;
    counts = true;
}

long faults_end(void) {
    counts = false;
    return calls;
}

long faults_refused(void) { return refused; }

/* Put this file in the place of every descriptor that is closed from now on. */
void faults_watch(int fd) { canary = fd; }

int faults_stale(char *text, size_t size) {
    snprintf(text, size, "%s", first_stale);
    return stale_uses;
}

int faults_open(void) {
    int found = 0;
    for (int fd = 0; fd < NUMBERS; fd++)
        found += state[fd] == OPEN;
    return found;
}

/* ---------------------------------------------------------------------------------------------- */

static bool is_due(void) {
    long number = ++calls, at = fails_at;
    if (at == 0 || (fails_on ? number < at : number != at))
        return false;
    refused++;
    return true;
}

static bool fails(int error) {
    if (!counts || of_memory || !is_due())
        return false;
    errno = error;
    return true;
}

static void uses(const char *call, int fd) {
    if (fd < 0 || fd >= NUMBERS || state[fd] != CLOSED)
        return;
    if (stale_uses++ == 0)
        snprintf(first_stale, sizeof first_stale, "%s of descriptor %d, which was closed", call, fd);
}

static int opened(int fd) {
    if (fd >= 0 && fd < NUMBERS && canary >= 0)
        state[fd] = OPEN;
    return fd;
}

int close(int fd) {
    uses("close", fd);
    if (fd < 0 || fd >= NUMBERS || state[fd] == UNKNOWN)
        return REAL(close)(fd);
    if (state[fd] == CLOSED) {
        errno = EBADF;
        return -1;
    }
    state[fd] = CLOSED;
    return REAL(dup3)(canary, fd, O_CLOEXEC) < 0 ? -1 : 0;
}

#define MODE(flags, mode)                                                                              \
    if ((flags) & (O_CREAT | __O_TMPFILE)) {                                                           \
        va_list list;                                                                                  \
        va_start(list, flags);                                                                         \
        mode = va_arg(list, mode_t);                                                                   \
        va_end(list);                                                                                  \
    }

#define OPENS(name)                                                                                    \
    int name(const char *path, int flags, ...) {                                                       \
        mode_t mode = 0;                                                                               \
        MODE(flags, mode)                                                                              \
        return fails(EMFILE) ? -1 : opened(REAL(name)(path, flags, mode));                             \
    }
#define OPENS_AT(name)                                                                                 \
    int name(int folder, const char *path, int flags, ...) {                                           \
        mode_t mode = 0;                                                                               \
        MODE(flags, mode)                                                                              \
        uses(#name, folder);                                                                           \
        return fails(EMFILE) ? -1 : opened(REAL(name)(folder, path, flags, mode));                     \
    }
OPENS(open)
OPENS(open64)
OPENS_AT(openat)
OPENS_AT(openat64)

DIR *opendir(const char *path) { return fails(EMFILE) ? NULL : REAL(opendir)(path); }
int memfd_create(const char *name, unsigned int flags) {
    return fails(EMFILE) ? -1 : opened(REAL(memfd_create)(name, flags));
}
int dup(int fd) {
    uses("dup", fd);
    return fails(EMFILE) ? -1 : opened(REAL(dup)(fd));
}

#define CONTROLS(name)                                                                                 \
    int name(int fd, int command, ...) {                                                               \
        va_list list;                                                                                  \
        va_start(list, command);                                                                       \
        void *argument = va_arg(list, void *);                                                         \
        va_end(list);                                                                                  \
        uses("fcntl", fd);                                                                             \
        bool copies = command == F_DUPFD || command == F_DUPFD_CLOEXEC;                                \
        bool locks = (command == F_OFD_SETLK || command == F_SETLK || command == F_SETLKW) &&          \
                     ((struct flock *)argument)->l_type != F_UNLCK;                                    \
        if ((copies && fails(EMFILE)) || (locks && fails(ENOLCK)))                                     \
            return -1;                                                                                 \
        int result = REAL(name)(fd, command, argument);                                                \
        return copies ? opened(result) : result;                                                       \
    }
CONTROLS(fcntl)
CONTROLS(fcntl64)

#define MAPS(name, offset_type)                                                                        \
    void *name(void *at, size_t size, int access, int flags, int fd, offset_type offset) {             \
        uses("mmap", fd);                                                                              \
        return fd >= 0 && fails(ENOMEM) ? MAP_FAILED : REAL(name)(at, size, access, flags, fd, offset); \
    }
MAPS(mmap, off_t)
MAPS(mmap64, off64_t)

/* Whatever is done to a descriptor. What a program says on its standard output is left alone. */
#define ON(result, name, error, fd, parameters, arguments)                                             \
    result name parameters {                                                                           \
        uses(#name, fd);                                                                               \
        return fd > 2 && fails(error) ? -1 : REAL(name) arguments;                                     \
    }
ON(ssize_t, read, EIO, fd, (int fd, void *to, size_t n), (fd, to, n))
ON(ssize_t, pread, EIO, fd, (int fd, void *to, size_t n, off_t at), (fd, to, n, at))
ON(ssize_t, pread64, EIO, fd, (int fd, void *to, size_t n, off64_t at), (fd, to, n, at))
ON(ssize_t, write, ENOSPC, fd, (int fd, const void *from, size_t n), (fd, from, n))
ON(ssize_t, pwrite, ENOSPC, fd, (int fd, const void *from, size_t n, off_t at), (fd, from, n, at))
ON(ssize_t, pwrite64, ENOSPC, fd, (int fd, const void *from, size_t n, off64_t at), (fd, from, n, at))

/* No power fails here: the disk need not be waited for. */
#define SYNCS(name)                                                                                    \
    int name(int fd) {                                                                                 \
        uses(#name, fd);                                                                               \
        return fails(EIO) ? -1 : 0;                                                                    \
    }
SYNCS(fsync)
SYNCS(fdatasync)

ON(int, ftruncate, ENOSPC, fd, (int fd, off_t size), (fd, size))
ON(int, ftruncate64, ENOSPC, fd, (int fd, off64_t size), (fd, size))
ON(int, fallocate, ENOSPC, fd, (int fd, int how, off_t at, off_t n), (fd, how, at, n))
ON(int, fallocate64, ENOSPC, fd, (int fd, int how, off64_t at, off64_t n), (fd, how, at, n))

#define ALLOCATES(name, offset_type)                                                                   \
    int name(int fd, offset_type at, offset_type n) {                                                  \
        uses(#name, fd);                                                                               \
        return fails(ENOSPC) ? ENOSPC : REAL(name)(fd, at, n);                                         \
    }
ALLOCATES(posix_fallocate, off_t)
ALLOCATES(posix_fallocate64, off64_t)

#define NAMES(name, error, parameters, arguments)                                                      \
    int name parameters { return fails(error) ? -1 : REAL(name) arguments; }
NAMES(rename, ENOSPC, (const char *from, const char *to), (from, to))
NAMES(renameat, ENOSPC, (int a, const char *from, int b, const char *to), (a, from, b, to))
NAMES(link, ENOSPC, (const char *from, const char *to), (from, to))
NAMES(linkat, ENOSPC, (int a, const char *from, int b, const char *to, int flags), (a, from, b, to, flags))
NAMES(unlink, EIO, (const char *path), (path))
NAMES(unlinkat, EIO, (int folder, const char *path, int flags), (folder, path, flags))
NAMES(mkdir, ENOSPC, (const char *path, mode_t mode), (path, mode))
NAMES(mkdirat, ENOSPC, (int folder, const char *path, mode_t mode), (folder, path, mode))

int pthread_create(pthread_t *thread, const pthread_attr_t *how, void *(*run)(void *), void *argument) {
    return fails(EAGAIN) ? EAGAIN : REAL(pthread_create)(thread, how, run, argument);
}

/* --- memory ------------------------------------------------------------------------------------
 * Modules call these of the interpreter by name. Its own calls, and those of libraries, go on. */

void *PyErr_NoMemory(void);

static bool has_no_memory(void *caller) {
    Dl_info module;
    return counts && of_memory && dladdr(caller, &module) && strstr(module.dli_fname, "/penstock/") &&
           is_due();
}

#define MAKES(result, name, failure, parameters, arguments)                                            \
    result name parameters {                                                                           \
        if (!has_no_memory(__builtin_return_address(0)))                                               \
            return REAL(name) arguments;                                                               \
        PyErr_NoMemory();                                                                              \
        return failure;                                                                                \
    }
MAKES(void *, PyBytes_FromStringAndSize, NULL, (const char *from, ssize_t size), (from, size))
MAKES(void *, PyList_New, NULL, (ssize_t size), (size))
MAKES(int, PyList_Append, -1, (void *list, void *item), (list, item))
MAKES(void *, PyLong_FromLongLong, NULL, (long long value), (value))
MAKES(void *, PyLong_FromSsize_t, NULL, (ssize_t value), (value))
MAKES(void *, PyLong_FromUnsignedLong, NULL, (unsigned long value), (value))
MAKES(void *, PyLong_FromUnsignedLongLong, NULL, (unsigned long long value), (value))
MAKES(void *, PyType_GenericNew, NULL, (void *type, void *given, void *named), (type, given, named))

/* Python has the small numbers already. */
void *PyLong_FromLong(long value) {
    if ((value >= -5 && value <= 256) || !has_no_memory(__builtin_return_address(0)))
        return REAL(PyLong_FromLong)(value);
    return PyErr_NoMemory();
}

#define TAKES(name, parameters, arguments)                                                             \
    void *name parameters {                                                                            \
        return has_no_memory(__builtin_return_address(0)) ? NULL : REAL(name) arguments;               \
    }
TAKES(PyMem_Malloc, (size_t size), (size))
TAKES(PyMem_Calloc, (size_t count, size_t size), (count, size))
TAKES(PyMem_RawCalloc, (size_t count, size_t size), (count, size))
