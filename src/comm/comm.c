/* SPDX-License-Identifier: Apache-2.0
 * Making and ending comms: hellos are compared, islands found, links dialled.  The calling user thread. */
#include "base/clock.h"
#include "base/log.h"
#include "comm/tune.h"
#include "comm/turns.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <xxhash.h>

#define DEFAULT_TIMEOUT_NS (1800ll * 1000000000ll)
#define DEPTH              8
#define HOST_BYTES_AUTO    (1u << 20)

_Static_assert((int)GB_COMPRESSION_NONE == GB_CODEC_NONE && (int)GB_COMPRESSION_FP8 == GB_CODEC_FP8_E4M3 &&
                   (int)GB_COMPRESSION_MXFP4 == GB_CODEC_MXFP4 &&
                   (int)GPUBRIDGE_CODEC_MXFP4 - GPUBRIDGE_CODEC_NONE == GB_CODEC_MXFP4,
               "settings, codecs and the API number codecs alike");

static int check_config(const struct gpubridge_comm_config *config)
{
    if (config->struct_size != sizeof *config)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID,
                       "struct gpubridge_comm_config has %zu bytes here and %zu at the caller: rebuild one of them",
                       sizeof *config, config->struct_size);
    if (!config->name || !config->name[0])
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "a comm needs a name that is the same on all members");
    if (config->size < 1 || config->rank < 0 || config->rank >= config->size)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "rank %d of %d does not exist", config->rank, config->size);
    return 0;
}

struct hello_call {
    gpubridge_context *context;
    struct gb_member_hello *hello;
};

static void read_turns(void *arg)
{
    struct hello_call *call = arg;
    memcpy(call->hello->leader_uuid, call->context->turns.leader.byte, 16);
    call->hello->ccl_epoch = call->context->turns.epoch;
}

int gpubridge_comm_hello(gpubridge_context *context, const struct gpubridge_comm_config *config, void *bytes,
                         size_t *length)
{
    GB_TRY(gb_context_check(context));
    GB_TRY(check_config(config));
    struct gb_settings settings;
    GB_TRY(gb_settings_load_comm(&context->settings, config->settings, &settings));
    struct gb_member_hello hello = {.protocol = GB_MEMBER_PROTOCOL,
                                    .device_kind = (uint8_t)context->device_kind,
                                    .rank = config->rank,
                                    .size = config->size,
                                    .global_rank = context->global_rank,
                                    .host_id = context->host_id,
                                    .name_hash = XXH3_64bits(config->name, strlen(config->name))};
    if (context->launcher) hello.flags |= GB_MEMBER_STAGED;
    if (context->emulated) hello.flags |= GB_MEMBER_EMULATED;
    if (context->launcher && !gb_launcher_has_kernels(context->launcher)) hello.flags |= GB_MEMBER_NO_KERNELS;
    memcpy(hello.uuid, context->uuid.byte, sizeof hello.uuid);
    if (getrandom(&hello.birth, sizeof hello.birth, 0) != (ssize_t)sizeof hello.birth)
        return GB_FAIL(GPUBRIDGE_ERR_SYSTEM, "no random numbers from the system");
    snprintf(hello.host, sizeof hello.host, "%s", context->host);
    snprintf(hello.island, sizeof hello.island, "%s", context->island);
    snprintf(hello.device, sizeof hello.device, "%s", context->device_id);
    snprintf(hello.library, sizeof hello.library, "%s", gpubridge_version());
    snprintf(hello.versions, sizeof hello.versions, "%s", context->versions);
    snprintf(hello.ccl, sizeof hello.ccl, "%s", context->ccl_name);
    gb_settings_agreed_text(&settings, hello.agreed);
    struct gb_net_address address;
    gb_net_get_address(context->net, &address);
    hello.address_bytes = address.bytes;
    memcpy(hello.address, address.blob, address.bytes);
    struct hello_call call = {context, &hello};
    gb_engine_call(context->engine, read_turns, &call);
    return gb_member_hello_encode(&hello, bytes, *length, length);
}

/* ---- comparing hellos ---- */

static int check_pair(const struct gb_member_hello *mine, const struct gb_member_hello *other, int32_t rank)
{
    if (other->rank != rank || other->size != mine->size)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID,
                       "the hello at position %d says rank %d of %d: pass the hellos in rank order", rank, other->rank,
                       other->size);
    if (other->name_hash != mine->name_hash)
        return GB_FAIL(GPUBRIDGE_ERR_MISMATCH, "rank %d (%s) makes another comm than rank %d: the names differ", rank,
                       other->host, mine->rank);
    if (strcmp(other->library, mine->library) != 0)
        return GB_FAIL(GPUBRIDGE_ERR_VERSION,
                       "rank %d (%s) has gpubridge %s, rank %d has %s: install one version everywhere", rank,
                       other->host, other->library, mine->rank, mine->library);
    if (strcmp(other->agreed, mine->agreed) != 0) {
        char diff[256];
        gb_settings_agreed_diff(mine->agreed, other->agreed, strlen(other->agreed), diff, sizeof diff);
        return GB_FAIL(GPUBRIDGE_ERR_MISMATCH,
                       "settings differ between rank %d (%s, \"here\") and rank %d (%s, \"there\"): %s", mine->rank,
                       mine->host, rank, other->host, diff);
    }
    if (rank == mine->rank) return 0;
    if (memcmp(other->uuid, mine->uuid, 16) == 0)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "ranks %d and %d are the same process", mine->rank, rank);
    /* Islands on purpose apart may share a device (tests on one GPU); inside one the vendor library would refuse or
     * hang. */
    int same_device = mine->device[0] && other->host_id == mine->host_id && strcmp(other->device, mine->device) == 0;
    if (same_device && strcmp(other->island, mine->island) == 0)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID,
                       "ranks %d and %d use the same device %s on %s: call torch.cuda.set_device(LOCAL_RANK) "
                       "before the first collective",
                       mine->rank, rank, mine->device, mine->host);
    if (strcmp(other->versions, mine->versions) != 0)
        GB_WARN("rank %d has %s, rank %d has %s: use one version on all ranks", mine->rank, mine->versions, rank,
                other->versions);
    return 0;
}

static int check_island(const gpubridge_context *context, const struct gb_member_hello *mine,
                        const struct gb_member_hello *other)
{
    if (strcmp(mine->island, other->island) != 0 || !(mine->flags & GB_MEMBER_STAGED)) return 0;
    if (mine->device_kind != other->device_kind)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID,
                       "ranks %d and %d are in island %s but on devices of different vendors: give them different "
                       "GPUBRIDGE_ISLAND labels",
                       mine->rank, other->rank, mine->island);
    if (strcmp(mine->ccl, other->ccl) != 0 || !mine->ccl[0])
        return GB_FAIL(GPUBRIDGE_ERR_LIBRARY,
                       "island %s: rank %d has vendor library '%s', rank %d has '%s': one version of NCCL (RCCL) "
                       "must be loadable on all of them%s%s",
                       mine->island, mine->rank, mine->ccl[0] ? mine->ccl : "none", other->rank,
                       other->ccl[0] ? other->ccl : "none", context->ccl_missing[0] ? "; here: " : "",
                       context->ccl_missing);
    return 0;
}

static int read_hellos(gpubridge_comm *comm, int32_t rank, int32_t size, const void *const *bytes,
                       const size_t *lengths)
{
    for (int32_t r = 0; r < size; r++) {
        if (!bytes[r]) return GB_FAIL(GPUBRIDGE_ERR_INVALID, "the hello of rank %d is missing", r);
        int rc = gb_member_hello_decode(bytes[r], lengths[r], &comm->members[r].hello);
        if (rc) {
            char text[400];
            snprintf(text, sizeof text, "%s", gb_err_text());
            return GB_FAIL(rc, "rank %d: %s", r, text);
        }
    }
    const struct gb_member_hello *mine = &comm->members[rank].hello;
    if (memcmp(mine->uuid, comm->context->uuid.byte, 16) != 0)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "the hello at position %d is not this process's own", rank);
    for (int32_t r = 0; r < size; r++) GB_TRY(check_pair(mine, &comm->members[r].hello, r));
    for (int32_t r = 0; r < size; r++)
        if (r != rank) GB_TRY(check_island(comm->context, mine, &comm->members[r].hello));
    return 0;
}

/* ---- building ---- */

/* `auto`.  Two copies and a sum on the CPU take less time than the driver calls of the pipeline and a kernel that waits
 * for its turn on the GPU.  Larger ones inside vendor islands are the vendor library's. */
static uint64_t host_bytes(const struct gb_settings *settings, const struct gb_topo *topo, uint64_t flat_bytes)
{
    if (settings->host_bytes != GB_FLAT_BYTES_AUTO) return settings->host_bytes;
    return topo->nislands == topo->nranks ? HOST_BYTES_AUTO : flat_bytes;
}

static int make_topo(gpubridge_comm *comm)
{
    uint32_t n = comm->group.size;
    const char **keys = calloc(n, sizeof *keys);
    uint8_t *staged = calloc(n, 2);
    int rc = !keys || !staged ? GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for a group of %u ranks", n) : 0;
    comm->group.is_one_host =
        comm->settings.transport == GB_TRANSPORT_AUTO || comm->settings.transport == GB_TRANSPORT_SHM;
    for (uint32_t r = 0; keys && staged && r < n; r++) {
        keys[r] = comm->members[r].hello.island;
        staged[r] = comm->members[r].hello.flags & GB_MEMBER_STAGED ? 1 : 0;
        comm->group.any_staged |= staged[r];
        comm->group.is_one_host &= comm->members[r].hello.host_id == comm->members[0].hello.host_id;
        if (comm->members[r].hello.flags & GB_MEMBER_NO_KERNELS) comm->group.host_bytes = UINT64_MAX;
    }
    /* A device island moves data by its vendor library; so "vendor" and "staged" are the same list. */
    if (!rc) rc = gb_topo_create(n, keys, staged, staged, &comm->group.topo);
    if (!rc) rc = gb_topo_create(n, keys, staged + n, staged + n, &comm->group.host_topo);
    if (!rc && comm->group.host_bytes != UINT64_MAX)
        comm->group.host_bytes = host_bytes(&comm->settings, comm->group.topo, comm->group.flat_bytes);
    free(keys);
    free(staged);
    return rc;
}

static int make_labels(struct gb_group *group, const struct gb_member *members)
{
    for (uint32_t r = 0; r < group->size; r++) {
        char label[128];
        snprintf(label, sizeof label, "rank %u (%s)", r, members[r].hello.host);
        group->labels[r] = strdup(label);
        if (!group->labels[r])
            return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for a group of %u ranks", group->size);
    }
    return 0;
}

/* Members and births in rank order, chained. */
static uint64_t make_id(const gpubridge_comm *comm, const char *name)
{
    uint64_t id = XXH3_64bits(name, strlen(name));
    for (uint32_t r = 0; r < comm->group.size; r++) {
        id = XXH3_64bits_withSeed(comm->members[r].hello.uuid, 16, id);
        id = XXH3_64bits_withSeed(&comm->members[r].hello.birth, 8, id);
    }
    return id;
}

/* `auto`: one frame to everybody beats several hops while a message fits the eager limit and the group is small. */
static uint64_t flat_bytes(const struct gb_settings *settings, uint32_t size)
{
    if (settings->flat_bytes != GB_FLAT_BYTES_AUTO)
        return settings->flat_bytes < GB_EAGER_BYTES ? settings->flat_bytes : GB_EAGER_BYTES;
    if (size <= 4) return GB_EAGER_BYTES;
    if (size <= 16) return GB_EAGER_BYTES / 4;
    return size <= 64 ? 512 : 0;
}

static int init_group(gpubridge_comm *comm, const struct gpubridge_comm_config *config)
{
    struct gb_group *group = &comm->group;
    gpubridge_context *context = comm->context;
    uint32_t n = (uint32_t)config->size;
    pthread_mutex_init(&group->submit_lock, NULL);
    pthread_mutex_init(&group->coded_lock, NULL);
    group->rank = (uint32_t)config->rank;
    group->size = n;
    group->engine = context->engine;
    group->comm = comm;
    group->staged = context->launcher != NULL;
    group->timeout_ns = config->timeout_ns > 0 ? config->timeout_ns : DEFAULT_TIMEOUT_NS;
    group->chunk_bytes = comm->settings.chunk_bytes;
    group->flat_bytes = flat_bytes(&comm->settings, n);
    int is_auto = comm->settings.compression == GB_COMPRESSION_AUTO; /* then gb_comm_tune decides */
    group->codec = is_auto ? GB_CODEC_NONE : comm->settings.compression;
    group->codec_min_bytes = comm->settings.compression_min_bytes;
    group->codec_spreads = comm->settings.compression_gather;
    group->codec_is_random = comm->settings.compression_seed != GB_SEED_OFF;
    group->codec_seed = comm->settings.compression_seed;
    group->codec_skips = comm->settings.compression_dtypes == GB_COMPRESSION_F32    ? GB_SKIP_HALF
                         : comm->settings.compression_dtypes == GB_COMPRESSION_HALF ? GB_SKIP_F32
                                                                                    : GB_SKIP_NONE;
    group->depth = DEPTH;
    group->name = strdup(config->name);
    group->links = calloc(n, sizeof *group->links);
    group->labels = calloc(n, sizeof *group->labels);
    group->arrived = calloc(n, 1);
    if (!group->name || !group->links || !group->labels || !group->arrived)
        return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for a group of %u ranks", n);
    pthread_mutex_lock(&context->lock);
    group->stream_set = context->next_stream_set;
    context->next_stream_set += 2;
    pthread_mutex_unlock(&context->lock);
    return 0;
}

int gb_comm_get_link(gpubridge_comm *comm, uint32_t rank, struct gb_link **link)
{
    const struct gb_member_hello *hello = &comm->members[rank].hello;
    struct gb_net_peer peer = {
        .global_rank = hello->global_rank, .host = hello->host, .address.bytes = hello->address_bytes};
    memcpy(peer.uuid.byte, hello->uuid, 16);
    memcpy(peer.address.blob, hello->address, hello->address_bytes);
    return gb_link_get(comm->context->net, &peer, link);
}

static int dial(gpubridge_comm *comm)
{
    struct gb_group *group = &comm->group;
    for (uint32_t r = 0; r < group->size; r++)
        if (r != group->rank) GB_TRY(gb_comm_get_link(comm, r, &group->links[r]));
    return 0;
}

static int lost_reason(gpubridge_comm *comm, uint32_t rank)
{
    gpubridge_context *context = comm->context;
    char text[480] = "the connection could not be made";
    int status = GPUBRIDGE_ERR_PEER_LOST;
    pthread_mutex_lock(&context->lock);
    for (struct gb_lost_link *lost = context->lost; lost; lost = lost->next) {
        if (lost->link != comm->group.links[rank]) continue;
        snprintf(text, sizeof text, "%s", lost->text);
        if (lost->status) status = lost->status;
        break;
    }
    pthread_mutex_unlock(&context->lock);
    return GB_FAIL(status, "group %s: %s cannot be used by rank %u: %s", comm->group.name, comm->group.labels[rank],
                   comm->group.rank, text);
}

static void nothing(void *arg)
{
    (void)arg;
}

/* Waits for every link, or for the first that fails. */
static int await_links(gpubridge_comm *comm)
{
    struct gb_group *group = &comm->group;
    uint64_t start = gb_now_ns();
    struct timespec nap = {.tv_nsec = 100000};
    for (uint32_t r = 0; r < group->size; r++) {
        if (r == group->rank) continue;
        for (;;) {
            enum gb_link_state state = gb_link_state(group->links[r]);
            if (state == GB_LINK_UP) break;
            gb_engine_call(comm->context->engine, nothing, NULL); /* takes the events that say why a link failed */
            if (state == GB_LINK_DEAD || state == GB_LINK_LEFT) return lost_reason(comm, r);
            if ((int64_t)(gb_now_ns() - start) > group->timeout_ns)
                return GB_FAIL(GPUBRIDGE_ERR_TIMEOUT, "group %s: rank %u could not reach %s within %.1f s", group->name,
                               group->rank, group->labels[r], (double)group->timeout_ns * 1e-9);
            nanosleep(&nap, NULL);
            if (nap.tv_nsec < 2000000) nap.tv_nsec *= 2;
        }
    }
    return 0;
}

/* Which members this device can read messages of where they lie: those with a device, over a link that knows loans. */
static int find_lenders(gpubridge_comm *comm)
{
    struct gb_group *group = &comm->group;
    gpubridge_context *context = comm->context;
    if (!context->launcher || !context->settings.shared_staging) return 0;
    int any = 0;
    uint8_t *lends = calloc(group->size, 1);
    if (!lends) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for a group of %u ranks", group->size);
    for (uint32_t r = 0; r < group->size; r++) {
        if (r == group->rank || !group->topo->staged[r] || !gb_link_lends(group->links[r])) continue;
        const char *theirs = comm->members[r].hello.device, *ours = comm->members[group->rank].hello.device;
        lends[r] = ours[0] && strcmp(ours, theirs) == 0 ? GB_LENDS_SAME_DEVICE : GB_LENDS;
        any = 1;
    }
    if (any) gb_launcher_share(context->launcher, context->net);
    if (any && gb_launcher_can_borrow(context->launcher))
        group->lends = lends;
    else
        free(lends);
    return 0;
}

static void enlist(void *arg)
{
    gpubridge_comm *comm = arg;
    gpubridge_context *context = comm->context;
    gb_turns_join(comm);
    comm->next = context->comms;
    context->comms = comm;
    for (struct gb_stray_abort **at = &context->stray_aborts; *at;) {
        struct gb_stray_abort *stray = *at;
        if (stray->group != comm->group.id) {
            at = &stray->next;
            continue;
        }
        *at = stray->next;
        gb_group_abort(&comm->group, stray->status, stray->text, 0);
        free(stray);
    }
}

static void strike_off(void *arg)
{
    gpubridge_comm *comm = arg;
    gpubridge_comm **at = &comm->context->comms;
    while (*at && *at != comm) at = &(*at)->next;
    if (!*at) return;
    gb_control_leave(comm);
    *at = comm->next;
}

static void comm_free(gpubridge_comm *comm)
{
    struct gb_group *group = &comm->group;
    for (uint32_t r = 0; group->links && r < group->size; r++)
        if (group->links[r]) gb_link_put(group->links[r]);
    for (uint32_t r = 0; group->labels && r < group->size; r++) free(group->labels[r]);
    gb_group_flush_plans(group);
    gb_topo_destroy(group->topo);
    gb_topo_destroy(group->host_topo);
    free(group->links);
    free(group->labels);
    free(group->arrived);
    free(group->lends);
    free(group->name);
    pthread_mutex_destroy(&group->submit_lock);
    pthread_mutex_destroy(&group->coded_lock);
    free(comm->members);
    free(comm);
}

int gpubridge_comm_create(gpubridge_context *context, const struct gpubridge_comm_config *config,
                          const void *const *hellos, const size_t *hello_bytes, gpubridge_comm **out)
{
    GB_TRY(gb_context_check(context));
    GB_TRY(check_config(config));
    gpubridge_comm *comm = calloc(1, sizeof *comm);
    if (!comm) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for a comm");
    comm->context = context;
    comm->members = calloc((size_t)config->size, sizeof *comm->members);
    int rc = comm->members ? gb_settings_load_comm(&context->settings, config->settings, &comm->settings)
                           : GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for %d members", config->size);
    if (!rc) rc = init_group(comm, config);
    if (!rc) rc = read_hellos(comm, config->rank, config->size, hellos, hello_bytes);
    if (!rc) rc = make_labels(&comm->group, comm->members);
    if (!rc) rc = make_topo(comm);
    if (rc) goto err_free;
    comm->group.id = make_id(comm, config->name);
    rc = dial(comm);
    if (rc) goto err_free;
    gb_engine_add(context->engine, &comm->group);
    gb_engine_call(context->engine, enlist, comm);
    rc = await_links(comm);
    if (!rc) rc = find_lenders(comm);
    if (!rc && comm->settings.self_test) rc = gb_comm_self_test(comm);
    if (!rc && comm->settings.compression == GB_COMPRESSION_AUTO) rc = gb_comm_tune(comm);
    if (rc) goto err_remove;
    GB_INFO("group %s: %u ranks in %u islands, rank %u in island %s", comm->group.name, comm->group.size,
            comm->group.topo->nislands, comm->group.rank, context->island);
    *out = comm;
    return 0;

err_remove:;
    char text[480];
    snprintf(text, sizeof text, "%s", gb_err_text());
    gb_engine_call(context->engine, strike_off, comm);
    gb_engine_remove(context->engine, &comm->group, GPUBRIDGE_ERR_DESTROYED, "the group could not be made");
    gb_err_put(text);
err_free:
    comm_free(comm);
    return rc;
}

void gpubridge_comm_destroy(gpubridge_comm *comm)
{
    if (!comm || gb_context_check(comm->context)) return;
    gpubridge_context *context = comm->context;
    gb_engine_call(context->engine, strike_off, comm);
    gb_engine_remove(context->engine, &comm->group, GPUBRIDGE_ERR_DESTROYED, "the group was destroyed on this rank");
    if (context->launcher) {
        gb_launcher_drop_set(context->launcher, comm->group.stream_set);
        gb_launcher_drop_set(context->launcher, comm->group.stream_set + 1);
    }
    comm_free(comm);
}

struct abort_call {
    gpubridge_comm *comm;
    const char *reason;
};

static void abort_comm(void *arg)
{
    struct abort_call *call = arg;
    char text[480];
    snprintf(text, sizeof text, "aborted by rank %u (%s): %s", call->comm->group.rank, call->comm->context->host,
             call->reason ? call->reason : "no reason given");
    gb_group_abort(&call->comm->group, GPUBRIDGE_ERR_ABORTED, text, 1);
}

void gpubridge_comm_abort(gpubridge_comm *comm, const char *reason)
{
    if (!comm || gb_context_check(comm->context)) return;
    struct abort_call call = {comm, reason};
    gb_engine_call(comm->context->engine, abort_comm, &call);
}
