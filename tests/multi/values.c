/* SPDX-License-Identifier: Apache-2.0
 * The cases of values.h: what each operation reads, what it must write and what it must leave alone.  One thread. */
#include "values.h"

#include <string.h>

#define GUARD   64   /* bytes before and after a buffer */
#define GARBAGE 0xa5 /* what outputs hold before */

static const char *const kind_names[GPUBRIDGE_OP_KIND_COUNT] = {
    [GPUBRIDGE_ALL_REDUCE] = "ALL_REDUCE",
    [GPUBRIDGE_BROADCAST] = "BROADCAST",
    [GPUBRIDGE_REDUCE] = "REDUCE",
    [GPUBRIDGE_ALL_GATHER] = "ALL_GATHER",
    [GPUBRIDGE_REDUCE_SCATTER] = "REDUCE_SCATTER",
    [GPUBRIDGE_ALL_TO_ALL] = "ALL_TO_ALL",
    [GPUBRIDGE_GATHER] = "GATHER",
    [GPUBRIDGE_SCATTER] = "SCATTER",
};

static double distances[GPUBRIDGE_DTYPE_COUNT];

/* One rank's view of a case. */
struct view {
    const struct ref_layout *layout;
    const struct values_case *c;
    int me, size;
    size_t es;
    uint64_t in, out; /* elements */
    uint64_t shared;  /* in place: offset in elements of the smaller buffer inside the larger one */
    uint64_t blocks[REF_MAX_RANKS], rows[REF_MAX_RANKS][REF_MAX_RANKS]; /* rows[s][d]: from s to d */
};

static int reduces(int kind)
{
    return kind == GPUBRIDGE_ALL_REDUCE || kind == GPUBRIDGE_REDUCE || kind == GPUBRIDGE_REDUCE_SCATTER;
}

static int is_rooted(int kind)
{
    return kind == GPUBRIDGE_BROADCAST || kind == GPUBRIDGE_REDUCE || kind == GPUBRIDGE_GATHER ||
           kind == GPUBRIDGE_SCATTER;
}

static uint64_t sum_to(const uint64_t *counts, int n)
{
    uint64_t total = 0;
    for (int r = 0; r < n; r++) total += counts[r];
    return total;
}

/* Uneven: some blocks are empty.  Rows: one rank sends nothing, one gets nothing, the others differ. */
static void set_sizes(struct view *v)
{
    const struct values_case *c = v->c;
    int uneven = c->form & VALUES_UNEVEN ? 1 : 0, idle = (int)(c->seed % (uint64_t)v->size);
    for (int s = 0; s < v->size; s++) {
        v->blocks[s] = !uneven ? c->count : s == idle ? 0 : c->count / (uint64_t)(s + 1) + (uint64_t)s;
        for (int d = 0; d < v->size; d++) {
            uint64_t row = (s * 3 + d) % 4 == 1 ? 0 : c->count / (uint64_t)(d + 1) + (uint64_t)(s + 2 * d);
            v->rows[s][d] = !uneven ? c->count : s == idle || d == (idle + 1) % v->size ? 0 : row;
        }
    }
    int is_root = v->me == c->root;
    uint64_t own = v->blocks[v->me], all = sum_to(v->blocks, v->size), before = sum_to(v->blocks, v->me);
    v->in = v->out = c->count;
    switch (c->kind) {
    case GPUBRIDGE_BROADCAST:
        v->in = is_root ? c->count : 0;
        break;
    case GPUBRIDGE_REDUCE:
        v->out = is_root ? c->count : 0;
        break;
    case GPUBRIDGE_ALL_GATHER:
        v->in = own, v->out = all, v->shared = before;
        break;
    case GPUBRIDGE_REDUCE_SCATTER:
        v->in = all, v->out = own, v->shared = before;
        break;
    case GPUBRIDGE_ALL_TO_ALL:
        v->in = sum_to(v->rows[v->me], v->size), v->out = 0;
        for (int s = 0; s < v->size; s++) v->out += v->rows[s][v->me];
        break;
    case GPUBRIDGE_GATHER:
        v->out = is_root ? all : 0, v->shared = before;
        break;
    case GPUBRIDGE_SCATTER:
        v->in = is_root ? all : 0, v->shared = before;
        break;
    default:
        break;
    }
}

static void *need(size_t bytes)
{
    void *memory = malloc(bytes ? bytes : 1);
    if (!memory) abort();
    return memory;
}

/* The fold of all ranks' elements [first, first + count). */
static void want_reduced(const struct view *v, uint64_t first, uint64_t count, void *out)
{
    void *inputs[REF_MAX_RANKS];
    for (int r = 0; r < v->size; r++) {
        inputs[r] = need(count * v->es);
        ref_input(v->c->dtype, v->c->seed, r, first, count, inputs[r]);
    }
    ref_reduce(v->layout, v->c->dtype, v->c->op, 0.3, (const void *const *)inputs, count, out);
    if (v->c->op == GPUBRIDGE_SUM) {
        double distance = ref_distance(v->layout, v->c->dtype, (const void *const *)inputs, count, out);
        if (distance > distances[v->c->dtype]) distances[v->c->dtype] = distance;
    }
    for (int r = 0; r < v->size; r++) free(inputs[r]);
}

static void want(const struct view *v, char *out)
{
    const struct values_case *c = v->c;
    uint64_t at = 0;
    if (v->out == 0) return;
    switch (c->kind) {
    case GPUBRIDGE_ALL_REDUCE:
    case GPUBRIDGE_REDUCE:
        want_reduced(v, 0, c->count, out);
        break;
    case GPUBRIDGE_REDUCE_SCATTER:
        want_reduced(v, sum_to(v->blocks, v->me), v->out, out);
        break;
    case GPUBRIDGE_BROADCAST:
        ref_input(c->dtype, c->seed, c->root, 0, c->count, out);
        break;
    case GPUBRIDGE_SCATTER:
        ref_input(c->dtype, c->seed, c->root, (uint64_t)v->me * c->count, c->count, out);
        break;
    case GPUBRIDGE_ALL_GATHER:
    case GPUBRIDGE_GATHER:
        for (int r = 0; r < v->size; at += v->blocks[r++])
            ref_input(c->dtype, c->seed, r, 0, v->blocks[r], out + at * v->es);
        break;
    default:
        for (int s = 0; s < v->size; at += v->rows[s++][v->me])
            ref_input(c->dtype, c->seed, s, sum_to(v->rows[s], v->me), v->rows[s][v->me], out + at * v->es);
        break;
    }
}

/* ---- memory with guards ---- */

struct buffer {
    char *memory, *data;
    size_t bytes;
};

/* Aligned to nothing but the element, as a slice of a tensor may be. */
static struct buffer buffer_new(size_t bytes, size_t shift)
{
    struct buffer b = {.memory = need(bytes + shift + 2 * GUARD), .bytes = bytes};
    b.data = b.memory + GUARD + shift;
    memset(b.memory, GARBAGE, bytes + shift + 2 * GUARD);
    return b;
}

static int all_garbage(const char *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)p[i] != GARBAGE) return 0;
    return 1;
}

static void case_text(const struct view *v, char *text, size_t capacity)
{
    const struct values_case *c = v->c;
    snprintf(text, capacity, "%s: rank %d: %s %s%s%s x %llu root %d%s%s seed %llu", v->layout->name, v->me,
             kind_names[c->kind], reduces(c->kind) ? ref_op_name(c->op) : "", reduces(c->kind) ? " " : "",
             ref_dtype_name(c->dtype), (unsigned long long)c->count, c->root,
             c->form & VALUES_IN_PLACE ? " in place" : "", c->form & VALUES_UNEVEN ? " uneven" : "",
             (unsigned long long)c->seed);
}

static void compare(const struct view *v, const char *got, const char *wanted)
{
    size_t bytes = v->out * v->es, i = 0;
    char text[256], a[40], b[40];
    if (memcmp(got, wanted, bytes) == 0) return;
    while (got[i] == wanted[i]) i++;
    i = i / v->es;
    for (size_t k = 0; k < v->es; k++) {
        snprintf(a + 2 * k, 3, "%02x", (unsigned char)got[i * v->es + v->es - 1 - k]);
        snprintf(b + 2 * k, 3, "%02x", (unsigned char)wanted[i * v->es + v->es - 1 - k]);
    }
    case_text(v, text, sizeof text);
    fprintf(stderr, "%s: element %zu of %llu is 0x%s, expected 0x%s\n", text, i, (unsigned long long)v->out, a, b);
    exit(1);
}

/* ---- running ---- */

static void submit(gpubridge_comm *comm, const struct view *v, const void *send, void *recv)
{
    const struct values_case *c = v->c;
    uint64_t recv_counts[REF_MAX_RANKS];
    for (int s = 0; s < v->size; s++) recv_counts[s] = v->rows[s][v->me];
    struct gpubridge_op op = {.struct_size = sizeof op,
                              .kind = c->kind,
                              .dtype = c->dtype,
                              .reduce_op = c->op,
                              .root = c->root,
                              .send = send,
                              .recv = recv,
                              .count = c->count,
                              .factor = 0.3};
    if (c->form & VALUES_UNEVEN) {
        if (c->kind == GPUBRIDGE_ALL_GATHER) op.recv_counts = v->blocks;
        if (c->kind == GPUBRIDGE_REDUCE_SCATTER) op.send_counts = v->blocks;
        if (c->kind == GPUBRIDGE_ALL_TO_ALL) op.send_counts = v->rows[v->me], op.recv_counts = recv_counts;
    }
    char text[256];
    case_text(v, text, sizeof text);
    if (c->seed & 1) {
        EXPECT(gpubridge_run(comm, &op) == 0, "%s", text);
        return;
    }
    gpubridge_request *request = NULL;
    EXPECT(gpubridge_submit(comm, &op, &request) == 0, "%s", text);
    EXPECT(gpubridge_request_wait(request, 0) == 0, "%s", text);
    gpubridge_request_free(request);
}

void values_run_case(gpubridge_comm *comm, const struct ref_layout *layout, int me, const struct values_case *c)
{
    struct view v = {.layout = layout, .c = c, .me = me, .size = layout->size, .es = ref_dtype_bytes(c->dtype)};
    set_sizes(&v);
    size_t shift = v.es * (c->seed % 3);
    int in_place = c->form & VALUES_IN_PLACE && v.in && v.out;
    uint64_t larger = v.in > v.out ? v.in : v.out;
    struct buffer recv = buffer_new((in_place ? larger : v.out) * v.es, shift);
    struct buffer send = in_place ? recv : buffer_new(v.in * v.es, shift);
    char *in = send.data, *out = recv.data;
    if (in_place && v.in < v.out) in += v.shared * v.es;
    if (in_place && v.out < v.in) out += v.shared * v.es;
    ref_input(c->dtype, c->seed, me, 0, v.in, in);

    submit(comm, &v, v.in ? in : NULL, v.out ? out : NULL);

    char *wanted = need(v.out * v.es), text[256];
    want(&v, wanted);
    compare(&v, out, wanted);
    case_text(&v, text, sizeof text);
    EXPECT(all_garbage(recv.memory, GUARD) && all_garbage(recv.data + recv.bytes, GUARD),
           "wrote outside the output: %s", text);
    if (!in_place) {
        char *before = need(send.bytes);
        ref_input(c->dtype, c->seed, me, 0, v.in, before);
        EXPECT(memcmp(send.data, before, send.bytes) == 0, "changed the input: %s", text);
        EXPECT(all_garbage(send.memory, GUARD) && all_garbage(send.data + send.bytes, GUARD),
               "wrote beside the input: %s", text);
        free(before);
        free(send.memory);
    }
    free(wanted);
    free(recv.memory);
}

static const int kinds[] = {GPUBRIDGE_ALL_REDUCE, GPUBRIDGE_REDUCE,     GPUBRIDGE_REDUCE_SCATTER, GPUBRIDGE_BROADCAST,
                            GPUBRIDGE_ALL_GATHER, GPUBRIDGE_ALL_TO_ALL, GPUBRIDGE_GATHER,         GPUBRIDGE_SCATTER};

static int has_form(int kind, unsigned form)
{
    if (form & VALUES_IN_PLACE && kind == GPUBRIDGE_ALL_TO_ALL) return 0;
    return !(form & VALUES_UNEVEN) || kind == GPUBRIDGE_ALL_GATHER || kind == GPUBRIDGE_REDUCE_SCATTER ||
           kind == GPUBRIDGE_ALL_TO_ALL;
}

struct progress {
    const struct values_plan *plan;
    gpubridge_comm *comm;
    int me;
    uint64_t number, items, ran;
};

static void run_one(struct progress *p, struct values_case c)
{
    c.seed = p->number;
    values_run_case(p->comm, p->plan->layout, p->me, &c);
    p->ran++;
}

/* One kind, dtype and op: all counts, forms and roots.  The large count takes one form and root, another with each
 * item. */
static void run_item(struct progress *p, struct values_case c)
{
    const struct values_plan *plan = p->plan;
    int roots = is_rooted(c.kind) ? plan->layout->size : 1;
    struct values_case forms[4 * REF_MAX_RANKS];
    uint64_t nforms = 0, item = p->items++;
    for (c.form = 0; c.form < 4; c.form++)
        for (c.root = 0; c.root < roots && has_form(c.kind, c.form); c.root++) forms[nforms++] = c;
    for (size_t n = 0; n < plan->ncounts; n++)
        for (uint64_t f = 0; f < nforms; f++) {
            forms[f].count = plan->counts[n];
            if (p->number++ % plan->stride == 0) run_one(p, forms[f]);
        }
    if (!plan->large || item % plan->large_stride) return;
    c = forms[item / plan->large_stride % nforms];
    c.count = plan->large;
    run_one(p, c);
}

uint64_t values_run(struct rank *rank, gpubridge_comm *comm, const struct values_plan *plan)
{
    struct progress p = {.plan = plan, .comm = comm, .me = rank->rank};
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
        for (int dtype = 0; dtype < GPUBRIDGE_DTYPE_COUNT; dtype++) {
            struct values_case c = {.kind = kinds[k], .dtype = dtype};
            if (!reduces(c.kind)) run_item(&p, c);
            for (c.op = 0; reduces(c.kind) && c.op < GPUBRIDGE_REDUCE_OP_COUNT; c.op++)
                if (ref_supported(dtype, c.op)) run_item(&p, c);
        }
    return p.ran;
}

void values_print_distances(const char *what)
{
    printf("%s: largest |result - double sum| / sum of |inputs|:", what);
    for (int d = 0; d < GPUBRIDGE_DTYPE_COUNT; d++)
        if (distances[d] > 0) printf(" %s %.3g", ref_dtype_name(d), distances[d]);
    printf("\n");
}
