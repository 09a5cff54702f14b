/* SPDX-License-Identifier: Apache-2.0
 * Making and ending a context: settings, secret, device, network, engine, in this order and back.  User threads. */
#include "comm/context.h"

#include "base/log.h"
#include "comm/ccls.h"
#include "comm/turns.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#define SECRET_MIN   16
#define SECRET_MAX   4096
#define SPIN_AUTO_NS 50000
#define INLINE_BYTES (256 * 1024)

int gb_context_check(const gpubridge_context *context)
{
    if (!context) return GB_FAIL(GPUBRIDGE_ERR_INVALID, "the context is NULL");
    if (context->pid != getpid())
        return GB_FAIL(GPUBRIDGE_ERR_FORKED,
                       "the context belongs to process %d and this is its child %d: make a context of its own, or "
                       "start workers by spawn",
                       (int)context->pid, (int)getpid());
    return 0;
}

static int read_secret_file(const char *path, uint8_t *secret, size_t *bytes)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return GB_FAIL(GPUBRIDGE_ERR_SETTING, "GPUBRIDGE_SECRET_FILE=%s cannot be opened: %s", path, strerror(errno));
    struct stat st;
    ssize_t n = fstat(fd, &st) ? -1 : read(fd, secret, SECRET_MAX);
    close(fd);
    if (n < SECRET_MIN)
        return GB_FAIL(GPUBRIDGE_ERR_SETTING, "GPUBRIDGE_SECRET_FILE=%s holds fewer than %d bytes", path, SECRET_MIN);
    if (st.st_mode & (S_IRWXG | S_IRWXO)) GB_WARN("GPUBRIDGE_SECRET_FILE=%s can be read by others: chmod 600 it", path);
    *bytes = (size_t)n;
    return 0;
}

static int find_secret(const gpubridge_context *context, const struct gpubridge_context_config *config, uint8_t *secret,
                       size_t *bytes)
{
    if (context->settings.secret_file[0]) return read_secret_file(context->settings.secret_file, secret, bytes);
    if (!config->secret || config->secret_bytes < SECRET_MIN || config->secret_bytes > SECRET_MAX)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID,
                       "the job's secret must have %d to %d bytes (it has %zu); or set GPUBRIDGE_SECRET_FILE",
                       SECRET_MIN, SECRET_MAX, config->secret ? config->secret_bytes : 0);
    memcpy(secret, config->secret, config->secret_bytes);
    *bytes = config->secret_bytes;
    return 0;
}

static size_t read_text(const char *path, char *text, size_t capacity)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, text, capacity - 1) : -1;
    if (fd >= 0) close(fd);
    if (n < 0) n = 0;
    text[n] = 0;
    return (size_t)n;
}

/* Boot id and host name: two containers of one machine with different host names count as two hosts.  NCCL_HOSTID,
 * which overrides the same notion in NCCL and RCCL, does so here. */
static void identify_host(gpubridge_context *context)
{
    char boot[64];
    size_t n = read_text("/proc/sys/kernel/random/boot_id", boot, sizeof boot);
    if (gethostname(context->host, sizeof context->host)) snprintf(context->host, sizeof context->host, "unknown-host");
    context->host[sizeof context->host - 1] = 0;
    const char *vendor_id = getenv("NCCL_HOSTID");
    context->host_id = XXH3_64bits(boot, n) ^ XXH3_64bits(context->host, strlen(context->host));
    if (vendor_id) context->host_id ^= XXH3_64bits_withSeed(vendor_id, strlen(vendor_id), 1);
}

static int open_net(gpubridge_context *context, const struct gpubridge_context_config *config)
{
    const struct gb_settings *s = &context->settings;
    uint8_t secret[SECRET_MAX];
    size_t secret_bytes = 0;
    GB_TRY(find_secret(context, config, secret, &secret_bytes));
    char transport[16];
    gb_settings_word("GPUBRIDGE_TRANSPORT", s->transport, transport, sizeof transport);
    struct gb_net_config net = {.self = context->uuid,
                                .global_rank = context->global_rank,
                                .host = context->host,
                                .transport = transport,
                                .ifname = s->ifname,
                                .master_addr = config->master_addr,
                                .port_low = s->port_range[0],
                                .port_high = s->port_range[1],
                                .secret = secret,
                                .secret_bytes = secret_bytes,
                                .lanes = s->lanes,
                                .workers = s->workers,
                                .peer_timeout_ns = s->peer_timeout_ns,
                                .connect_timeout_ns = s->connect_timeout_ns,
                                .checksum = s->checksum,
                                .fault = s->fault[0] ? s->fault : NULL};
    return gb_net_open(&net, &context->net);
}

/* With one I/O worker the engine role adds by itself: the worker would leave the sockets alone meanwhile, and each
 * hand-over costs two thread switches (measured: 64 MiB over four ranks on two cores, 12 % less time).  With several,
 * they share it. */
static int inline_bytes(const struct gb_settings *settings)
{
    cpu_set_t set;
    int cores = sched_getaffinity(0, sizeof set, &set) ? 1 : CPU_COUNT(&set);
    int alone = settings->workers ? settings->workers == 1 : cores < 4;
    return alone ? INT32_MAX : INLINE_BYTES;
}

static int open_engine(gpubridge_context *context)
{
    const struct gb_settings *s = &context->settings;
    struct gb_engine_config config = {.net = context->net,
                                      .launcher = context->launcher,
                                      .pool = context->pool,
                                      .spin_ns = s->spin_ns == GB_SPIN_NS_AUTO ? SPIN_AUTO_NS : s->spin_ns,
                                      .inline_bytes = inline_bytes(s),
                                      .emulated = context->emulated};
    if (s->poll == GB_POLL_SPIN) config.spin_ns = INT64_MAX;
    if (s->poll == GB_POLL_EVENT) config.spin_ns = 0;
    gb_control_hooks(context, &config.hooks);
    return gb_engine_open(&config, &context->engine);
}

int gpubridge_context_create(const struct gpubridge_context_config *config, gpubridge_context **out)
{
    if (config->struct_size != sizeof *config)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID,
                       "struct gpubridge_context_config has %zu bytes here and %zu at the caller: rebuild one of them",
                       sizeof *config, config->struct_size);
    gpubridge_context *context = calloc(1, sizeof *context);
    if (!context) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for a context");
    context->pid = getpid();
    context->global_rank = config->global_rank;
    context->local_rank = config->local_rank;
    snprintf(context->versions, sizeof context->versions, "%s", config->versions ? config->versions : "");
    pthread_mutex_init(&context->lock, NULL);
    identify_host(context);
    char label[96];
    snprintf(label, sizeof label, "rank %d", config->global_rank);
    gb_log_set_label(label);

    int rc = gb_settings_load(config->settings, config->local_rank, &context->settings);
    if (rc) goto err_free;
    gb_log_set_level((enum gb_log_level)context->settings.log);
    if (getrandom(context->uuid.byte, sizeof context->uuid.byte, 0) != (ssize_t)sizeof context->uuid.byte) {
        rc = GB_FAIL(GPUBRIDGE_ERR_SYSTEM, "no random numbers from the system");
        goto err_free;
    }
    context->pool = gb_pool_create((size_t)context->settings.mem_bytes);
    if (!context->pool) {
        rc = GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for a context");
        goto err_free;
    }
    rc = open_net(context, config);
    if (rc) goto err_destroy_pool;
    rc = gb_island_open(context, config->device_kind, config->device_index);
    if (rc) goto err_close_net;
    rc = open_engine(context);
    if (rc) goto err_close_island;
    *out = context;
    return 0;

err_close_island:
    gb_island_close(context);
err_close_net:
    gb_net_close(context->net, 0, "could not start");
err_destroy_pool:
    gb_pool_destroy(context->pool);
err_free:
    pthread_mutex_destroy(&context->lock);
    free(context);
    return rc;
}

static void free_lists(gpubridge_context *context)
{
    while (context->lost) {
        struct gb_lost_link *lost = context->lost;
        context->lost = lost->next;
        free(lost);
    }
    while (context->stray_aborts) {
        struct gb_stray_abort *stray = context->stray_aborts;
        context->stray_aborts = stray->next;
        free(stray);
    }
}

void gpubridge_context_farewell(gpubridge_context *context, const char *reason)
{
    if (!context || gb_context_check(context)) return;
    pthread_mutex_lock(&context->lock);
    snprintf(context->own_reason, sizeof context->own_reason, "%.159s%s", reason ? reason : "",
             reason ? " (see that rank's log)" : "");
    pthread_mutex_unlock(&context->lock);
}

void gpubridge_context_destroy(gpubridge_context *context)
{
    if (!context || gb_context_check(context)) return;
    while (context->comms) gpubridge_comm_destroy(context->comms);
    gb_ccls_quiesce(context);
    gb_engine_close(context->engine);
    gb_turns_close(context);
    gb_ccls_close(context);
    gb_island_close(context);
    if (context->leader_link) gb_link_put(context->leader_link);
    gb_net_close(context->net, context->farewell_status,
                 context->farewell_status ? context->farewell : context->own_reason);
    free_lists(context);
    free(context->proven);
    gb_pool_destroy(context->pool);
    pthread_mutex_destroy(&context->lock);
    free(context);
}
