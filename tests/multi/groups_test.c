/* SPDX-License-Identifier: Apache-2.0
 * Groups: any members in any order, overlapping, hundreds one after the other; many operations in flight, from several
 * threads, with requests that nobody waits for. */
#include "ranks.h"
#include "sanitized.h"

#include <dirent.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#define S 1000000000ll

static int64_t value_of(int rank, int op, uint64_t i)
{
    return (int64_t)rank * 1000003 + (int64_t)op * 4099 + (int64_t)(i * i);
}

static int64_t sum_of(const int *members, int count, int op, uint64_t i)
{
    int64_t sum = 0;
    for (int m = 0; m < count; m++) sum += value_of(members[m], op, i);
    return sum;
}

static void fill(int64_t *x, uint64_t n, int rank, int op)
{
    for (uint64_t i = 0; i < n; i++) x[i] = value_of(rank, op, i);
}

static void check_sum(const int64_t *x, uint64_t n, const int *members, int count, int op)
{
    for (uint64_t i = 0; i < n; i++)
        EXPECT(x[i] == sum_of(members, count, op, i), "operation %d of %d members: element %llu is %lld", op, count,
               (unsigned long long)i, (long long)x[i]);
}

static gpubridge_request *start_sum(gpubridge_comm *comm, int64_t *x, uint64_t n)
{
    gpubridge_request *request = NULL;
    EXPECT_OK(gpubridge_all_reduce(comm, x, x, n, GPUBRIDGE_I64, GPUBRIDGE_SUM, NULL, &request));
    return request;
}

static void finish(gpubridge_request *request)
{
    EXPECT_OK(gpubridge_request_wait(request, 60 * S));
    gpubridge_request_free(request);
}

/* ---- members in any order, overlapping ---- */

struct team {
    int count, members[6];
};

/* The group of all comes first: its members then share a leader (turns.h). */
static const struct team teams[] = {
    {6, {5, 4, 3, 2, 1, 0}}, {2, {5, 2}}, {2, {2, 5}},          {3, {1, 0, 2}},
    {4, {4, 3, 5, 0}},       {1, {3}},    {5, {2, 0, 4, 1, 3}}, {2, {0, 1}},
};
#define NTEAMS ((int)(sizeof teams / sizeof *teams))

static int place_in(const struct team *team, int rank)
{
    for (int m = 0; m < team->count; m++)
        if (team->members[m] == rank) return m;
    return -1;
}

/* Roots and blocks count in the order of the members, whatever their ranks in the job. */
static void check_team(const struct team *team, int me, gpubridge_comm *comm)
{
    enum { N = 3000 };
    static int64_t x[N], all[6 * N];
    for (int root = 0; root < team->count; root++) {
        fill(x, N, me, root);
        EXPECT_OK(gpubridge_broadcast(comm, x, N, GPUBRIDGE_I64, root, NULL, NULL));
        check_sum(x, N, &team->members[root], 1, root);
    }
    fill(x, N, me, 99);
    EXPECT_OK(gpubridge_all_gather(comm, x, all, N, GPUBRIDGE_I64, NULL, NULL));
    for (int m = 0; m < team->count; m++) check_sum(all + m * N, N, &team->members[m], 1, 99);
    EXPECT_OK(gpubridge_barrier(comm, 0));
}

static void overlap_body(struct rank *rank)
{
    enum { N = 5000, ROUNDS = 5 };
    static int64_t x[NTEAMS][ROUNDS][N];
    gpubridge_request *requests[NTEAMS][ROUNDS];
    gpubridge_comm *comms[NTEAMS] = {NULL};
    char name[32];
    rank_open(rank);
    for (int t = 0; t < NTEAMS; t++) {
        snprintf(name, sizeof name, "team %d", t);
        if (place_in(&teams[t], rank->rank) >= 0) comms[t] = rank_comm(rank, name, teams[t].members, teams[t].count);
    }
    /* Every rank goes through its groups in another order; within a group the order is the same. */
    for (int k = 0; k < NTEAMS; k++) {
        int t = (k * 3 + rank->rank) % NTEAMS;
        for (int round = 0; comms[t] && round < ROUNDS; round++) {
            fill(x[t][round], N, rank->rank, 10 * t + round);
            requests[t][round] = start_sum(comms[t], x[t][round], N);
        }
    }
    for (int t = 0; t < NTEAMS; t++)
        for (int round = 0; comms[t] && round < ROUNDS; round++) {
            finish(requests[t][round]);
            check_sum(x[t][round], N, teams[t].members, teams[t].count, 10 * t + round);
        }
    for (int t = 0; t < NTEAMS; t++)
        if (comms[t]) check_team(&teams[t], rank->rank, comms[t]);
    rank_meet(rank);
    for (int t = 0; t < NTEAMS; t++) gpubridge_comm_destroy(comms[t]);
    gpubridge_context_destroy(rank->context);
}

/* ---- hundreds of groups cost nothing that stays ---- */

struct footprint {
    int sockets, listeners, threads;
    long resident_kib;
};

static int count_entries(const char *path, const char *prefix)
{
    DIR *dir = opendir(path);
    char file[300], target[256];
    int n = 0;
    if (!dir) abort();
    for (struct dirent *e; (e = readdir(dir));) {
        if (e->d_name[0] == '.') continue;
        snprintf(file, sizeof file, "%s/%s", path, e->d_name);
        ssize_t length = prefix ? readlink(file, target, sizeof target - 1) : 0;
        if (!prefix || (length > 0 && strncmp(target, prefix, strlen(prefix)) == 0)) n++;
    }
    closedir(dir);
    return n;
}

static int has_socket(unsigned long inode)
{
    char want[64];
    snprintf(want, sizeof want, "socket:[%lu]", inode);
    return count_entries("/proc/self/fd", want);
}

/* Sockets of this process that listen. */
static int count_listeners(const char *table)
{
    FILE *f = fopen(table, "r");
    char line[512];
    int n = 0;
    while (f && fgets(line, sizeof line, f)) {
        unsigned state;
        unsigned long inode;
        if (sscanf(line, " %*d: %*s %*s %x %*s %*s %*s %*d %*d %lu", &state, &inode) == 2 && state == 0x0a)
            n += has_socket(inode);
    }
    if (f) fclose(f);
    return n;
}

static struct footprint measure(void)
{
    struct footprint p = {.sockets = count_entries("/proc/self/fd", "socket:"),
                          .threads = count_entries("/proc/self/task", NULL)};
    p.listeners = count_listeners("/proc/self/net/tcp") + count_listeners("/proc/self/net/tcp6");
    FILE *f = fopen("/proc/self/statm", "r");
    long pages = 0, shared = 0; /* shared: code, and the test's own bootstrap area */
    if (!f || fscanf(f, "%*d %ld %ld", &pages, &shared) != 2) abort();
    fclose(f);
    p.resident_kib = (pages - shared) * (sysconf(_SC_PAGESIZE) / 1024);
    return p;
}

static void use_group(struct rank *rank, int index)
{
    enum { N = 20000 };
    static int64_t x[N];
    static const int orders[2][3] = {{0, 1, 2}, {2, 0, 1}};
    char name[32];
    snprintf(name, sizeof name, "group %d", index);
    gpubridge_comm *comm = rank_comm(rank, name, orders[index % 2], 3);
    uint64_t n = index % 5 == 0 ? N : 10;
    fill(x, n, rank->rank, index);
    finish(start_sum(comm, x, n));
    check_sum(x, n, orders[0], 3, index);
    rank_meet(rank);
    gpubridge_comm_destroy(comm);
}

static void churn_body(struct rank *rank)
{
    enum { GROUPS = 500, WARM = 100 };
    rank_open(rank);
    struct footprint warm = {0};
    for (int i = 0; i < GROUPS; i++) {
        if (i == WARM) {
            rank_meet(rank);
            warm = measure();
        }
        use_group(rank, i);
    }
    rank_meet(rank);
    struct footprint end = measure();
    if (rank->rank == 0)
        printf("500 groups: %d listeners, %d sockets, %d threads, %ld KiB after %d, %d, %d, %d, %ld KiB at the end\n",
               warm.listeners, warm.sockets, warm.threads, warm.resident_kib, WARM, end.listeners, end.sockets,
               end.threads, end.resident_kib);
    EXPECT(end.listeners == 1 && warm.listeners == 1, "%d listeners, one is enough", end.listeners);
    EXPECT(end.sockets == warm.sockets, "%d sockets were %d", end.sockets, warm.sockets);
    EXPECT(end.threads == warm.threads, "%d threads were %d", end.threads, warm.threads);
    /* A sanitizer keeps freed memory to itself. */
    EXPECT(SANITIZED || end.resident_kib <= warm.resident_kib + 1024, "%ld KiB resident were %ld", end.resident_kib,
           warm.resident_kib);
    rank_meet(rank);
    gpubridge_context_destroy(rank->context);
}

/* ---- threads that submit to two groups, in whatever order ---- */

struct worker {
    struct rank *rank;
    gpubridge_comm *comm;
    int first;
};

static const int everybody[] = {0, 1, 2, 3, 4, 5, 6, 7};

static void *worker_main(void *arg)
{
    enum { N = 30000, OPS = 60, AHEAD = 5 };
    struct worker *w = arg;
    int64_t *x = malloc(sizeof *x * AHEAD * N);
    gpubridge_request *requests[AHEAD] = {NULL};
    if (!x) abort();
    for (int op = 0; op < OPS + AHEAD; op++) {
        int slot = op % AHEAD;
        uint64_t n = op % 3 ? 100 : N;
        if (op >= AHEAD) {
            uint64_t before = (op - AHEAD) % 3 ? 100 : N;
            finish(requests[slot]);
            check_sum(x + slot * N, before, everybody, w->rank->size, w->first + op - AHEAD);
        }
        if (op >= OPS) continue;
        fill(x + slot * N, n, w->rank->rank, w->first + op);
        requests[slot] = start_sum(w->comm, x + slot * N, n);
    }
    free(x);
    return NULL;
}

/* Odd ranks have a thread per group, even ranks submit alternately from one thread, each starting with another group.
 */
static void threads_body(struct rank *rank)
{
    enum { OPS = 60, N = 30000 };
    static int64_t x[2 * OPS][N];
    rank_open(rank);
    gpubridge_comm *comms[2] = {rank_comm(rank, "first", NULL, 0), rank_comm(rank, "second", NULL, 0)};
    if (rank->rank % 2) {
        struct worker workers[2] = {{rank, comms[0], 1000}, {rank, comms[1], 2000}};
        pthread_t threads[2];
        for (int t = 0; t < 2; t++)
            if (pthread_create(&threads[t], NULL, worker_main, &workers[t])) abort();
        for (int t = 0; t < 2; t++) pthread_join(threads[t], NULL);
    } else {
        gpubridge_request *requests[2 * OPS];
        for (int k = 0; k < 2 * OPS; k++) {
            int g = (k + rank->rank / 2) % 2, op = k / 2;
            uint64_t n = op % 3 ? 100 : N;
            fill(x[k], n, rank->rank, (g + 1) * 1000 + op);
            requests[k] = start_sum(comms[g], x[k], n);
        }
        for (int k = 2 * OPS - 1; k >= 0; k--) {
            int g = (k + rank->rank / 2) % 2, op = k / 2;
            finish(requests[k]);
            check_sum(x[k], op % 3 ? 100 : N, everybody, rank->size, (g + 1) * 1000 + op);
        }
    }
    rank_meet(rank);
    gpubridge_comm_destroy(comms[1]);
    gpubridge_comm_destroy(comms[0]);
    gpubridge_context_destroy(rank->context);
}

/* ---- several vendor communicators are made at once, while other things go on ---- */

enum { FIRST_GROUPS = 4, FIRST_OPS = 4, SMALL = 10, LARGE = 5000, FIRST_TALK = 20 };

/* Of three ranks on each of two vendors: each but the first uses a communicator of its own on both. */
static const struct team first_teams[FIRST_GROUPS] = {
    {6, {0, 1, 2, 3, 4, 5}}, {4, {0, 1, 2, 3}}, {4, {5, 4, 3, 2}}, {4, {4, 5, 0, 1}}};

static uint64_t first_count(int op)
{
    return op % 2 ? LARGE : SMALL;
}

static gpubridge_request *submit(gpubridge_comm *comm, struct gpubridge_op op)
{
    gpubridge_request *request = NULL;
    op.struct_size = sizeof op;
    op.dtype = GPUBRIDGE_I64;
    EXPECT_OK(gpubridge_submit(comm, &op, &request));
    return request;
}

/* Small operations, one after the other, that the thread puts into the streams itself. */
static void *talk_main(void *arg)
{
    struct worker *w = arg;
    int64_t x[SMALL];
    for (int op = 0; op < FIRST_TALK; op++) {
        fill(x, SMALL, w->rank->rank, w->first + op);
        EXPECT_OK(gpubridge_all_reduce(w->comm, x, x, SMALL, GPUBRIDGE_I64, GPUBRIDGE_SUM, NULL, NULL));
        check_sum(x, SMALL, everybody, w->rank->size, w->first + op);
    }
    return NULL;
}

/* Sums of all groups, in another order on every rank; within a group small ones and ones for the vendor alternate. */
static void first_sums(struct rank *rank, gpubridge_comm *const *comms, int round)
{
    static int64_t x[FIRST_GROUPS][FIRST_OPS][LARGE];
    gpubridge_request *requests[FIRST_GROUPS][FIRST_OPS];
    for (int k = 0; k < FIRST_GROUPS; k++) {
        const int g = rank->rank % 2 ? (FIRST_GROUPS - 1 - k + round) % FIRST_GROUPS : (k + rank->rank) % FIRST_GROUPS;
        for (int op = 0; comms[g] && op < FIRST_OPS; op++) {
            const uint64_t n = first_count(op);
            fill(x[g][op], n, rank->rank, 10 * g + op);
            requests[g][op] = submit(comms[g], (struct gpubridge_op){.kind = GPUBRIDGE_ALL_REDUCE,
                                                                     .reduce_op = GPUBRIDGE_SUM,
                                                                     .send = x[g][op],
                                                                     .recv = x[g][op],
                                                                     .count = n,
                                                                     .flags = GPUBRIDGE_OP_URGENT});
        }
    }
    for (int g = 0; g < FIRST_GROUPS; g++)
        for (int op = 0; comms[g] && op < FIRST_OPS; op++) {
            finish(requests[g][op]);
            check_sum(x[g][op], first_count(op), first_teams[g].members, first_teams[g].count, 10 * g + op);
        }
}

/* A receive whose send comes after the sums, and a send whose receive does: neither may hold them up. */
static void first_round(struct rank *rank, gpubridge_comm *const *comms, gpubridge_comm *talk, int round)
{
    static int64_t in[LARGE], out[LARGE], late_in[LARGE], late_out[LARGE];
    const int next = (rank->rank + 1) % rank->size, before = (rank->rank + rank->size - 1) % rank->size;
    struct gpubridge_op send = {.kind = GPUBRIDGE_SEND, .root = next, .send = out, .count = LARGE};
    struct gpubridge_op recv = {.kind = GPUBRIDGE_RECV, .root = before, .recv = in, .count = LARGE, .tag = 1};
    struct worker worker = {rank, talk, 1000};
    pthread_t thread;
    fill(out, LARGE, rank->rank, round);
    fill(late_out, LARGE, rank->rank, round + 500);
    gpubridge_request *early[2] = {submit(comms[0], send), submit(comms[0], recv)};
    if (pthread_create(&thread, NULL, talk_main, &worker)) abort();
    first_sums(rank, comms, round);
    send.send = late_out, send.tag = 1;
    recv.recv = late_in, recv.tag = 0;
    gpubridge_request *late[2] = {submit(comms[0], send), submit(comms[0], recv)};
    for (int i = 0; i < 2; i++) finish(early[i]), finish(late[i]);
    check_sum(late_in, LARGE, &before, 1, round);
    check_sum(in, LARGE, &before, 1, round + 500);
    pthread_join(thread, NULL);
}

static void first_uses_body(struct rank *rank)
{
    const int rounds = SHORT ? 3 : 8;
    for (int round = 0; round < rounds; round++) {
        gpubridge_comm *comms[FIRST_GROUPS] = {NULL}, *talk = NULL;
        char name[32];
        rank_open(rank); /* knows of no vendor communicator */
        for (int g = 0; g < FIRST_GROUPS; g++) {
            snprintf(name, sizeof name, "round %d, group %d", round, g);
            const struct team *team = &first_teams[g];
            if (place_in(team, rank->rank) >= 0) comms[g] = rank_comm(rank, name, team->members, team->count);
        }
        snprintf(name, sizeof name, "round %d, talk", round);
        talk = rank_comm(rank, name, NULL, 0);
        first_round(rank, comms, talk, round);
        rank_meet(rank);
        for (int g = 0; g < FIRST_GROUPS; g++) gpubridge_comm_destroy(comms[g]);
        gpubridge_comm_destroy(talk);
        gpubridge_context_destroy(rank->context);
        rank_meet(rank);
    }
}

/* ---- requests that nobody waits for, and the completion queue ---- */

static void notify_body(struct rank *rank)
{
    enum { OPS = 400, N = 2000 };
    static int64_t x[OPS][N];
    static int seen[OPS];
    rank_open(rank);
    gpubridge_comm *comm = rank_comm(rank, "notify", NULL, 0);
    for (int k = 0; k < OPS; k++) {
        gpubridge_request *request = NULL;
        struct gpubridge_op op = {.struct_size = sizeof op,
                                  .kind = GPUBRIDGE_ALL_REDUCE,
                                  .dtype = GPUBRIDGE_I64,
                                  .reduce_op = GPUBRIDGE_SUM,
                                  .send = x[k],
                                  .recv = x[k],
                                  .count = k % 7 ? 20 : N,
                                  .flags = GPUBRIDGE_OP_NOTIFY,
                                  .user = (uint64_t)k};
        fill(x[k], op.count, rank->rank, k);
        EXPECT_OK(gpubridge_submit(comm, &op, &request));
        gpubridge_request_free(request);
    }
    for (int done = 0; done < OPS;) {
        uint64_t users[32];
        int32_t n = 0;
        EXPECT_OK(gpubridge_completions(rank->context, users, 32, 60 * S, &n));
        for (int i = 0; i < n; i++, done++) {
            EXPECT(users[i] < OPS && !seen[users[i]], "completion of %llu, which is not pending",
                   (unsigned long long)users[i]);
            seen[users[i]] = 1;
            check_sum(x[users[i]], users[i] % 7 ? 20 : N, everybody, rank->size, (int)users[i]);
        }
    }
    uint64_t user;
    int32_t n = 0;
    EXPECT(gpubridge_completions(rank->context, &user, 1, 1000000, &n) == GPUBRIDGE_AGAIN, "a completion too many");
    rank_meet(rank);
    gpubridge_comm_destroy(comm);
    gpubridge_context_destroy(rank->context);
}

static void *wait_for_completions(void *arg)
{
    uint64_t user;
    int32_t n;
    int rc = gpubridge_completions(arg, &user, 1, -1, &n);
    EXPECT(rc == GPUBRIDGE_ERR_DESTROYED, "a stopped queue gave %d", rc);
    return NULL;
}

static void stop_body(struct rank *rank)
{
    pthread_t threads[3];
    rank_open(rank);
    for (int t = 0; t < 3; t++)
        if (pthread_create(&threads[t], NULL, wait_for_completions, rank->context)) abort();
    gpubridge_completions_stop(rank->context);
    for (int t = 0; t < 3; t++) pthread_join(threads[t], NULL);
    gpubridge_context_destroy(rank->context);
}

int main(void)
{
    static const char *const six[] = {"a", "b", "a", "b", "a", "c"};
    static const char *const abc[] = {"a", "a", "b"};
    static const char *const aabb[] = {"a", "a", "b", "b"};
    int failed = ranks_run(6, six, NULL, 60, overlap_body, "overlapping groups");
    failed += ranks_run(3, abc, NULL, 120, churn_body, "500 groups");
    failed += ranks_run(4, aabb, NULL, 60, threads_body, "threads");
    failed += ranks_run(3, abc, NULL, 60, notify_body, "completion queue");
    failed += ranks_run(1, abc, NULL, 60, stop_body, "stopped queue");
    /* Device operations must come in one order on all ranks, whatever the order of submission. */
    static const char six_vendors[] = "GPUBRIDGE_EMULATE=cuda,hip,cuda,hip,cuda,hip\n";
    static const char vendors[] = "GPUBRIDGE_EMULATE=cuda,cuda,hip,hip\n";
    static const char no_gate[] = "GPUBRIDGE_EMULATE=cuda,cuda,hip,hip\nGPUBRIDGE_GATE=off\n";
    failed += ranks_run(6, NULL, six_vendors, 60, overlap_body, "overlapping groups of emulated GPUs");
    failed += ranks_run(6, NULL, six_vendors, 60, first_uses_body, "first uses of emulated GPUs");
    failed += ranks_run(4, NULL, vendors, 60, threads_body, "threads with emulated GPUs");
    failed += ranks_run(4, NULL, no_gate, 60, threads_body, "threads with emulated GPUs, gate off");
    failed += ranks_run(3, NULL, vendors, 60, notify_body, "completion queue of emulated GPUs");
    printf("%s\n", failed ? "FAILED" : "ok");
    return failed != 0;
}
