/* Preloaded into processes under faults: journals what they write and sync, and makes disks fail.
 *
 * Environment:
 *   KVRECALL_FAULTS_ROOTS    absolute folders, separated by colons; other files are left alone
 *   KVRECALL_FAULTS_JOURNAL  file to which operations are appended; none: no journal
 *   KVRECALL_FAULTS_CONTROL  file of a struct control, which may change at any moment
 *
 * The journal is read by drive.py. A real sync is left out: only the journal decides what survives.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define FDS 65536
#define MAGIC 0x4b564a31u
#define EXPORT __attribute__((visibility("default")))

enum { SYNC_NORMAL, SYNC_SLOW, SYNC_FAILS, SYNC_HANGS };

struct control {
    volatile uint32_t sync, milliseconds, write_errno, unused;
    char filter[240]; /* part of the path; empty: every file */
};
struct record {
    uint32_t magic, op;
    uint64_t inode, offset, path, data; /* the last two: bytes that follow */
};

static struct { uint64_t inode; int append, stream; char *path; } files[FDS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *roots;
static int journal = -1;
static struct control *control;

static int raw_open(const char *path, int flags, mode_t mode) {
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

static void forget_parent(void) {
    pthread_mutex_init(&lock, NULL);
    roots = NULL;
    journal = -1;
    control = NULL;
    memset(files, 0, sizeof files);
}

__attribute__((constructor)) static void loaded(void) { pthread_atfork(NULL, NULL, forget_parent); }

/* The environment of a forked process is set after the fork: it is read until there are roots. */
static int active(void) {
    if (roots) return 1;
    const char *named = getenv("KVRECALL_FAULTS_ROOTS");
    if (!named || !*named) return 0;
    pthread_mutex_lock(&lock);
    if (!roots) {
        const char *path = getenv("KVRECALL_FAULTS_CONTROL");
        int file = path ? raw_open(path, O_RDONLY | O_CLOEXEC, 0) : -1;
        if (file >= 0) {
            void *at = mmap(NULL, sizeof *control, PROT_READ, MAP_SHARED, file, 0);
            control = at == MAP_FAILED ? NULL : at;
            close(file);
        }
        path = getenv("KVRECALL_FAULTS_JOURNAL");
        if (path && *path)
            journal = raw_open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        roots = strdup(named);
    }
    pthread_mutex_unlock(&lock);
    return 1;
}

static int under_roots(const char *path) {
    size_t length = strlen(path);
    if (length > 4 && !strcmp(path + length - 4, "-shm")) return 0; /* mapped; rebuilt by SQLite */
    for (const char *root = roots; *root;) {
        size_t size = strcspn(root, ":");
        if (!strncmp(path, root, size) && (path[size] == '/' || !path[size])) return 1;
        root += size + (root[size] == ':');
    }
    return 0;
}

static void append(int op, uint64_t inode, uint64_t offset, const char *path, const void *data,
                   size_t size) {
    if (journal < 0) return;
    struct record head = {MAGIC, (uint32_t)op, inode, offset, path ? strlen(path) : 0, size};
    struct iovec parts[] = {{&head, sizeof head}, {(void *)path, head.path}, {(void *)data, size}};
    int saved = errno;
    pthread_mutex_lock(&lock);
    syscall(SYS_writev, journal, parts, 3);
    pthread_mutex_unlock(&lock);
    errno = saved;
}

static int tracked(int fd) { return fd >= 0 && fd < FDS && files[fd].path; }

static int selected(const char *path) {
    return control && (!control->filter[0] || strstr(path, control->filter));
}

static void forget(int fd) {
    if (!tracked(fd)) return;
    char *path = files[fd].path;
    files[fd].path = NULL;
    free(path);
}

static int opened(int fd, int flags, int existed) {
    if (fd < 0 || fd >= FDS || !active()) return fd;
    int saved = errno;
    char link[64], path[PATH_MAX];
    struct stat status;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    path[length < 0 ? 0 : length] = 0;
    forget(fd);
    if (length > 0 && under_roots(path) && !fstat(fd, &status) &&
        (S_ISREG(status.st_mode) || S_ISDIR(status.st_mode))) {
        files[fd].inode = status.st_ino;
        files[fd].append = !!(flags & O_APPEND);
        files[fd].stream = 0;
        files[fd].path = strdup(path);
        if ((flags & O_CREAT) && !existed) append('C', status.st_ino, 0, path, NULL, 0);
        else if (flags & O_TRUNC) append('T', status.st_ino, 0, NULL, NULL, 0);
    }
    errno = saved;
    return fd;
}

static int open_at(int folder, const char *path, int flags, mode_t mode) {
    int existed = 1, saved = errno;
    if ((flags & O_CREAT) && active()) existed = !faccessat(folder, path, F_OK, 0);
    errno = saved;
    return opened((int)syscall(SYS_openat, folder, path, flags, mode), flags, existed);
}

#define MODE(flags, last)                                                  \
    mode_t mode = 0;                                                       \
    if ((flags) & (O_CREAT | O_TMPFILE)) {                                 \
        va_list rest;                                                      \
        va_start(rest, last);                                              \
        mode = va_arg(rest, mode_t);                                       \
        va_end(rest);                                                      \
    }

EXPORT int open(const char *path, int flags, ...) { MODE(flags, flags) return open_at(AT_FDCWD, path, flags, mode); }
EXPORT int open64(const char *path, int flags, ...) { MODE(flags, flags) return open_at(AT_FDCWD, path, flags, mode); }
EXPORT int openat(int folder, const char *path, int flags, ...) { MODE(flags, flags) return open_at(folder, path, flags, mode); }
EXPORT int openat64(int folder, const char *path, int flags, ...) { MODE(flags, flags) return open_at(folder, path, flags, mode); }
EXPORT int __open_2(const char *path, int flags) { return open_at(AT_FDCWD, path, flags, 0); }
EXPORT int __open64_2(const char *path, int flags) { return open_at(AT_FDCWD, path, flags, 0); }
EXPORT int creat(const char *path, mode_t mode) { return open_at(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

EXPORT int close(int fd) {
    forget(fd);
    return (int)syscall(SYS_close, fd);
}

/* Streams that write, such as those of Redis' base files: their writes stay within libc, and so a sync
 * journals what is in the file by then. */
EXPORT FILE *fopen(const char *path, const char *mode) {
    static FILE *(*real)(const char *, const char *);
    if (!real) real = (FILE *(*)(const char *, const char *))dlsym(RTLD_NEXT, "fopen");
    int existed = 1, saved = errno, writes = mode[0] != 'r' && active();
    if (writes) existed = !access(path, F_OK);
    errno = saved;
    FILE *stream = real(path, mode);
    if (!stream || !writes) return stream;
    int fd = opened(fileno(stream), O_CREAT | (mode[0] == 'w' ? O_TRUNC : O_APPEND), existed);
    if (tracked(fd)) files[fd].stream = 1;
    return stream;
}
EXPORT FILE *fopen64(const char *path, const char *mode) { return fopen(path, mode); }

EXPORT int fclose(FILE *stream) {
    static int (*real)(FILE *);
    if (!real) real = (int (*)(FILE *))dlsym(RTLD_NEXT, "fclose");
    forget(fileno(stream));
    return real(stream);
}

static void journal_stream(int fd) {
    char link[64], block[65536];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    int file = raw_open(link, O_RDONLY | O_CLOEXEC, 0);
    uint64_t offset = 0;
    for (ssize_t size; file >= 0 && (size = read(file, block, sizeof block)) > 0; offset += (uint64_t)size)
        append('W', files[fd].inode, offset, NULL, block, (size_t)size);
    if (file >= 0) syscall(SYS_close, file);
}

/* Journalled after the write, with the bytes that were written: a disk may be full. A write that a
 * kill keeps from the journal is found in the file, see `Drive.arm`. */
static int refused(int fd) {
    if (!selected(files[fd].path) || !control->write_errno) return 0;
    errno = (int)control->write_errno;
    return 1;
}

static uint64_t place(int fd) {
    struct stat status;
    if (files[fd].append && !fstat(fd, &status)) return (uint64_t)status.st_size;
    return (uint64_t)lseek(fd, 0, SEEK_CUR);
}

static ssize_t wrote(int fd, const struct iovec *parts, uint64_t offset, ssize_t written) {
    for (size_t left = written > 0 ? (size_t)written : 0; left; parts++) {
        size_t size = parts->iov_len < left ? parts->iov_len : left;
        append('W', files[fd].inode, offset, NULL, parts->iov_base, size);
        offset += size;
        left -= size;
    }
    return written;
}

EXPORT ssize_t writev(int fd, const struct iovec *parts, int count) {
    if (!tracked(fd)) return syscall(SYS_writev, fd, parts, count);
    if (refused(fd)) return -1;
    uint64_t offset = place(fd);
    return wrote(fd, parts, offset, syscall(SYS_writev, fd, parts, count));
}

EXPORT ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset) {
    if (tracked(fd) && refused(fd)) return -1;
    ssize_t written = syscall(SYS_pwritev, fd, parts, count, (long)offset, 0L);
    return tracked(fd) ? wrote(fd, parts, (uint64_t)offset, written) : written;
}
EXPORT ssize_t pwritev64(int fd, const struct iovec *parts, int count, off_t offset) { return pwritev(fd, parts, count, offset); }

EXPORT ssize_t write(int fd, const void *data, size_t size) {
    struct iovec part = {(void *)data, size};
    return tracked(fd) ? writev(fd, &part, 1) : syscall(SYS_write, fd, data, size);
}

EXPORT ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
    struct iovec part = {(void *)data, size};
    return tracked(fd) ? pwritev(fd, &part, 1, offset) : syscall(SYS_pwrite64, fd, data, size, offset);
}
EXPORT ssize_t pwrite64(int fd, const void *data, size_t size, off_t offset) { return pwrite(fd, data, size, offset); }

EXPORT int ftruncate(int fd, off_t length) {
    int result = (int)syscall(SYS_ftruncate, fd, length);
    if (!result && tracked(fd)) append('T', files[fd].inode, (uint64_t)length, NULL, NULL, 0);
    return result;
}
EXPORT int ftruncate64(int fd, off_t length) { return ftruncate(fd, length); }

static int synced(int fd, long number) {
    if (!tracked(fd)) return (int)syscall(number, fd);
    if (files[fd].stream) journal_stream(fd);
    /* Processes of one command share a journal. */
    off_t begun = journal < 0 ? 0 : lseek(journal, 0, SEEK_END);
    if (selected(files[fd].path)) {
        if (control->sync == SYNC_FAILS) {
            errno = EIO;
            return -1;
        }
        struct timespec pause = {0, 10 * 1000 * 1000};
        if (control->sync == SYNC_SLOW) {
            pause.tv_sec = control->milliseconds / 1000;
            pause.tv_nsec = (long)(control->milliseconds % 1000) * 1000000;
            nanosleep(&pause, NULL);
        }
        while (control->sync == SYNC_HANGS) nanosleep(&pause, NULL);
    }
    append('S', files[fd].inode, (uint64_t)begun, files[fd].path, NULL, 0);
    return journal < 0 ? (int)syscall(number, fd) : 0;
}
EXPORT int fsync(int fd) { return synced(fd, SYS_fsync); }
EXPORT int fdatasync(int fd) { return synced(fd, SYS_fdatasync); }

/* The absolute form of a path whose last part may not exist; 0 if it is not under the roots. */
static int absolute(int folder, const char *path, char *found) {
    char copy[PATH_MAX], parent[PATH_MAX];
    if (!active() || (folder != AT_FDCWD && path[0] != '/')) return 0;
    if (strlen(path) >= sizeof copy) return 0;
    strcpy(copy, path);
    char *slash = strrchr(copy, '/');
    const char *name = slash ? slash + 1 : copy;
    if (slash) *slash = 0;
    if (!realpath(slash ? (*copy ? copy : "/") : ".", parent)) return 0;
    if (snprintf(found, PATH_MAX, "%s/%s", parent, name) >= PATH_MAX) return 0;
    return under_roots(found);
}

EXPORT int renameat(int from_folder, const char *from, int to_folder, const char *to) {
    char before[PATH_MAX], after[PATH_MAX];
    int known = absolute(from_folder, from, before) && absolute(to_folder, to, after);
    int result = (int)syscall(SYS_renameat, from_folder, from, to_folder, to);
    if (!result && known) append('R', 0, 0, before, after, strlen(after));
    return result;
}
EXPORT int rename(const char *from, const char *to) { return renameat(AT_FDCWD, from, AT_FDCWD, to); }

EXPORT int unlinkat(int folder, const char *path, int flags) {
    char found[PATH_MAX];
    int known = !(flags & AT_REMOVEDIR) && absolute(folder, path, found);
    int result = (int)syscall(SYS_unlinkat, folder, path, flags);
    if (!result && known) append('U', 0, 0, found, NULL, 0);
    return result;
}
EXPORT int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
