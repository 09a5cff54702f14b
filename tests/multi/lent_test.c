/* SPDX-License-Identifier: Apache-2.0
 * Messages between GPUs of one host that no processor copies: results by value, and the links' own counts, which show
 * that the payload stayed out of every lane and was read where its sender had it; the setting that turns it off; a
 * device that cannot register the memory of others; a rank killed while others read its memory and it reads theirs. */
#include "ranks.h"
#include "sanitized.h"

#include "comm/context.h"

#include <dirent.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#define S     1000000000ll
#define COUNT (SANITIZED ? 1u << 18 : 1u << 20)
#define BYTES ((uint64_t)COUNT * sizeof(float))

static const char *layout; /* of the case */
static int expects_loans;

struct traffic {
    uint64_t sent, lent, borrowed;
};

/* Engine role: the links are read there. */
struct reading {
    gpubridge_context *context;
    gpubridge_comm *comm;
    struct traffic sum;
};

static void read_links(void *arg)
{
    struct reading *r = arg;
    for (uint32_t k = 0; k < r->comm->group.size; k++) {
        struct gb_link_counters c;
        if (!r->comm->group.links[k]) continue;
        gb_link_counters(r->comm->group.links[k], &c);
        r->sum.sent += c.sent_bytes;
        r->sum.lent += c.lent_bytes;
        r->sum.borrowed += c.borrowed_bytes;
    }
}

static struct traffic traffic(struct rank *rank, gpubridge_comm *comm)
{
    struct reading reading = {.context = rank->context, .comm = comm};
    gb_engine_call(rank->context->engine, read_links, &reading);
    return reading.sum;
}

/* What collectives sent to other islands; sends and receives are not counted there. */
static uint64_t bridged(gpubridge_comm *comm)
{
    struct gpubridge_comm_stats stats = {.struct_size = sizeof stats};
    EXPECT_OK(gpubridge_comm_stats(comm, &stats));
    return stats.bridge_sent_bytes;
}

/* One all_reduce whose every value says who took part in it and where it stands. */
static void reduce(struct rank *rank, gpubridge_comm *comm, float *x)
{
    const uint32_t n = (uint32_t)rank->size;
    for (uint32_t i = 0; i < COUNT; i++) x[i] = (float)(i % 1000) + 1000.0f * (float)rank->rank;
    EXPECT_OK(gpubridge_all_reduce(comm, x, x, COUNT, GPUBRIDGE_F32, GPUBRIDGE_SUM, NULL, NULL));
    for (uint32_t i = 0; i < COUNT; i++) {
        const float want = (float)(n * (i % 1000)) + 1000.0f * (float)(n * (n - 1) / 2);
        EXPECT(x[i] == want, "%s: element %u is %g, not %g", layout, i, (double)x[i], (double)want);
    }
}

/* The ring: everybody to the next, from the one before. */
static void pass_on(struct rank *rank, gpubridge_comm *comm, float *x, float *y)
{
    const int next = (rank->rank + 1) % rank->size, before = (rank->rank + rank->size - 1) % rank->size;
    struct gpubridge_op send = {.struct_size = sizeof send,
                                .kind = GPUBRIDGE_SEND,
                                .dtype = GPUBRIDGE_F32,
                                .root = next,
                                .send = x,
                                .count = COUNT};
    struct gpubridge_op recv = {.struct_size = sizeof recv,
                                .kind = GPUBRIDGE_RECV,
                                .dtype = GPUBRIDGE_F32,
                                .root = before,
                                .recv = y,
                                .count = COUNT};
    gpubridge_request *sent, *got;
    for (uint32_t i = 0; i < COUNT; i++) x[i] = (float)(i + (uint32_t)rank->rank), y[i] = -1;
    EXPECT_OK(gpubridge_submit(comm, &send, &sent));
    EXPECT_OK(gpubridge_submit(comm, &recv, &got));
    EXPECT_OK(gpubridge_request_wait(got, 0));
    EXPECT_OK(gpubridge_request_wait(sent, 0));
    gpubridge_request_free(sent);
    gpubridge_request_free(got);
    for (uint32_t i = 0; i < COUNT; i++)
        EXPECT(y[i] == (float)(i + (uint32_t)before), "%s: element %u from rank %d is %g", layout, i, before,
               (double)y[i]);
}

/* Many in flight, of two plans: their staging moves about, so places that were guessed from earlier operations are
 * wrong. */
static void crowd(struct rank *rank, gpubridge_comm *comm, float *x)
{
    enum { N = 7 };
    const uint32_t part = COUNT / N, n = (uint32_t)rank->size;
    gpubridge_request *requests[N];
    for (uint32_t i = 0; i < COUNT; i++) x[i] = (float)(i % 4096 + (uint32_t)rank->rank);
    for (uint32_t k = 0; k < N; k++) {
        float *at = x + (size_t)k * part;
        struct gpubridge_op op = {.struct_size = sizeof op,
                                  .kind = GPUBRIDGE_ALL_REDUCE,
                                  .dtype = GPUBRIDGE_F32,
                                  .reduce_op = GPUBRIDGE_SUM,
                                  .send = at,
                                  .recv = at,
                                  .count = k % 3 ? part : part - 5000};
        EXPECT_OK(gpubridge_submit(comm, &op, &requests[k]));
    }
    for (uint32_t k = 0; k < N; k++) {
        EXPECT_OK(gpubridge_request_wait(requests[k], 0));
        gpubridge_request_free(requests[k]);
    }
    for (uint32_t i = 0; i < N * part; i++) {
        const int is_summed = i / part % 3 || i % part < part - 5000;
        const uint32_t want = is_summed ? n * (i % 4096) + n * (n - 1) / 2 : i % 4096 + (uint32_t)rank->rank;
        EXPECT(x[i] == (float)want, "%s: element %u of many is %g, not %u", layout, i, (double)x[i], want);
    }
}

/* The first operations make the memory that is shared and are copied; how many depends on who is slow. */
static void warm_up(struct rank *rank, gpubridge_comm *comm, float *x, float *y)
{
    const double end = now_s() + 20;
    uint64_t *words = rank_words(rank);
    for (int all = 0; !all;) {
        const struct traffic before = traffic(rank, comm);
        const uint64_t sent = bridged(comm);
        reduce(rank, comm, x);
        pass_on(rank, comm, x, y);
        const struct traffic after = traffic(rank, comm);
        words[rank->rank] = after.lent - before.lent == bridged(comm) - sent + BYTES;
        rank_meet(rank);
        all = 1;
        for (int r = 0; r < rank->size; r++) all &= words[r] != 0;
        rank_meet(rank);
        EXPECT(all || now_s() < end, "%s: messages are still copied after 20 s", layout);
    }
}

static void measure(struct rank *rank)
{
    float *x = malloc(BYTES), *y = malloc(BYTES);
    if (!x || !y) abort();
    rank_open(rank);
    gpubridge_comm *comm = rank_comm(rank, "lent", NULL, 0);
    if (expects_loans)
        warm_up(rank, comm, x, y);
    else
        reduce(rank, comm, x);
    for (int i = 0; i < 4; i++) {
        reduce(rank, comm, x);
        crowd(rank, comm, x);
    }
    if (expects_loans) warm_up(rank, comm, x, y); /* the crowd may have made new memory */
    rank_meet(rank);
    const struct traffic before = traffic(rank, comm);
    const uint64_t moved = bridged(comm);
    for (int i = 0; i < 3; i++) {
        reduce(rank, comm, x);
        pass_on(rank, comm, x, y);
    }
    rank_meet(rank);
    const struct traffic after = traffic(rank, comm);
    const uint64_t payload = bridged(comm) - moved + 3 * BYTES, lanes = after.sent - before.sent;
    EXPECT(payload > 3 * BYTES, "%s: only %llu bytes of payload", layout, (unsigned long long)payload);
    if (expects_loans) {
        EXPECT(after.lent - before.lent == payload, "%s: %llu of %llu bytes were lent", layout,
               (unsigned long long)(after.lent - before.lent), (unsigned long long)payload);
        EXPECT(after.borrowed > before.borrowed, "%s: nothing was borrowed", layout);
        EXPECT(lanes < payload / 50, "%s: %llu bytes went through the lanes for %llu of payload", layout,
               (unsigned long long)lanes, (unsigned long long)payload);
    } else {
        EXPECT(after.lent == 0 && after.borrowed == 0, "%s: something was lent", layout);
        EXPECT(lanes >= payload, "%s: %llu bytes through the lanes for %llu of payload", layout,
               (unsigned long long)lanes, (unsigned long long)payload);
    }
    if (rank->rank == 0)
        printf("%s: payload %llu, lent %llu, through lanes %llu bytes\n", layout, (unsigned long long)payload,
               (unsigned long long)(after.lent - before.lent), (unsigned long long)lanes);
    gpubridge_comm_destroy(comm);
    gpubridge_context_destroy(rank->context);
    free(x);
    free(y);
}

/* ---- many groups ---- */

static int count_lines(const char *path, const char *words)
{
    char line[512];
    FILE *file = fopen(path, "r");
    int n = 0;
    if (!file) abort();
    while (fgets(line, sizeof line, file)) n += strstr(line, words) != NULL;
    fclose(file);
    return n;
}

static int count_fds(void)
{
    DIR *dir = opendir("/proc/self/fd");
    int n = 0;
    if (!dir) abort();
    while (readdir(dir)) n++;
    closedir(dir);
    return n;
}

/* The memory and its registration belong to the link, not to a group: groups come and go and share it. */
static void many_groups(struct rank *rank)
{
    enum { GROUPS = SANITIZED ? 20 : 500 };
    float *x = malloc(BYTES), *y = malloc(BYTES);
    if (!x || !y) abort();
    rank_open(rank);
    gpubridge_comm *world = rank_comm(rank, "world", NULL, 0);
    warm_up(rank, world, x, y);
    const struct traffic before = traffic(rank, world);
    const int maps = count_lines("/proc/self/maps", "gpubridge-staging"), fds = count_fds();
    for (int g = 0; g < GROUPS; g++) {
        char name[32];
        snprintf(name, sizeof name, "group %d", g);
        gpubridge_comm *comm = rank_comm(rank, name, NULL, 0);
        for (uint32_t i = 0; i < 10000; i++) x[i] = (float)(i + (uint32_t)rank->rank);
        EXPECT_OK(gpubridge_all_reduce(comm, x, x, 10000, GPUBRIDGE_F32, GPUBRIDGE_SUM, NULL, NULL));
        for (uint32_t i = 0; i < 10000; i++) EXPECT(x[i] == (float)(2 * i + 1), "%s: element %u", name, i);
        gpubridge_comm_destroy(comm);
    }
    const struct traffic after = traffic(rank, world);
    EXPECT(after.lent - before.lent >= GROUPS * 40000ull, "only %llu bytes were lent in %d groups",
           (unsigned long long)(after.lent - before.lent), GROUPS);
    EXPECT(maps > 0 && count_lines("/proc/self/maps", "gpubridge-staging") == maps, "%d mappings, there were %d",
           count_lines("/proc/self/maps", "gpubridge-staging"), maps);
    EXPECT(count_fds() == fds, "%d descriptors, there were %d", count_fds(), fds);
    if (rank->rank == 0) printf("%d groups: %d descriptors, %d mappings of staging throughout\n", GROUPS, fds, maps);
    gpubridge_comm_destroy(world);
    gpubridge_context_destroy(rank->context);
    EXPECT(count_lines("/proc/self/maps", "gpubridge-staging") == 0, "staging is still mapped after the end");
    free(x);
    free(y);
}

/* ---- death ---- */

static void die_reading(struct rank *rank)
{
    float *x = malloc(BYTES), *y = malloc(BYTES);
    if (!x || !y) abort();
    rank_open(rank);
    gpubridge_comm *comm = rank_comm(rank, "doomed", NULL, 0);
    warm_up(rank, comm, x, y);
    int rc = 0;
    double start = now_s();
    if (rank->rank == 1) {
        /* In the midst of an operation: the other thread of this process is. */
        struct gpubridge_op op = {.struct_size = sizeof op,
                                  .kind = GPUBRIDGE_ALL_REDUCE,
                                  .dtype = GPUBRIDGE_F32,
                                  .reduce_op = GPUBRIDGE_SUM,
                                  .send = x,
                                  .recv = x,
                                  .count = COUNT};
        gpubridge_request *request;
        uint32_t rounds = (uint32_t)getpid() % 5;
        for (uint32_t i = 0; i < rounds; i++)
            EXPECT_OK(gpubridge_all_reduce(comm, x, x, COUNT, GPUBRIDGE_F32, GPUBRIDGE_SUM, NULL, NULL));
        EXPECT_OK(gpubridge_submit(comm, &op, &request));
        for (volatile uint32_t spin = (uint32_t)getpid() % 97 * 3000; spin > 0; spin--) {
        }
        kill(getpid(), SIGKILL);
    }
    while (!rc && now_s() - start < 15)
        rc = gpubridge_all_reduce(comm, x, x, COUNT, GPUBRIDGE_F32, GPUBRIDGE_SUM, NULL, NULL);
    EXPECT(rc == GPUBRIDGE_ERR_PEER_LOST, "%s: the death of rank 1 gave %d", layout, rc);
    EXPECT(strstr(gpubridge_last_error(), "rank 1"), "%s: the death is not named", layout);
    gpubridge_comm_destroy(comm);
    int rest[8], n = 0;
    for (int r = 0; r < rank->size; r++)
        if (r != 1) rest[n++] = r;
    if (n > 1) {
        comm = rank_comm(rank, "rest", rest, n);
        float mine = (float)rank->rank;
        EXPECT_OK(gpubridge_all_reduce(comm, &mine, &mine, 1, GPUBRIDGE_F32, GPUBRIDGE_SUM, NULL, NULL));
        gpubridge_comm_destroy(comm);
    }
    gpubridge_context_destroy(rank->context);
    free(x);
    free(y);
}

static const struct {
    const char *name;
    int size;
    const char *settings;
} layouts[] = {
    {"cuda 1 + hip 1", 2, "GPUBRIDGE_EMULATE=cuda,hip\n"},
    {"cuda 1 + cuda 1", 2, "GPUBRIDGE_EMULATE=cuda\nGPUBRIDGE_ISLAND=x,y\n"},
    {"cuda 2 + hip 2", 4, "GPUBRIDGE_EMULATE=cuda,cuda,hip,hip\n"},
    {"cuda 3 + hip 1", 4, "GPUBRIDGE_EMULATE=cuda,cuda,cuda,hip\n"},
    {"three islands", 3, "GPUBRIDGE_EMULATE=cuda,hip,cuda\nGPUBRIDGE_ISLAND=x,y,z\n"},
};

static int run(size_t i, const char *more, int loans, int limit_s)
{
    char settings[400];
    layout = layouts[i].name;
    expects_loans = loans;
    snprintf(settings, sizeof settings, "GPUBRIDGE_HOST_BYTES=0\n%s%s", layouts[i].settings, more);
    return ranks_run(layouts[i].size, NULL, settings, limit_s, measure, layout);
}

int main(int argc, char **argv)
{
    const size_t n = sizeof layouts / sizeof *layouts;
    const int deaths = argc > 1 ? atoi(argv[1]) : SANITIZED ? 2 : 6;
    int failed = 0;
    for (size_t i = 0; i < n; i++) failed += run(i, "", 1, 120);
    failed += run(1, "GPUBRIDGE_GATE=off\n", 1, 120);
    failed += run(1, "GPUBRIDGE_CHUNK_BYTES=64K\n", 1, 120);
    /* What cannot, or may not, be lent is copied. */
    failed += run(0, "GPUBRIDGE_SHARED_STAGING=off\n", 0, 120);
    failed += run(0, "GPUBRIDGE_CHECKSUM=on\n", 0, 120);
    failed += run(0, "GPUBRIDGE_TRANSPORT=tcp\n", 0, 120);
    setenv("GBEMU_FAIL", "hipHostRegister:0:1", 1);
    failed += run(0, "", 0, 120);
    unsetenv("GBEMU_FAIL");
    layout = "many groups";
    failed += ranks_run(2, NULL, "GPUBRIDGE_HOST_BYTES=0\nGPUBRIDGE_EMULATE=cuda,hip\n", 120, many_groups, layout);
    for (int k = 0; k < deaths; k++) {
        char settings[400];
        const size_t i = (size_t)k % n;
        layout = layouts[i].name;
        expects_loans = 1;
        snprintf(settings, sizeof settings, "GPUBRIDGE_HOST_BYTES=0\nGPUBRIDGE_CHUNK_BYTES=64K\n%s",
                 layouts[i].settings);
        failed += ranks_run_victim(layouts[i].size, NULL, settings, 60, die_reading, 1, layout);
    }
    printf("%s\n", failed ? "FAILED" : "ok");
    return failed != 0;
}
