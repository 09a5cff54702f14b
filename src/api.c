/* SPDX-License-Identifier: Apache-2.0
 * The exported functions of gpubridge.h that are not a comm's or a context's making: checks, then one call down. */
#include "base/log.h"
#include "base/status.h"
#include "comm/context.h"

#include <stdio.h>
#include <string.h>

int gpubridge_abi(void)
{
    return GPUBRIDGE_ABI;
}

const char *gpubridge_version(void)
{
    return GB_VERSION;
}

const char *gpubridge_strerror(int status)
{
    return gb_status_text(status);
}

const char *gpubridge_last_error(void)
{
    return gb_err_text();
}

void gpubridge_log_sink(void (*sink)(void *arg, int level, const char *line), void *arg)
{
    gb_log_set_sink(sink, arg);
}

int gpubridge_setting_info(int index, const char **name, const char **type, const char **value, const char **help)
{
    const struct gb_setting *row = gb_settings_row(index);
    if (!row) return GB_FAIL(GPUBRIDGE_ERR_INVALID, "there is no setting number %d", index);
    *name = row->name;
    *type = row->type;
    *value = row->value;
    *help = row->help;
    return 0;
}

void gpubridge_comm_set_timeout(gpubridge_comm *comm, int64_t timeout_ns)
{
    if (!comm || timeout_ns <= 0) return;
    pthread_mutex_lock(&comm->group.submit_lock);
    comm->group.timeout_ns = timeout_ns;
    pthread_mutex_unlock(&comm->group.submit_lock);
}

int gpubridge_comm_status(gpubridge_comm *comm)
{
    if (!comm) return GB_FAIL(GPUBRIDGE_ERR_INVALID, "the comm is NULL");
    int status = atomic_load_explicit(&comm->group.status, memory_order_acquire);
    return status ? GB_FAIL(status, "%s", comm->group.status_text) : 0;
}

static size_t append(char *text, size_t capacity, size_t at, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
static size_t append(char *text, size_t capacity, size_t at, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(at < capacity ? text + at : NULL, at < capacity ? capacity - at : 0, fmt, ap);
    va_end(ap);
    return at + (n > 0 ? (size_t)n : 0);
}

size_t gpubridge_comm_describe(gpubridge_comm *comm, char *text, size_t capacity)
{
    const struct gb_topo *topo = comm->group.topo;
    size_t at =
        append(text, capacity, 0, "group %s: %u ranks, %u islands\n", comm->group.name, topo->nranks, topo->nislands);
    at = append(text, capacity, at, "compression: %s%s", gb_codec_name(comm->group.codec),
                comm->settings.compression == GB_COMPRESSION_AUTO ? " (auto)" : "");
    if (comm->group.codec_is_random)
        at = append(text, capacity, at, ", rounded stochastically with seed %llu",
                    (unsigned long long)comm->group.codec_seed);
    at = append(text, capacity, at, "\n");
    for (uint32_t i = 0; i < topo->nislands; i++) {
        const struct gb_member_hello *first = &comm->members[topo->members[topo->island_first[i]]].hello;
        at = append(text, capacity, at, "island %u (%s%s%s%s):", i, first->island,
                    first->flags & GB_MEMBER_EMULATED ? ", emulated" : "", first->ccl[0] ? ", " : "", first->ccl);
        for (uint32_t m = topo->island_first[i]; m < topo->island_first[i + 1]; m++)
            at = append(text, capacity, at, " %u", topo->members[m]);
        at = append(text, capacity, at, "\n");
    }
    for (uint32_t r = 0; r < comm->group.size; r++) {
        char link[160];
        if (!comm->group.links[r]) continue;
        gb_link_describe(comm->group.links[r], link, sizeof link);
        at = append(text, capacity, at, "%s: %s\n", comm->group.labels[r], link);
    }
    return at;
}

int gpubridge_comm_stats(gpubridge_comm *comm, struct gpubridge_comm_stats *stats)
{
    if (!comm || !stats || stats->struct_size != sizeof *stats)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "pass a comm and a struct gpubridge_comm_stats with struct_size = %zu",
                       sizeof *stats);
    struct gb_group_counters *c = &comm->group.counters;
    *stats = (struct gpubridge_comm_stats){
        .struct_size = sizeof *stats,
        .ops = atomic_load(&c->ops),
        .bridge_sent_bytes = atomic_load(&c->bridge_sent),
        .bridge_recv_bytes = atomic_load(&c->bridge_recv),
        .island_sent_bytes = atomic_load(&c->island_sent),
        .payload_bytes = atomic_load(&c->payload),
        .total_ns = atomic_load(&c->total_ns),
        .island_ns = atomic_load(&c->island_ns),
        .bridge_ns = atomic_load(&c->bridge_ns),
        .wait_ns = atomic_load(&c->wait_ns),
        .compute_ns = atomic_load(&c->compute_ns),
    };
    return 0;
}

int gpubridge_comm_codec_stats(gpubridge_comm *comm, int32_t kind, int32_t codec, struct gpubridge_codec_stats *stats)
{
    if (!comm || !stats || stats->struct_size != sizeof *stats)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "pass a comm and a struct gpubridge_codec_stats with struct_size = %zu",
                       sizeof *stats);
    if (kind < 0 || kind >= GB_CODED_KINDS || codec < GPUBRIDGE_CODEC_NONE || codec >= GPUBRIDGE_CODEC_COUNT)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "codecs are counted for kinds 0 to %d and codecs %d to %d, not %d and %d",
                       GB_CODED_KINDS - 1, GPUBRIDGE_CODEC_NONE, GPUBRIDGE_CODEC_COUNT - 1, kind, codec);
    pthread_mutex_lock(&comm->group.coded_lock);
    const struct gb_coded c = comm->group.coded[kind][codec - GPUBRIDGE_CODEC_NONE];
    pthread_mutex_unlock(&comm->group.coded_lock);
    *stats = (struct gpubridge_codec_stats){.struct_size = sizeof *stats,
                                            .ops = c.ops,
                                            .in_bytes = c.in_bytes,
                                            .wire_bytes = c.wire_bytes,
                                            .blocks = c.blocks,
                                            .saturated_blocks = c.saturated,
                                            .not_finite_values = c.not_finite,
                                            .not_finite_rank = c.has_first ? c.first_rank : -1,
                                            .not_finite_seq = c.first_seq,
                                            .sampled_values = c.samples,
                                            .signal = c.signal,
                                            .noise = c.noise};
    return 0;
}

/* ---- operations ---- */

static struct gb_op *op_of(gpubridge_request *request)
{
    return (struct gb_op *)(void *)request;
}

static int submit(gpubridge_comm *comm, const struct gpubridge_op *op, int run, struct gb_op **out)
{
    if (!comm || !op) return GB_FAIL(GPUBRIDGE_ERR_INVALID, "the comm or the operation is NULL");
    GB_TRY(gb_context_check(comm->context));
    return gb_engine_submit(&comm->group, op, run, out);
}

int gpubridge_submit(gpubridge_comm *comm, const struct gpubridge_op *op, gpubridge_request **request)
{
    struct gb_op *made = NULL;
    GB_TRY(submit(comm, op, 0, &made));
    *request = (gpubridge_request *)(void *)made;
    return 0;
}

int gpubridge_run(gpubridge_comm *comm, const struct gpubridge_op *op)
{
    struct gb_op *made = NULL;
    GB_TRY(submit(comm, op, 1, &made));
    int rc = gb_engine_wait(made, 0);
    gb_op_put(made);
    return rc;
}

int gpubridge_run_for(gpubridge_comm *comm, const struct gpubridge_op *op, int64_t wait_ns, gpubridge_request **request)
{
    struct gb_op *made = NULL;
    *request = NULL;
    GB_TRY(submit(comm, op, 1, &made));
    int rc = gb_engine_wait(made, wait_ns);
    if (rc == GPUBRIDGE_AGAIN)
        *request = (gpubridge_request *)(void *)made;
    else
        gb_op_put(made);
    return rc;
}

int gpubridge_request_wait(gpubridge_request *request, int64_t timeout_ns)
{
    if (!request) return GB_FAIL(GPUBRIDGE_ERR_INVALID, "the request is NULL");
    return gb_engine_wait(op_of(request), timeout_ns);
}

int gpubridge_request_test(gpubridge_request *request)
{
    if (!request) return GB_FAIL(GPUBRIDGE_ERR_INVALID, "the request is NULL");
    return gb_op_test(op_of(request));
}

int gpubridge_request_wait_stream(gpubridge_request *request, void *stream)
{
    if (!request) return GB_FAIL(GPUBRIDGE_ERR_INVALID, "the request is NULL");
    return gb_engine_wait_stream(op_of(request), stream);
}

size_t gpubridge_request_describe(gpubridge_request *request, char *text, size_t capacity)
{
    char words[480] = "";
    if (request) gb_engine_describe(op_of(request), words, sizeof words);
    if (capacity) snprintf(text, capacity, "%s", words);
    return strlen(words);
}

int gpubridge_request_source(gpubridge_request *request, int32_t *rank)
{
    if (!request || gb_op_test(op_of(request)) == GPUBRIDGE_AGAIN)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "the request is NULL or has not completed");
    *rank = op_of(request)->source;
    return 0;
}

void gpubridge_request_free(gpubridge_request *request)
{
    gb_op_put(op_of(request));
}

int gpubridge_completions(gpubridge_context *context, uint64_t *users, int32_t capacity, int64_t timeout_ns,
                          int32_t *count)
{
    GB_TRY(gb_context_check(context));
    return gb_engine_completions(context->engine, users, capacity, timeout_ns, count);
}

void gpubridge_completions_stop(gpubridge_context *context)
{
    if (context && !gb_context_check(context)) gb_engine_completions_stop(context->engine);
}

/* ---- by name ---- */

static int submit_or_run(gpubridge_comm *comm, const struct gpubridge_op *op, gpubridge_request **request)
{
    return request ? gpubridge_submit(comm, op, request) : gpubridge_run(comm, op);
}

int gpubridge_all_reduce(gpubridge_comm *comm, const void *send, void *recv, uint64_t count, int32_t dtype,
                         int32_t reduce_op, void *stream, gpubridge_request **request)
{
    struct gpubridge_op op = {.struct_size = sizeof op,
                              .kind = GPUBRIDGE_ALL_REDUCE,
                              .dtype = dtype,
                              .reduce_op = reduce_op,
                              .send = send,
                              .recv = recv,
                              .count = count,
                              .stream = stream};
    return submit_or_run(comm, &op, request);
}

int gpubridge_broadcast(gpubridge_comm *comm, void *buffer, uint64_t count, int32_t dtype, int32_t root, void *stream,
                        gpubridge_request **request)
{
    struct gpubridge_op op = {.struct_size = sizeof op,
                              .kind = GPUBRIDGE_BROADCAST,
                              .dtype = dtype,
                              .root = root,
                              .send = buffer,
                              .recv = buffer,
                              .count = count,
                              .stream = stream};
    return submit_or_run(comm, &op, request);
}

int gpubridge_all_gather(gpubridge_comm *comm, const void *send, void *recv, uint64_t count, int32_t dtype,
                         void *stream, gpubridge_request **request)
{
    struct gpubridge_op op = {.struct_size = sizeof op,
                              .kind = GPUBRIDGE_ALL_GATHER,
                              .dtype = dtype,
                              .send = send,
                              .recv = recv,
                              .count = count,
                              .stream = stream};
    return submit_or_run(comm, &op, request);
}

int gpubridge_reduce_scatter(gpubridge_comm *comm, const void *send, void *recv, uint64_t count, int32_t dtype,
                             int32_t reduce_op, void *stream, gpubridge_request **request)
{
    struct gpubridge_op op = {.struct_size = sizeof op,
                              .kind = GPUBRIDGE_REDUCE_SCATTER,
                              .dtype = dtype,
                              .reduce_op = reduce_op,
                              .send = send,
                              .recv = recv,
                              .count = count,
                              .stream = stream};
    return submit_or_run(comm, &op, request);
}

int gpubridge_barrier(gpubridge_comm *comm, int64_t timeout_ns)
{
    struct gpubridge_op op = {.struct_size = sizeof op, .kind = GPUBRIDGE_BARRIER, .timeout_ns = timeout_ns};
    return gpubridge_run(comm, &op);
}
