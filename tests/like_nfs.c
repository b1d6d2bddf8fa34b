/* Makes the files below $LIKE_NFS behave as on NFS, for a process that preloads this library.

   - flock and fcntl locks are refused (ENOLCK).
   - A file that this process holds open and deletes or replaces becomes .nfsXXXX until it is closed.
   - A file that another process has deleted is stale (ESTALE) for those who hold it open.
   - A name that another process has made is seen late: $LIKE_NFS_LATE_MS milliseconds, in look-ups and in listings.
   - $LIKE_NFS_CLOSE="ERRNO NUMBER": close() of the file written as that number fails, as the server has no room.

   The variables also count for a process that sets them itself, as one does that a server has forked. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) ({ static __typeof__(&name) real; if (!real) real = dlsym(RTLD_NEXT, #name); real; })
#define FAIL(number) ({ errno = (number); -1; })

static char root[PATH_MAX];
static long late_ms;
static int close_errno, close_number, num_closed;
static struct { dev_t dev; ino_t ino; } own[4096]; /* the last files that this process has made */
static unsigned num_own;
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;

__attribute__((constructor)) static void begin(void) {
    const char *value = getenv("LIKE_NFS");
    if (value && !realpath(value, root)) root[0] = 0;
    if ((value = getenv("LIKE_NFS_LATE_MS"))) late_ms = atol(value);
    if ((value = getenv("LIKE_NFS_CLOSE"))) sscanf(value, "%d %d", &close_errno, &close_number);
}

int setenv(const char *name, const char *value, int is_replaced) {
    int code = REAL(setenv)(name, value, is_replaced);
    if (!strncmp(name, "LIKE_NFS", 8)) begin();
    return code;
}

static int is_below(const char *path) {
    size_t length = strlen(root);
    return length && !strncmp(path, root, length) && (path[length] == '/' || !path[length]);
}

/* The path that a file descriptor was opened as; 0 if it is neither the root nor below it. */
static int path_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return is_below(path);
}

/* The absolute path of a name; 0 if it is not below the root. */
static int resolve(int dir, const char *name, char *path) {
    if (!root[0] || !name) return 0;
    if (name[0] == '/') return snprintf(path, PATH_MAX, "%s", name) < PATH_MAX && is_below(path);
    char folder[PATH_MAX];
    if (dir == AT_FDCWD) { if (!getcwd(folder, sizeof folder)) return 0; }
    else if (!path_of(dir, folder)) return 0;
    return snprintf(path, PATH_MAX, "%s/%s", folder, name) < PATH_MAX && is_below(path);
}

static void note_own(const char *path) {
    struct stat found;
    if (REAL(lstat)(path, &found)) return;
    pthread_mutex_lock(&turn);
    own[num_own++ % 4096].dev = found.st_dev, own[(num_own - 1) % 4096].ino = found.st_ino;
    pthread_mutex_unlock(&turn);
}

/* Whether this process does not see a file yet. Folders are seen at once. */
static int is_late(const char *path) {
    struct stat found;
    struct timespec now;
    if (!late_ms || REAL(lstat)(path, &found) || S_ISDIR(found.st_mode)) return 0;
    for (unsigned i = 0; i < 4096 && i < num_own; i++)
        if (own[i].ino == found.st_ino && own[i].dev == found.st_dev) return 0;
    clock_gettime(CLOCK_REALTIME, &now);
    long age_ms = (now.tv_sec - found.st_ctim.tv_sec) * 1000 + (now.tv_nsec - found.st_ctim.tv_nsec) / 1000000;
    return age_ms >= 0 && age_ms < late_ms;
}

/* Whether a descriptor is of a file that another process has deleted. */
static int is_stale(int fd) {
    struct stat found;
    char path[PATH_MAX] = "";
    if (!root[0] || REAL(fstat)(fd, &found) || !S_ISREG(found.st_mode) || found.st_nlink) return 0;
    return path_of(fd, path);
}

/* Keep a file that this process holds open under another name. 1 if it was renamed. */
static int keep_open(const char *path) {
    struct stat wanted, found;
    if (REAL(lstat)(path, &wanted) || !S_ISREG(wanted.st_mode) || wanted.st_nlink > 1) return 0;
    DIR *listing = REAL(opendir)("/proc/self/fd");
    if (!listing) return 0;
    int is_open = 0;
    for (struct dirent *entry; (entry = REAL(readdir)(listing));)
        if (entry->d_name[0] != '.' && !REAL(fstat)(atoi(entry->d_name), &found))
            is_open |= found.st_ino == wanted.st_ino && found.st_dev == wanted.st_dev;
    REAL(closedir)(listing);
    if (!is_open) return 0;
    char hidden[PATH_MAX];
    int folder = (int)(strrchr(path, '/') - path);
    snprintf(hidden, sizeof hidden, "%.*s/.nfs%08lx%08x", folder, path, (unsigned long)wanted.st_ino, getpid());
    return !REAL(rename)(path, hidden);
}

static int opened(int fd, const char *path, int is_new) {
    if (fd >= 0 && is_new) note_own(path);
    return fd;
}

#define OPEN(name, dir, ...)                                                                                   \
    mode_t mode = 0;                                                                                           \
    char path[PATH_MAX];                                                                                       \
    if (flags & (O_CREAT | __O_TMPFILE)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); } \
    if (!resolve(dir, file, path)) return REAL(name)(__VA_ARGS__);                                             \
    int is_new = (flags & O_CREAT) && access(path, F_OK);                                                      \
    if (!(flags & O_CREAT) && is_late(path)) return FAIL(ENOENT);                                              \
    return opened(REAL(name)(__VA_ARGS__), path, is_new);

int open(const char *file, int flags, ...) { OPEN(open, AT_FDCWD, file, flags, mode) }
int open64(const char *file, int flags, ...) { OPEN(open64, AT_FDCWD, file, flags, mode) }
int openat(int dir, const char *file, int flags, ...) { OPEN(openat, dir, dir, file, flags, mode) }
int openat64(int dir, const char *file, int flags, ...) { OPEN(openat64, dir, dir, file, flags, mode) }

#define LOOK(name, type)                                                                              \
    int name(const char *file, struct type *found) {                                                  \
        char path[PATH_MAX];                                                                          \
        return resolve(AT_FDCWD, file, path) && is_late(path) ? FAIL(ENOENT) : REAL(name)(file, found); \
    }
LOOK(stat, stat)
LOOK(stat64, stat64)
LOOK(lstat64, stat64)
int fstatat(int dir, const char *file, struct stat *found, int flags) {
    char path[PATH_MAX] = "";
    return resolve(dir, file, path) && is_late(path) ? FAIL(ENOENT) : REAL(fstatat)(dir, file, found, flags);
}
int fstatat64(int dir, const char *file, struct stat64 *found, int flags) {
    char path[PATH_MAX] = "";
    return resolve(dir, file, path) && is_late(path) ? FAIL(ENOENT) : REAL(fstatat64)(dir, file, found, flags);
}

#define LIST(name, type)                                                                                           \
    struct type *name(DIR *listing) {                                                                              \
        char path[PATH_MAX];                                                                                       \
        struct type *entry;                                                                                        \
        while ((entry = REAL(name)(listing)) && resolve(dirfd(listing), entry->d_name, path) && is_late(path)) {}  \
        return entry;                                                                                              \
    }
LIST(readdir, dirent)
LIST(readdir64, dirent64)

int unlink(const char *file) {
    char path[PATH_MAX] = "";
    return resolve(AT_FDCWD, file, path) && keep_open(path) ? 0 : REAL(unlink)(file);
}
int unlinkat(int dir, const char *file, int flags) {
    char path[PATH_MAX] = "";
    return !flags && resolve(dir, file, path) && keep_open(path) ? 0 : REAL(unlinkat)(dir, file, flags);
}
int rename(const char *from, const char *to) {
    char path[PATH_MAX] = "";
    if (!resolve(AT_FDCWD, to, path)) return REAL(rename)(from, to);
    keep_open(path);
    int code = REAL(rename)(from, to);
    if (!code) note_own(path);
    return code;
}
int link(const char *from, const char *to) {
    char path[PATH_MAX] = "";
    int code = REAL(link)(from, to);
    if (!code && resolve(AT_FDCWD, to, path)) note_own(path);
    return code;
}

#define READ(name, ...) if (is_stale(fd)) return FAIL(ESTALE); return REAL(name)(__VA_ARGS__);
ssize_t read(int fd, void *data, size_t size) { READ(read, fd, data, size) }
ssize_t pread(int fd, void *data, size_t size, off_t at) { READ(pread, fd, data, size, at) }
ssize_t pread64(int fd, void *data, size_t size, off64_t at) { READ(pread64, fd, data, size, at) }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { READ(pwrite, fd, data, size, at) }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) { READ(pwrite64, fd, data, size, at) }
ssize_t write(int fd, const void *data, size_t size) { READ(write, fd, data, size) }

int close(int fd) {
    char path[PATH_MAX] = "";
    struct stat found;
    if (!root[0] || REAL(fstat)(fd, &found) || !S_ISREG(found.st_mode) || !path_of(fd, path)) return REAL(close)(fd);
    int is_written = (REAL(fcntl)(fd, F_GETFL) & O_ACCMODE) != O_RDONLY;
    int code = REAL(close)(fd);
    if (!strncmp(strrchr(path, '/'), "/.nfs", 5)) REAL(unlink)(path);
    return !code && is_written && close_errno && ++num_closed == close_number ? FAIL(close_errno) : code;
}

int flock(int fd, int operation) {
    char path[PATH_MAX] = "";
    return path_of(fd, path) ? FAIL(ENOLCK) : REAL(flock)(fd, operation);
}
#define LOCK(name)                                                                                              \
    int name(int fd, int command, ...) {                                                                        \
        char path[PATH_MAX];                                                                                    \
        va_list rest;                                                                                           \
        va_start(rest, command);                                                                                \
        void *argument = va_arg(rest, void *);                                                                  \
        va_end(rest);                                                                                           \
        int is_lock = command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK || command == F_OFD_SETLKW; \
        return is_lock && path_of(fd, path) ? FAIL(ENOLCK) : REAL(name)(fd, command, argument);                 \
    }
LOCK(fcntl)
LOCK(fcntl64)
