/* A machine with a wrong clock or a slow disk, for processes that load this library first (LD_PRELOAD).
 *
 * The file named by HWRL_FAULT_MACHINE has two numbers of 64 bits, which may change at any time: nanoseconds to add to
 * the clock of the day, and nanoseconds that each fsync takes longer. The monotonic clocks stay right, as they do when
 * an administrator sets a clock. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

struct machine {
    volatile int64_t clock_ns;
    volatile int64_t sync_ns;
};

static const struct machine *machine;

__attribute__((constructor)) static void open_machine(void) {
    const char *path = getenv("HWRL_FAULT_MACHINE");
    int file = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return;
    void *page = mmap(NULL, sizeof(struct machine), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (page != MAP_FAILED) machine = page;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (real == NULL) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (!failed && machine != NULL && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t ns = now->tv_sec * 1000000000LL + now->tv_nsec + machine->clock_ns;
        now->tv_sec = ns / 1000000000LL;
        now->tv_nsec = ns % 1000000000LL;
    }
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &exact)) return -1;
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (out != NULL) *out = exact.tv_sec;
    return exact.tv_sec;
}

static void wait_for_disk(void) {
    if (machine == NULL || machine->sync_ns == 0) return;
    struct timespec left = {machine->sync_ns / 1000000000LL, machine->sync_ns % 1000000000LL};
    while (nanosleep(&left, &left) && errno == EINTR) {}
}

int fsync(int file) {
    wait_for_disk();
    return (int)syscall(SYS_fsync, file);
}

int fdatasync(int file) {
    wait_for_disk();
    return (int)syscall(SYS_fdatasync, file);
}
