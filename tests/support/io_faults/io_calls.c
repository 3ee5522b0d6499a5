/* Reports the file operations of a process to a test, before and after each of them, which can make them fail.

What it is: a library for LD_PRELOAD with the C library's functions that change files. For paths below one folder each
function asks a hook, a Python function, what to do (0: go on; -1: write only half; else: fail with this errno), and
reports what it has done. All other paths go straight to the kernel. `io_calls.py` compiles, loads and uses it.
Why it is here: Python and torch write through these functions, so tests need not list the calls of a save.
What it costs: a readlink and two calls of Python for each operation below the folder. 64-bit Linux only.
Not seen: the C library's own streams (fwrite, numpy's tofile), memory maps, sendfile, copy_file_range, links. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define PATH (2 * PATH_MAX)
typedef int (*Hook)(int done, const char *call, const char *path, const char *other, long number, const void *data,
                    long size);
static Hook hook;
static char root[PATH_MAX];
static __thread int inside; /* the hook's own operations are not watched */

void watch(const char *folder, Hook function) {
    snprintf(root, sizeof root, "%s", folder);
    hook = function;
}

static int ask(int done, const char *call, const char *path, const char *other, long number, const void *data,
               long size) {
    inside = 1;
    int answer = hook(done, call, path, other, number, data, size);
    inside = 0;
    return answer;
}

/* Writes the absolute path into `out`; whether it lies below the watched folder. An empty `path` is `at` itself. */
static int below(int at, const char *path, char *out) {
    char link[64] = "/proc/self/cwd", base[PATH_MAX] = "";
    if (!hook || inside) return 0;
    if (path[0] != '/') {
        if (at != AT_FDCWD) snprintf(link, sizeof link, "/proc/self/fd/%d", at);
        if (readlink(link, base, sizeof base - 1) < 0) return 0;
    }
    snprintf(out, PATH, path[0] && path[0] != '/' ? "%s/%s" : "%s%s", base, path);
    size_t n = strlen(root);
    return strncmp(out, root, n) == 0 && (out[n] == '/' || !out[n]);
}

/* Asks the hook, calls the kernel, reports. `CALL` is the system call. */
#define PERFORM(watched, call, path, other, number, CALL)                              \
    do {                                                                               \
        int refused = watched ? ask(0, call, path, other, number, NULL, 0) : 0;        \
        if (refused > 0) return errno = refused, -1;                                   \
        long result = CALL;                                                            \
        int saved = errno;                                                             \
        if (watched && result >= 0) ask(1, call, path, other, number, NULL, 0);        \
        errno = saved;                                                                 \
        return result;                                                                 \
    } while (0)

static int open_at(int at, const char *path, int flags, mode_t mode) {
    char full[PATH];
    int watched = (flags & (O_CREAT | O_WRONLY | O_RDWR)) && below(at, path, full);
    PERFORM(watched, "open", full, "", flags, syscall(SYS_openat, at, path, flags, mode));
}

#define MODE(last) va_list list; va_start(list, last); mode_t mode = va_arg(list, mode_t); va_end(list)
int open(const char *path, int flags, ...) { MODE(flags); return open_at(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags); return open_at(AT_FDCWD, path, flags, mode); }
int openat(int at, const char *path, int flags, ...) { MODE(flags); return open_at(at, path, flags, mode); }
int openat64(int at, const char *path, int flags, ...) { MODE(flags); return open_at(at, path, flags, mode); }

/* `offset` < 0: at the file's position */
static ssize_t write_at(int file, const void *data, size_t size, off_t offset) {
    char full[PATH];
    int watched = below(file, "", full);
    int refused = watched ? ask(0, "write", full, "", offset, data, size) : 0;
    if (refused > 0) return errno = refused, -1;
    if (refused < 0 && size > 1) size /= 2;
    ssize_t result = offset < 0 ? syscall(SYS_write, file, data, size) : syscall(SYS_pwrite64, file, data, size, offset);
    int saved = errno;
    if (watched && result > 0)
        ask(1, "write", full, "", offset < 0 ? lseek(file, 0, SEEK_CUR) - result : offset, data, result);
    errno = saved;
    return result;
}

ssize_t write(int file, const void *data, size_t size) { return write_at(file, data, size, -1); }
ssize_t pwrite(int file, const void *data, size_t size, off_t at) { return write_at(file, data, size, at); }
ssize_t pwrite64(int file, const void *data, size_t size, off64_t at) { return write_at(file, data, size, at); }
ssize_t writev(int file, const struct iovec *parts, int count) { /* of a watched file only the first part, as POSIX allows */
    char full[PATH];
    while (count > 1 && !parts->iov_len) parts++, count--;
    if (below(file, "", full)) return write_at(file, parts->iov_base, parts->iov_len, -1);
    return syscall(SYS_writev, file, parts, count);
}

static int sync_file(int file, int call, const char *name) {
    char full[PATH];
    int watched = below(file, "", full);
    PERFORM(watched, name, full, "", 0, syscall(call, file));
}
int fsync(int file) { return sync_file(file, SYS_fsync, "fsync"); }
int fdatasync(int file) { return sync_file(file, SYS_fdatasync, "fsync"); }

int renameat2(int at, const char *from, int to_at, const char *to, unsigned flags) {
    char full[PATH], other[PATH];
    int watched = below(at, from, full) & below(to_at, to, other);
    PERFORM(watched, "rename", full, other, flags, syscall(SYS_renameat2, at, from, to_at, to, flags));
}
int renameat(int at, const char *from, int to_at, const char *to) { return renameat2(at, from, to_at, to, 0); }
int rename(const char *from, const char *to) { return renameat2(AT_FDCWD, from, AT_FDCWD, to, 0); }

int linkat(int at, const char *from, int to_at, const char *to, int flags) {
    char full[PATH], other[PATH];
    int watched = below(at, from, full) & below(to_at, to, other);
    PERFORM(watched, "link", full, other, flags, syscall(SYS_linkat, at, from, to_at, to, flags));
}
int link(const char *from, const char *to) { return linkat(AT_FDCWD, from, AT_FDCWD, to, 0); }

int mkdirat(int at, const char *path, mode_t mode) {
    char full[PATH];
    int watched = below(at, path, full);
    PERFORM(watched, "mkdir", full, "", mode, syscall(SYS_mkdirat, at, path, mode));
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

int unlinkat(int at, const char *path, int flags) {
    char full[PATH];
    int watched = below(at, path, full);
    PERFORM(watched, "unlink", full, "", flags, syscall(SYS_unlinkat, at, path, flags));
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

static int resize(const char *path, int file, off_t size) { /* by path, or if that is NULL by descriptor */
    char full[PATH];
    int watched = path ? below(AT_FDCWD, path, full) : below(file, "", full);
    PERFORM(watched, "truncate", full, "", size,
            path ? syscall(SYS_truncate, path, size) : syscall(SYS_ftruncate, file, size));
}
int truncate(const char *path, off_t size) { return resize(path, -1, size); }
int truncate64(const char *path, off64_t size) { return resize(path, -1, size); }
int ftruncate(int file, off_t size) { return resize(NULL, file, size); }
int ftruncate64(int file, off64_t size) { return resize(NULL, file, size); }
