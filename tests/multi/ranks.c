/* SPDX-License-Identifier: Apache-2.0
 * Forks the ranks before any thread exists, so that sanitizers and thread libraries are content. */
#include "ranks.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MAX_RANKS 16
#define MAX_COMMS 640

struct slot {
    _Atomic int full;
    size_t bytes;
    uint8_t hello[GPUBRIDGE_HELLO_BYTES];
};

struct board { /* hellos of one comm */
    char name[64];
    struct slot slots[MAX_RANKS];
};

struct ranks {
    _Atomic int lock;
    _Atomic int met, round;
    _Atomic int failed; /* a rank did: the others need not wait for it */
    int nboards;
    uint64_t words[MAX_RANKS * 64];
    char settings[MAX_RANKS][1024];
    struct board boards[MAX_COMMS];
};

double now_s(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec + 1e-9 * (double)ts.tv_nsec;
}

static void nap(struct ranks *shared, useconds_t us)
{
    if (atomic_load(&shared->failed)) {
        fprintf(stderr, "another rank failed\n");
        exit(1);
    }
    usleep(us);
}

static struct board *board_of(struct ranks *shared, const char *name)
{
    int zero = 0;
    while (!atomic_compare_exchange_weak(&shared->lock, &zero, 1)) zero = 0, sched_yield();
    int i = 0;
    while (i < shared->nboards && strcmp(shared->boards[i].name, name) != 0) i++;
    if (i == shared->nboards) {
        if (i == MAX_COMMS) abort();
        snprintf(shared->boards[i].name, sizeof shared->boards[i].name, "%s", name);
        shared->nboards++;
    }
    atomic_store(&shared->lock, 0);
    return &shared->boards[i];
}

void rank_open(struct rank *rank)
{
    static const char secret[] = "a secret of the test's own";
    struct gpubridge_context_config config = {.struct_size = sizeof config,
                                              .device_kind = GPUBRIDGE_DEVICE_CPU,
                                              .device_index = rank->rank,
                                              .global_rank = rank->rank,
                                              .local_rank = rank->rank,
                                              .secret = secret,
                                              .secret_bytes = sizeof secret,
                                              .settings = rank->settings};
    EXPECT_OK(gpubridge_context_create(&config, &rank->context));
}

static int make_comm(struct rank *rank, const char *name, const int *members, int count,
                     void (*dawdle)(struct rank *rank, void *arg), void *arg, gpubridge_comm **comm)
{
    int all[MAX_RANKS];
    for (int i = 0; i < rank->size; i++) all[i] = i;
    if (!members) members = all, count = rank->size;
    struct gpubridge_comm_config config = {
        .struct_size = sizeof config, .name = name, .rank = -1, .size = count, .timeout_ns = 60000000000ll};
    for (int i = 0; i < count; i++)
        if (members[i] == rank->rank) config.rank = i;
    struct board *board = board_of(rank->shared, name);
    struct slot *own = &board->slots[config.rank];
    own->bytes = sizeof own->hello;
    EXPECT_OK(gpubridge_comm_hello(rank->context, &config, own->hello, &own->bytes));
    atomic_store(&own->full, 1);
    const void *hellos[MAX_RANKS];
    size_t bytes[MAX_RANKS];
    for (int i = 0; i < count; i++) {
        while (!atomic_load(&board->slots[i].full)) nap(rank->shared, 100);
        hellos[i] = board->slots[i].hello;
        bytes[i] = board->slots[i].bytes;
    }
    if (dawdle) dawdle(rank, arg);
    return gpubridge_comm_create(rank->context, &config, hellos, bytes, comm);
}

int rank_try_comm(struct rank *rank, const char *name, const int *members, int count, gpubridge_comm **comm)
{
    return make_comm(rank, name, members, count, NULL, NULL, comm);
}

gpubridge_comm *rank_late_comm(struct rank *rank, const char *name, const int *members, int count,
                               void (*dawdle)(struct rank *rank, void *arg), void *arg)
{
    gpubridge_comm *comm = NULL;
    EXPECT_OK(make_comm(rank, name, members, count, dawdle, arg, &comm));
    return comm;
}

gpubridge_comm *rank_comm(struct rank *rank, const char *name, const int *members, int count)
{
    gpubridge_comm *comm = NULL;
    EXPECT_OK(rank_try_comm(rank, name, members, count, &comm));
    return comm;
}

void rank_meet(struct rank *rank)
{
    int round = atomic_load(&rank->shared->round);
    if (atomic_fetch_add(&rank->shared->met, 1) + 1 == rank->size) {
        atomic_store(&rank->shared->met, 0);
        atomic_fetch_add(&rank->shared->round, 1);
        return;
    }
    while (atomic_load(&rank->shared->round) == round) nap(rank->shared, 50);
}

uint64_t *rank_words(struct rank *rank)
{
    return rank->shared->words;
}

static int reap(struct ranks *shared, pid_t *pids, int size, int victim, double deadline, const char *what)
{
    int failed = 0, left = size;
    while (left) {
        for (int i = 0; i < size; i++) {
            int status;
            if (!pids[i] || waitpid(pids[i], &status, WNOHANG) != pids[i]) continue;
            pids[i] = 0;
            left--;
            int died_as_wanted = i == victim && WIFSIGNALED(status);
            if ((WIFEXITED(status) && WEXITSTATUS(status) == 0) || died_as_wanted) continue;
            failed++;
            atomic_store(&shared->failed, 1);
            if (WIFSIGNALED(status))
                fprintf(stderr, "%s: rank %d died of signal %d\n", what, i, WTERMSIG(status));
            else
                fprintf(stderr, "%s: rank %d exited with %d\n", what, i, WEXITSTATUS(status));
        }
        if (now_s() > deadline) {
            for (int i = 0; i < size; i++) {
                if (!pids[i]) continue;
                fprintf(stderr, "%s: rank %d hung\n", what, i);
                kill(pids[i], SIGKILL);
                waitpid(pids[i], NULL, 0);
                failed++;
            }
            return failed;
        }
        usleep(500);
    }
    return failed;
}

int ranks_run_victim(int size, const char *const *islands, const char *extra, int limit_s, void (*body)(struct rank *),
                     int victim, const char *what)
{
    struct ranks *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) abort();
    pid_t pids[MAX_RANKS];
    fflush(NULL);
    for (int i = 0; i < size; i++) {
        int n = snprintf(shared->settings[i], sizeof shared->settings[i], "%s", extra ? extra : "");
        if (islands)
            snprintf(shared->settings[i] + n, sizeof shared->settings[i] - (size_t)n, "GPUBRIDGE_ISLAND=%s\n",
                     islands[i]);
        pids[i] = fork();
        if (pids[i]) continue;
        struct rank rank = {.rank = i, .size = size, .shared = shared, .settings = shared->settings[i]};
        body(&rank);
        fflush(NULL);
        exit(0);
    }
    int failed = reap(shared, pids, size, victim, now_s() + limit_s, what);
    munmap(shared, sizeof *shared);
    return failed;
}

int ranks_run(int size, const char *const *islands, const char *extra, int limit_s, void (*body)(struct rank *),
              const char *what)
{
    return ranks_run_victim(size, islands, extra, limit_s, body, -1, what);
}
