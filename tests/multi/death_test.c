/* SPDX-License-Identifier: Apache-2.0
 * Ranks that die, stop or leave while they are needed: every survivor raises within five seconds and names the rank and
 * the operation, can go on in a new group, and keeps nothing. */
#include "ranks.h"
#include "sanitized.h"

#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define S      1000000000ll
#define VICTIM 1
#define LARGE  (SANITIZED ? 1 << 19 : 3 << 20)

enum death { KILLED, STOPPED, EXITS, EXITS_AT_ONCE, DESTROYS_GROUP, DESTROYS_CONTEXT };
static const char *const death_names[] = {
    "killed", "stopped", "exit", "_exit", "destroys the group", "destroys its context"};

enum work { SMALL, LARGE_REDUCE, BARRIER, RECV, GATHER, NWORKS };
static const char *const work_names[NWORKS] = {"ALL_REDUCE", "ALL_REDUCE", "BARRIER", "message", "ALL_GATHER"};

static enum death death;
static enum work work;
static const char *vendors; /* settings that emulate GPUs, or NULL */

static int count_entries(const char *path)
{
    DIR *dir = opendir(path);
    int n = 0;
    if (!dir) abort();
    while (readdir(dir)) n++;
    closedir(dir);
    return n;
}

/* ---- one round of work: all ranks call it with the same number until it fails ---- */

static int exchange(struct rank *rank, gpubridge_comm *comm, int64_t *x)
{
    int peer = rank->rank == VICTIM ? 0 : VICTIM;
    struct gpubridge_op op = {
        .struct_size = sizeof op, .kind = GPUBRIDGE_RECV, .dtype = GPUBRIDGE_I64, .root = peer, .recv = x, .count = 1};
    if (rank->rank != VICTIM) return gpubridge_run(comm, &op);
    int rc = 0;
    op.kind = GPUBRIDGE_SEND, op.send = x;
    for (op.root = 0; op.root < rank->size && !rc; op.root++)
        if (op.root != VICTIM) rc = gpubridge_run(comm, &op);
    return rc;
}

static int do_work(struct rank *rank, gpubridge_comm *comm, int64_t *x)
{
    switch (work) {
    case SMALL:
        return gpubridge_all_reduce(comm, x, x, 1, GPUBRIDGE_I64, GPUBRIDGE_SUM, NULL, NULL);
    case LARGE_REDUCE:
        return gpubridge_all_reduce(comm, x, x, LARGE, GPUBRIDGE_I64, GPUBRIDGE_SUM, NULL, NULL);
    case BARRIER:
        return gpubridge_barrier(comm, 0);
    case RECV:
        return exchange(rank, comm, x);
    default:
        return gpubridge_all_gather(comm, x, x + 100000, 100000, GPUBRIDGE_I64, NULL, NULL);
    }
}

static void die(struct rank *rank, gpubridge_comm *comm)
{
    rank_words(rank)[0] = (uint64_t)(now_s() * 1e9);
    switch (death) {
    case KILLED:
        kill(getpid(), SIGKILL);
        break;
    case STOPPED:
        kill(getpid(), SIGSTOP);
        break;
    case EXITS:
        exit(0);
    case EXITS_AT_ONCE:
        _exit(0);
    case DESTROYS_GROUP:
        gpubridge_comm_destroy(comm);
        while (!rank_words(rank)[2]) usleep(1000); /* alive, and not a member any more */
        gpubridge_context_destroy(rank->context);
        exit(0);
    case DESTROYS_CONTEXT:
        gpubridge_comm_destroy(comm);
        gpubridge_context_destroy(rank->context);
        exit(0);
    }
    for (;;) pause();
}

/* The survivors go on without the dead. */
static void use_survivors(struct rank *rank)
{
    static const int survivors[] = {3, 0, 2};
    int64_t x = rank->rank;
    gpubridge_comm *comm = rank_comm(rank, "survivors", survivors, 3);
    EXPECT_OK(gpubridge_all_reduce(comm, &x, &x, 1, GPUBRIDGE_I64, GPUBRIDGE_SUM, NULL, NULL));
    EXPECT(x == 5, "the survivors' sum is %lld", (long long)x);
    EXPECT_OK(gpubridge_barrier(comm, 0));
    gpubridge_comm_destroy(comm);
}

static void expect_named(const char *what, const char *rank, const char *op)
{
    const char *text = gpubridge_last_error();
    EXPECT(strstr(text, rank), "%s: %s should be named", what, rank);
    EXPECT(strstr(text, op) || (work == RECV && strstr(text, "RECV")), "%s: %s should be named", what, op);
}

static void *nothing(void *arg)
{
    return arg;
}

static void death_body(struct rank *rank)
{
    pthread_t first;
    if (pthread_create(&first, NULL, nothing, NULL))
        abort(); /* a sanitizer may start a thread of its own with the first */
    pthread_join(first, NULL);
    int fds = count_entries("/proc/self/fd"), threads = count_entries("/proc/self/task"), rc = 0;
    static int64_t *x; /* static: not lost, for a leak checker, where the victim exits */
    x = calloc(LARGE, sizeof *x);
    if (!x) abort();
    rank_open(rank);
    gpubridge_comm *comm = rank_comm(rank, "world", NULL, 0);
    if (rank->rank == VICTIM) rank_words(rank)[1] = (uint64_t)getpid();
    rank_meet(rank);
    for (int round = 0; !rc; round++) {
        if (rank->rank == VICTIM && round == 20) die(rank, comm);
        rc = do_work(rank, comm, x);
        EXPECT(rank->rank != VICTIM || rc == 0, "work failed before the death");
    }
    double late = now_s() - 1e-9 * (double)rank_words(rank)[0];
    EXPECT(rc == GPUBRIDGE_ERR_PEER_LOST, "%s: status %d", death_names[death], rc);
    expect_named(death_names[death], "rank 1", work_names[work]);
    EXPECT(late < 5, "%s during %s: raised after %.2f s", death_names[death], work_names[work], late);
    if (rank->rank == 0)
        printf("%s during %s: raised after %.3f s: %s\n", death_names[death], work_names[work], late,
               gpubridge_last_error());
    EXPECT(do_work(rank, comm, x) == rc, "the group goes on after it failed");
    expect_named("the next call", "rank 1", work_names[work]);
    EXPECT(gpubridge_comm_status(comm) == rc, "the group's status differs from its operation's");
    gpubridge_comm_destroy(comm);
    use_survivors(rank);
    rank_words(rank)[2] = 1;
    if (rank->rank == 0 && death == STOPPED) kill((pid_t)rank_words(rank)[1], SIGKILL);
    double before = now_s();
    gpubridge_context_destroy(rank->context);
    EXPECT(now_s() - before < 10, "destroying the context took %.1f s", now_s() - before);
    EXPECT(count_entries("/proc/self/fd") == fds, "%d files are open, %d were", count_entries("/proc/self/fd"), fds);
    /* An emulator keeps the thread of its default stream. */
    EXPECT(vendors || count_entries("/proc/self/task") == threads, "%d threads, there were %d",
           count_entries("/proc/self/task") - 2, threads - 2);
    free(x);
}

/* ---- leaving is no death ---- */

/* A rank that leaves right after an operation does not take the others' results with it. */
static void leave_body(struct rank *rank)
{
    int64_t *x = malloc(LARGE * sizeof *x);
    if (!x) abort();
    rank_open(rank);
    gpubridge_comm *comm = rank_comm(rank, "world", NULL, 0);
    for (int i = 0; i < LARGE; i++) x[i] = i + rank->rank;
    EXPECT_OK(gpubridge_all_reduce(comm, x, x, LARGE, GPUBRIDGE_I64, GPUBRIDGE_SUM, NULL, NULL));
    for (int i = 0; i < LARGE; i++) EXPECT(x[i] == 4ll * i + 6, "element %d is %lld", i, (long long)x[i]);
    if (rank->rank % 2) gpubridge_comm_destroy(comm); /* the others leave it to the context */
    gpubridge_context_destroy(rank->context);
    free(x);
}

/* Destroying a group on one rank fails what is pending there, and returns soon. */
static void destroy_body(struct rank *rank)
{
    int64_t x[4] = {0};
    gpubridge_request *requests[3];
    rank_open(rank);
    gpubridge_comm *comm = rank_comm(rank, "world", NULL, 0);
    if (rank->rank == VICTIM) {
        for (int k = 0; k < 3; k++)
            EXPECT_OK(gpubridge_all_reduce(comm, x + k, x + k, 1, GPUBRIDGE_I64, GPUBRIDGE_SUM, NULL, &requests[k]));
        double before = now_s();
        gpubridge_comm_destroy(comm);
        EXPECT(now_s() - before < 10, "destroy took %.1f s", now_s() - before);
        for (int k = 0; k < 3; k++) {
            EXPECT(gpubridge_request_wait(requests[k], S) == GPUBRIDGE_ERR_DESTROYED,
                   "a pending operation of a destroyed group");
            gpubridge_request_free(requests[k]);
        }
        rank_meet(rank);
    } else {
        rank_meet(rank);
        gpubridge_comm_destroy(comm);
    }
    gpubridge_context_destroy(rank->context);
}

/* One rank gives a group up while its island agrees on a vendor communicator that another group shares, or makes it.
 * Nobody hangs, whatever becomes of the other group, and later groups work. */
static void give_up_round(struct rank *rank, int round)
{
    enum { N = 100000 };
    static int64_t x[2][N];
    gpubridge_request *requests[2];
    gpubridge_comm *comms[2];
    char name[2][32];
    for (int g = 0; g < 2; g++) {
        snprintf(name[g], sizeof name[g], "round %d, group %d", round, g);
        comms[g] = rank_comm(rank, name[g], NULL, 0);
    }
    rank_meet(rank);
    for (int g = 0; g < 2; g++)
        EXPECT_OK(gpubridge_all_reduce(comms[g], x[g], x[g], N, GPUBRIDGE_I64, GPUBRIDGE_SUM, NULL, &requests[g]));
    if (rank->rank == round % rank->size) {
        usleep(200u * (unsigned)round);
        gpubridge_comm_abort(comms[0], "given up by the test");
    }
    for (int g = 0; g < 2; g++) {
        const int rc = gpubridge_request_wait(requests[g], 10 * S);
        EXPECT(rc != GPUBRIDGE_AGAIN, "%s hangs", name[g]);
        gpubridge_request_free(requests[g]);
        gpubridge_comm_destroy(comms[g]);
    }
    rank_meet(rank);
    snprintf(name[0], sizeof name[0], "round %d, later", round);
    gpubridge_comm *later = rank_comm(rank, name[0], NULL, 0);
    for (int i = 0; i < N; i++) x[0][i] = i + rank->rank;
    EXPECT_OK(gpubridge_all_reduce(later, x[0], x[0], N, GPUBRIDGE_I64, GPUBRIDGE_SUM, NULL, NULL));
    for (int i = 0; i < N; i++) EXPECT(x[0][i] == 4ll * i + 6, "element %d is %lld", i, (long long)x[0][i]);
    gpubridge_comm_destroy(later);
}

static void give_up_body(struct rank *rank)
{
    for (int round = 0; round < (SHORT ? 3 : 8); round++) {
        rank_open(rank); /* knows of no vendor communicator */
        give_up_round(rank, round);
        gpubridge_context_destroy(rank->context);
        rank_meet(rank);
    }
}

/* ---- a child process after fork ---- */

static void child_main(gpubridge_context *context, gpubridge_comm *comm)
{
    int64_t x = 0;
    struct gpubridge_comm_config config = {.struct_size = sizeof config, .name = "x", .size = 1};
    char hello[GPUBRIDGE_HELLO_BYTES];
    size_t bytes = sizeof hello;
    int ok = gpubridge_all_reduce(comm, &x, &x, 1, GPUBRIDGE_I64, GPUBRIDGE_SUM, NULL, NULL) == GPUBRIDGE_ERR_FORKED &&
             gpubridge_barrier(comm, S) == GPUBRIDGE_ERR_FORKED &&
             gpubridge_comm_hello(context, &config, hello, &bytes) == GPUBRIDGE_ERR_FORKED &&
             strstr(gpubridge_last_error(), "process");
    gpubridge_comm_abort(comm, "from a child");
    gpubridge_comm_destroy(comm);
    gpubridge_context_destroy(context);
    _exit(ok ? 0 : 1);
}

static void fork_body(struct rank *rank)
{
    enum { CHILDREN = 8 };
    pid_t pids[CHILDREN];
    rank_open(rank);
    gpubridge_comm *comm = rank_comm(rank, "world", NULL, 0);
    for (int c = 0; c < CHILDREN; c++) {
        pids[c] = fork();
        if (pids[c] == 0 && c == 0)
            for (;;) pause();
        if (pids[c] == 0) child_main(rank->context, comm);
    }
    kill(pids[0], SIGKILL);
    for (int c = 0; c < CHILDREN; c++) {
        int64_t x = rank->rank;
        int status = 0;
        EXPECT_OK(gpubridge_all_reduce(comm, &x, &x, 1, GPUBRIDGE_I64, GPUBRIDGE_SUM, NULL, NULL));
        EXPECT(x == 6, "the sum is %lld", (long long)x);
        EXPECT(waitpid(pids[c], &status, 0) == pids[c], "a child is lost");
        EXPECT(c == 0 ? WIFSIGNALED(status) : WIFEXITED(status) && WEXITSTATUS(status) == 0,
               "child %d ended with status %x", c, (unsigned)status);
    }
    EXPECT_OK(gpubridge_barrier(comm, 0));
    gpubridge_comm_destroy(comm);
    gpubridge_context_destroy(rank->context);
}

static int try_death(enum death d, enum work w)
{
    static const char *const islands[] = {"a", "a", "b", "b"};
    char what[80];
    death = d, work = w;
    snprintf(what, sizeof what, "%s during %s", death_names[d], work_names[w]);
    const char *const *labels = vendors ? NULL : islands;
    if (d == KILLED || d == STOPPED) return ranks_run_victim(4, labels, vendors, 60, death_body, VICTIM, what);
    return ranks_run(4, labels, vendors, 60, death_body, what);
}

int main(void)
{
    static const char *const islands[] = {"a", "a", "b", "b"};
    const int is_short = SHORT;
    int failed = 0;
    for (enum work w = 0; w < NWORKS; w++) failed += try_death(KILLED, w);
    for (enum death d = STOPPED; d <= DESTROYS_CONTEXT; d++)
        failed += try_death(d, d == STOPPED ? LARGE_REDUCE : SMALL);
    if (!is_short) {
        failed += try_death(STOPPED, BARRIER);
        failed += try_death(DESTROYS_GROUP, BARRIER);
        failed += try_death(EXITS, RECV);
    }
    failed += try_death(DESTROYS_GROUP, RECV);
    failed += try_death(DESTROYS_CONTEXT, LARGE_REDUCE);
    vendors = "GPUBRIDGE_EMULATE=cuda,cuda,hip,hip\n";
    for (enum work w = 0; w < NWORKS; w += is_short ? 3 : 1) failed += try_death(KILLED, w);
    failed += try_death(DESTROYS_CONTEXT, LARGE_REDUCE);
    vendors = "GPUBRIDGE_EMULATE=cuda,cuda,hip,hip\nGPUBRIDGE_GATE=off\n";
    failed += try_death(KILLED, LARGE_REDUCE);
    failed += ranks_run(4, NULL, "GPUBRIDGE_EMULATE=cuda,cuda,cuda,hip\n", 60, give_up_body, "giving up a first use");
    for (int i = 0; i < (is_short ? 2 : 5); i++) failed += ranks_run(4, islands, NULL, 60, leave_body, "leaving");
    failed += ranks_run(4, islands, NULL, 60, destroy_body, "destroying a group on one rank");
    failed += ranks_run(4, islands, NULL, 60, fork_body, "children");
    printf("%s\n", failed ? "FAILED" : "ok");
    return failed != 0;
}
