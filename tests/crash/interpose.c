/* Counts, records and spoils the system calls of this process that change what lies below one directory.
 *
 * A seccomp filter makes the kernel raise SIGSYS instead of running such a call, whoever made it: Python, C++, Rust, or
 * the C library inside of fwrite, where a preloaded library would not see it. The handler then makes the call itself,
 * from the one instruction that the filter lets pass. Changes that are no calls (stores into a shared mapping,
 * io_uring) are counted as escapes. Threads and forked children inherit the filter; a program that is executed cannot run.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/filter.h>
#include <linux/openat2.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <ucontext.h>
#include <unistd.h>

#ifndef __x86_64__
#error "only x86-64 so far: the numbers of the system calls and the registers differ"
#endif

/* Both as in disk.py. */
enum operation { NONE, CREATE, WRITE, RESIZE, SYNC, MKDIR, RENAME, REMOVE, LINK, ATTRIBUTES, ESCAPE };
enum kind { KILL, TORN, SHORT, FULL, ERROR, FROZEN };

struct state {          /* shared with disk.py and with forked processes */
    _Atomic int64_t calls; /* changes seen while armed */
    int64_t at;            /* the number of the one to spoil, from 0 */
    int32_t kind, whole_job, armed, fired, full, trace_fd;
    _Atomic int64_t escapes;
};

struct record {
    int32_t operation, path_nbytes, to_nbytes;
    int64_t offset, data_nbytes;
};

struct call {
    enum operation operation;
    int fd, dirfd, to_dirfd;
    const char *path, *to;  /* NULL: what fd stands for */
    const void *data;
    size_t data_nbytes;
    int64_t offset;         /* of a write, -1: where the file stands; else the length that the file is cut to, -1: none */
    int count_arg;          /* the argument that says how many bytes; -1: none */
};

static struct state *state;
static char directory[PATH_MAX];
static size_t directory_length;

/* The instruction after this call is the one whose system calls pass. */
__asm__(".text\n.globl passing_call\n.type passing_call,@function\npassing_call:\n"
        "mov %rdi,%rax\nmov %rsi,%rdi\nmov %rdx,%rsi\nmov %rcx,%rdx\nmov %r8,%r10\nmov %r9,%r8\nmov 8(%rsp),%r9\n"
        "syscall\n.globl passing_point\npassing_point:\nret\n");
extern long passing_call(long number, long a, long b, long c, long d, long e, long f);
extern const char passing_point[];

static void place_of_fd(int fd, char *place) {
    char link[40] = "/proc/self/fd/", digits[12];
    int length = 0, n = 0;
    if (fd == AT_FDCWD) {
        strcpy(link, "/proc/self/cwd");
    } else {
        for (unsigned rest = (unsigned)fd; n == 0 || rest; rest /= 10) digits[n++] = (char)('0' + rest % 10);
        length = (int)strlen(link);
        while (n) link[length++] = digits[--n];
        link[length] = 0;
    }
    long got = passing_call(SYS_readlink, (long)link, (long)place, PATH_MAX - 1, 0, 0, 0);
    place[got < 0 ? 0 : got] = 0;
}

static void place_of_path(int dirfd, const char *path, char *place) {
    place[0] = 0;
    if (path[0] != '/') {
        place_of_fd(dirfd, place);
        strncat(place, "/", PATH_MAX - 1 - strlen(place));
    }
    strncat(place, path, PATH_MAX - 1 - strlen(place));
}

static int is_inside(const char *place) {
    return strncmp(place, directory, directory_length) == 0 && strchr("/", place[directory_length]) != NULL;
}

static void by_path(struct call *call, enum operation operation, long dirfd, long path) {
    call->operation = operation;
    call->dirfd = (int)dirfd;
    call->path = (const char *)path;
}

static void by_fd(struct call *call, enum operation operation, long fd) {
    call->operation = operation;
    call->fd = (int)fd;
}

static void by_write(struct call *call, long fd, const void *data, size_t nbytes, long offset, int count_arg) {
    by_fd(call, WRITE, fd);
    call->data = data;
    call->data_nbytes = nbytes;
    call->offset = offset;
    call->count_arg = count_arg;
}

static struct call understand(long number, const long *a) {
    struct call call = {.operation = NONE, .offset = -1, .count_arg = -1};
    const struct iovec *first = (const struct iovec *)a[1];
    switch (number) {
    case SYS_creat: by_path(&call, CREATE, AT_FDCWD, a[0]); call.offset = 0; break;
    case SYS_open: by_path(&call, CREATE, AT_FDCWD, a[0]); call.offset = a[1] & O_TRUNC ? 0 : -1; break;
    case SYS_openat: by_path(&call, CREATE, a[0], a[1]); call.offset = a[2] & O_TRUNC ? 0 : -1; break;
    case SYS_openat2:
        if (((struct open_how *)a[2])->flags & (O_CREAT | O_TRUNC)) by_path(&call, CREATE, a[0], a[1]);
        break;
    case SYS_mknod: by_path(&call, CREATE, AT_FDCWD, a[0]); break;
    case SYS_mknodat: by_path(&call, CREATE, a[0], a[1]); break;
    case SYS_write: by_write(&call, a[0], (void *)a[1], (size_t)a[2], -1, 2); break;
    case SYS_pwrite64: by_write(&call, a[0], (void *)a[1], (size_t)a[2], a[3], 2); break;
    case SYS_writev: by_write(&call, a[0], first->iov_base, first->iov_len, -1, 2); break;
    case SYS_pwritev: case SYS_pwritev2: by_write(&call, a[0], first->iov_base, first->iov_len, a[3], 2); break;
    case SYS_sendfile: by_write(&call, a[0], NULL, (size_t)a[3], -1, 3); break;
    case SYS_copy_file_range: case SYS_splice: by_write(&call, a[2], NULL, (size_t)a[4], -1, 4); break;
    case SYS_fallocate: by_fd(&call, RESIZE, a[0]); break;
    case SYS_ftruncate: by_fd(&call, RESIZE, a[0]); call.offset = a[1]; break;
    case SYS_truncate: by_path(&call, RESIZE, AT_FDCWD, a[0]); call.offset = a[1]; break;
    case SYS_fsync: case SYS_fdatasync: case SYS_sync_file_range: case SYS_syncfs: by_fd(&call, SYNC, a[0]); break;
    case SYS_mkdir: by_path(&call, MKDIR, AT_FDCWD, a[0]); break;
    case SYS_mkdirat: by_path(&call, MKDIR, a[0], a[1]); break;
    case SYS_rename: by_path(&call, RENAME, AT_FDCWD, a[0]); call.to_dirfd = AT_FDCWD; call.to = (char *)a[1]; break;
    case SYS_renameat: case SYS_renameat2:
        by_path(&call, RENAME, a[0], a[1]); call.to_dirfd = (int)a[2]; call.to = (char *)a[3]; break;
    case SYS_unlink: case SYS_rmdir: by_path(&call, REMOVE, AT_FDCWD, a[0]); break;
    case SYS_unlinkat: by_path(&call, REMOVE, a[0], a[1]); break;
    case SYS_link: case SYS_symlink: by_path(&call, LINK, AT_FDCWD, a[1]); break;
    case SYS_linkat: by_path(&call, LINK, a[2], a[3]); break;
    case SYS_symlinkat: by_path(&call, LINK, a[1], a[2]); break;
    case SYS_chmod: case SYS_chown: case SYS_setxattr: by_path(&call, ATTRIBUTES, AT_FDCWD, a[0]); break;
    case SYS_fchmod: case SYS_fchown: case SYS_fsetxattr: by_fd(&call, ATTRIBUTES, a[0]); break;
    case SYS_fchmodat: case SYS_fchownat: by_path(&call, ATTRIBUTES, a[0], a[1]); break;
    case SYS_utimensat:
        if (a[1]) by_path(&call, ATTRIBUTES, a[0], a[1]); else by_fd(&call, ATTRIBUTES, a[0]);
        break;
    case SYS_mmap: by_fd(&call, ESCAPE, a[4]); break;
    case SYS_io_uring_setup: by_path(&call, ESCAPE, AT_FDCWD, (long)directory); break;
    }
    return call;
}

static void trace(const struct call *call, const char *place, const char *to) {
    if (state->trace_fd < 0) return;
    int64_t offset = call->offset;
    if (call->operation == WRITE && offset < 0) offset = passing_call(SYS_lseek, call->fd, 0, SEEK_CUR, 0, 0, 0);
    size_t data_nbytes = call->data ? call->data_nbytes : 0;
    struct record record = {call->operation, (int32_t)strlen(place), (int32_t)strlen(to), offset, (int64_t)data_nbytes};
    struct iovec parts[] = {{&record, sizeof record}, {(void *)place, strlen(place)}, {(void *)to, strlen(to)},
                            {(void *)call->data, data_nbytes}};
    passing_call(SYS_writev, state->trace_fd, (long)parts, 4, 0, 0, 0);
}

static _Noreturn void die(void) {
    passing_call(SYS_kill, state->whole_job ? 0 : passing_call(SYS_getpid, 0, 0, 0, 0, 0, 0), SIGKILL, 0, 0, 0, 0);
    for (;;) passing_call(SYS_pause, 0, 0, 0, 0, 0, 0);
}

static long half(long number, const long *a, const struct call *call) {
    if (number == SYS_writev || number == SYS_pwritev || number == SYS_pwritev2)
        return passing_call(call->offset < 0 ? SYS_write : SYS_pwrite64, a[0], (long)call->data,
                            (long)(call->data_nbytes + 1) / 2, call->offset, 0, 0);
    long b[6];
    memcpy(b, a, sizeof b);
    b[call->count_arg] = (b[call->count_arg] + 1) / 2;
    return passing_call(number, b[0], b[1], b[2], b[3], b[4], b[5]);
}

static long whole(long number, const long *a) {
    return passing_call(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

static long spoil(long number, const long *a, const struct call *call) {
    int writes = call->operation == WRITE;
    state->fired = 1;
    switch (state->kind) {
    case KILL: die();
    case TORN: writes ? half(number, a, call) : whole(number, a); die();
    case SHORT: return half(number, a, call);
    case FROZEN:
        passing_call(SYS_tgkill, passing_call(SYS_getpid, 0, 0, 0, 0, 0, 0), passing_call(SYS_gettid, 0, 0, 0, 0, 0, 0),
                     SIGSTOP, 0, 0, 0);
        return whole(number, a);
    case FULL: state->full = 1; return writes && call->data_nbytes > 1 ? half(number, a, call) : -ENOSPC;
    default: return -EIO;
    }
}

static int needs_space(enum operation operation) {
    return operation == CREATE || operation == WRITE || operation == MKDIR || operation == LINK;
}

static long run(long number, const long *a) {
    char place[PATH_MAX], to[PATH_MAX] = "";
    struct call call = understand(number, a);
    if (call.operation == NONE || !state->armed) return whole(number, a);
    if (call.path) place_of_path(call.dirfd, call.path, place); else place_of_fd(call.fd, place);
    if (call.to) place_of_path(call.to_dirfd, call.to, to);
    if (!is_inside(place) && !is_inside(to)) return whole(number, a);
    if (call.operation == ESCAPE) {
        atomic_fetch_add(&state->escapes, 1);
        return number == SYS_io_uring_setup ? -ENOSYS : whole(number, a);
    }
    trace(&call, place, to);
    if (atomic_fetch_add(&state->calls, 1) == state->at) {
        if (state->kind != SHORT || call.operation == WRITE) return spoil(number, a, &call);
        state->at++;
    }
    if (state->full && needs_space(call.operation)) return -ENOSPC;
    return whole(number, a);
}

static void on_sigsys(int signal_number, siginfo_t *info, void *context) {
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    long a[6] = {registers[REG_RDI], registers[REG_RSI], registers[REG_RDX],
                 registers[REG_R10], registers[REG_R8],  registers[REG_R9]};
    (void)signal_number;
    registers[REG_RAX] = run(info->si_syscall, a);
}

struct watched { int number, arg; uint32_t mask; }; /* mask 0: always; else if the argument has one of its bits */
static const struct watched WATCHED[] = {
    {SYS_open, 1, O_CREAT | O_TRUNC | O_TMPFILE}, {SYS_openat, 2, O_CREAT | O_TRUNC | (O_TMPFILE & ~O_DIRECTORY)},
    {SYS_mmap, 3, MAP_SHARED}, {SYS_openat2, 0, 0}, {SYS_creat, 0, 0}, {SYS_mknod, 0, 0}, {SYS_mknodat, 0, 0},
    {SYS_write, 0, 0}, {SYS_pwrite64, 0, 0}, {SYS_writev, 0, 0}, {SYS_pwritev, 0, 0}, {SYS_pwritev2, 0, 0},
    {SYS_sendfile, 0, 0}, {SYS_copy_file_range, 0, 0}, {SYS_splice, 0, 0}, {SYS_ftruncate, 0, 0},
    {SYS_fallocate, 0, 0}, {SYS_truncate, 0, 0}, {SYS_fsync, 0, 0}, {SYS_fdatasync, 0, 0},
    {SYS_sync_file_range, 0, 0}, {SYS_syncfs, 0, 0}, {SYS_mkdir, 0, 0}, {SYS_mkdirat, 0, 0}, {SYS_rename, 0, 0},
    {SYS_renameat, 0, 0}, {SYS_renameat2, 0, 0}, {SYS_unlink, 0, 0}, {SYS_rmdir, 0, 0}, {SYS_unlinkat, 0, 0},
    {SYS_link, 0, 0}, {SYS_symlink, 0, 0}, {SYS_linkat, 0, 0}, {SYS_symlinkat, 0, 0}, {SYS_chmod, 0, 0},
    {SYS_chown, 0, 0}, {SYS_setxattr, 0, 0}, {SYS_fchmod, 0, 0}, {SYS_fchown, 0, 0}, {SYS_fsetxattr, 0, 0},
    {SYS_fchmodat, 0, 0}, {SYS_fchownat, 0, 0}, {SYS_utimensat, 0, 0}, {SYS_io_uring_setup, 0, 0},
};
enum { WATCHED_COUNT = sizeof WATCHED / sizeof *WATCHED };

static int filter_calls(void) {
    struct sock_filter program[16 + 5 * WATCHED_COUNT];
    unsigned short n = 0;
    uint64_t passing = (uint64_t)passing_point;
#define LOAD(field) program[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, field)
#define JUMP(test, value, yes, no) program[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | test | BPF_K, value, yes, no)
#define RETURN(action) program[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, action)
    LOAD(offsetof(struct seccomp_data, instruction_pointer));
    JUMP(BPF_JEQ, (uint32_t)passing, 0, 3);
    LOAD(offsetof(struct seccomp_data, instruction_pointer) + 4);
    JUMP(BPF_JEQ, (uint32_t)(passing >> 32), 0, 1);
    RETURN(SECCOMP_RET_ALLOW);
    for (int i = 0; i < WATCHED_COUNT; i++) {
        LOAD(offsetof(struct seccomp_data, nr));
        JUMP(BPF_JEQ, (uint32_t)WATCHED[i].number, 0, WATCHED[i].mask ? 3 : 1);
        if (WATCHED[i].mask) {
            LOAD(offsetof(struct seccomp_data, args) + 8 * (size_t)WATCHED[i].arg);
            JUMP(BPF_JSET, WATCHED[i].mask, 0, 1);
        }
        RETURN(SECCOMP_RET_TRAP);
    }
    RETURN(SECCOMP_RET_ALLOW);
    struct sock_fprog filter = {n, program};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) return errno;
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) ? errno : 0;
}

/* Begin for this process, for good; return 0 or an errno. `below` is absolute and has no symbolic links. */
int interpose(const char *below, struct state *shared) {
    struct sigaction action = {.sa_sigaction = on_sigsys, .sa_flags = SA_SIGINFO | SA_NODEFER};
    state = shared;
    directory_length = strlen(below);
    memcpy(directory, below, directory_length + 1);
    if (sigaction(SIGSYS, &action, NULL)) return errno;
    return filter_calls();
}
