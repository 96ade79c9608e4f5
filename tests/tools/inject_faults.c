/* Make one system call of a chosen process fail, or record the calls that could. For LD_PRELOAD.

   Only calls on files below FAULT_ROOT count. Their paths are relative to it.

   FAULT_LOG     file that gets a line for each recorded call, or for each fault
   FAULT_RULE    PROCESS|CALL|PATH|N|ACTION: the fault. Without it, calls are recorded.

   PROCESS is the module that `python -m` started, or the program's name. PROCESS and PATH are
   patterns of fnmatch. CALL: open, create, read, write, fsync, rename, or mkdir. N: number of the
   call in its process, from 1; with a + after it, all later ones fail, too. ACTION: an errno,
   `short` (half of the bytes are read or written), `kill` (SIGKILL before the call), or `killed`
   (after it). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum outcome { GO_ON, FAIL, SHORTEN, KILL_AFTER };

static char process[256];
static char root[4096];
static char rule[4][1024]; /* process, call, path, action */
static int nth;
static int repeats;
static int has_rule;
static const char *log_path;
static int counted;
static pid_t counted_in;
static int ready;

/* Copy the module after -m of this process's command line, or the program's name. */
static void find_process(void)
{
    char line[8192] = "";
    int fd = syscall(SYS_openat, AT_FDCWD, "/proc/self/cmdline", O_RDONLY);
    long length = fd < 0 ? 0 : syscall(SYS_read, fd, line, sizeof line - 1);
    if (fd >= 0)
        syscall(SYS_close, fd);
    const char *end = line + (length > 0 ? length : 0);
    const char *name = strrchr(line, '/');
    snprintf(process, sizeof process, "%.255s", name ? name + 1 : line);
    for (const char *word = line; word < end; word += strlen(word) + 1) {
        const char *next = word + strlen(word) + 1;
        if (strcmp(word, "-m") == 0 && next < end) {
            snprintf(process, sizeof process, "%.255s", next);
            return;
        }
    }
}

static void prepare(void)
{
    ready = 1;
    const char *folder = getenv("FAULT_ROOT");
    log_path = getenv("FAULT_LOG");
    if (!folder || !log_path)
        return;
    snprintf(root, sizeof root, "%s/", folder);
    find_process();
    const char *text = getenv("FAULT_RULE");
    if (!text)
        return;
    char number[32];
    const char *form = "%1023[^|]|%1023[^|]|%1023[^|]|%31[^|]|%1023s";
    if (sscanf(text, form, rule[0], rule[1], rule[2], number, rule[3]) != 5)
        abort();
    nth = atoi(number);
    repeats = strchr(number, '+') != NULL;
    has_rule = 1;
}

static void log_line(const char *call, const char *path)
{
    char line[8192];
    int length = snprintf(line, sizeof line, "%d\t%s\t%s\t%s\n", getpid(), process, call, path);
    int fd = syscall(SYS_openat, AT_FDCWD, log_path, O_WRONLY | O_APPEND | O_CREAT, 0644);
    if (fd >= 0) {
        syscall(SYS_write, fd, line, (size_t)length);
        syscall(SYS_close, fd);
    }
}

static void die(void)
{
    syscall(SYS_kill, getpid(), SIGKILL);
    for (;;)
        pause();
}

/* Record a call on `path`, or decide what becomes of it. Sets errno if it fails. */
static enum outcome judge(const char *call, const char *path)
{
    if (!ready)
        prepare();
    size_t length = strlen(root);
    if (!length || strncmp(path, root, length))
        return GO_ON;
    path += length;
    if (!has_rule) {
        log_line(call, path);
        return GO_ON;
    }
    if (strcmp(rule[1], call) || fnmatch(rule[0], process, 0) || fnmatch(rule[2], path, 0))
        return GO_ON;
    if (counted_in != getpid()) { /* forked */
        counted_in = getpid();
        counted = 0;
    }
    int number = __sync_add_and_fetch(&counted, 1);
    if (number != nth && !(repeats && number > nth))
        return GO_ON;
    log_line(call, path);
    if (!strcmp(rule[3], "kill"))
        die();
    if (!strcmp(rule[3], "killed"))
        return KILL_AFTER;
    if (!strcmp(rule[3], "short"))
        return SHORTEN;
    errno = atoi(rule[3]);
    return FAIL;
}

static enum outcome judge_name(const char *call, int folder, const char *name)
{
    char path[8192];
    if (name[0] == '/' || folder != AT_FDCWD)
        snprintf(path, sizeof path, "%s", name);
    else if (getcwd(path, sizeof path / 2))
        snprintf(path + strlen(path), sizeof path / 2, "/%s", name);
    return judge(call, path);
}

static enum outcome judge_file(const char *call, int fd)
{
    char link[64];
    char path[4096];
    if (ready && !root[0])
        return GO_ON;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    long length = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    if (length < 0)
        return GO_ON;
    path[length] = 0;
    return judge(call, path);
}

/* Return `result` of a call that was made, unless the process dies now. */
static long made(enum outcome outcome, long result)
{
    if (outcome == KILL_AFTER)
        die();
    return result;
}

static size_t fewer(enum outcome outcome, size_t count)
{
    return outcome == SHORTEN && count > 1 ? count / 2 : count;
}

#define REAL(name)                                                                                 \
    static __typeof__(name) *real;                                                                 \
    if (!real)                                                                                     \
    real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

#define OPENER(name)                                                                               \
    int name(const char *path, int flags, ...)                                                     \
    {                                                                                              \
        REAL(name);                                                                                \
        va_list rest;                                                                              \
        va_start(rest, flags);                                                                     \
        mode_t mode = va_arg(rest, mode_t);                                                        \
        va_end(rest);                                                                              \
        const char *call = flags & (O_WRONLY | O_RDWR) ? "create" : "open";                        \
        enum outcome outcome = judge_name(call, AT_FDCWD, path);                                   \
        return outcome == FAIL ? -1 : made(outcome, real(path, flags, mode));                      \
    }

#define OPENER_AT(name)                                                                            \
    int name(int folder, const char *path, int flags, ...)                                         \
    {                                                                                              \
        REAL(name);                                                                                \
        va_list rest;                                                                              \
        va_start(rest, flags);                                                                     \
        mode_t mode = va_arg(rest, mode_t);                                                        \
        va_end(rest);                                                                              \
        const char *call = flags & (O_WRONLY | O_RDWR) ? "create" : "open";                        \
        enum outcome outcome = judge_name(call, folder, path);                                     \
        return outcome == FAIL ? -1 : made(outcome, real(folder, path, flags, mode));              \
    }

OPENER(open)
OPENER(open64)
OPENER_AT(openat)
OPENER_AT(openat64)

#define READER(name, call, pointer)                                                                \
    ssize_t name(int fd, pointer data, size_t count)                                               \
    {                                                                                              \
        REAL(name);                                                                                \
        enum outcome outcome = judge_file(call, fd);                                               \
        return outcome == FAIL ? -1 : made(outcome, real(fd, data, fewer(outcome, count)));        \
    }

#define READER_AT(name, call, pointer, offset_type)                                                \
    ssize_t name(int fd, pointer data, size_t count, offset_type offset)                           \
    {                                                                                              \
        REAL(name);                                                                                \
        enum outcome outcome = judge_file(call, fd);                                               \
        return outcome == FAIL ? -1                                                                \
                               : made(outcome, real(fd, data, fewer(outcome, count), offset));     \
    }

READER(read, "read", void *)
READER(write, "write", const void *)
READER_AT(pread, "read", void *, off_t)
READER_AT(pread64, "read", void *, off64_t)
READER_AT(pwrite, "write", const void *, off_t)
READER_AT(pwrite64, "write", const void *, off64_t)

ssize_t writev(int fd, const struct iovec *parts, int count)
{
    REAL(writev);
    enum outcome outcome = judge_file("write", fd);
    return outcome == FAIL ? -1 : made(outcome, real(fd, parts, (int)fewer(outcome, count)));
}

#define SENDER(name, offset_type)                                                                  \
    ssize_t name(int to, int from, offset_type *offset, size_t count)                              \
    {                                                                                              \
        REAL(name);                                                                                \
        enum outcome outcome = judge_file("write", to);                                            \
        return outcome == FAIL ? -1                                                                \
                               : made(outcome, real(to, from, offset, fewer(outcome, count)));     \
    }

SENDER(sendfile, off_t)
SENDER(sendfile64, off64_t)

#define SYNCER(name)                                                                               \
    int name(int fd)                                                                               \
    {                                                                                              \
        REAL(name);                                                                                \
        enum outcome outcome = judge_file("fsync", fd);                                            \
        return outcome == FAIL ? -1 : made(outcome, real(fd));                                     \
    }

SYNCER(fsync)
SYNCER(fdatasync)

int rename(const char *from, const char *to)
{
    REAL(rename);
    enum outcome outcome = judge_name("rename", AT_FDCWD, to);
    return outcome == FAIL ? -1 : made(outcome, real(from, to));
}

int mkdir(const char *path, mode_t mode)
{
    REAL(mkdir);
    enum outcome outcome = judge_name("mkdir", AT_FDCWD, path);
    return outcome == FAIL ? -1 : made(outcome, real(path, mode));
}
