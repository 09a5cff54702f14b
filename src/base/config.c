/* SPDX-License-Identifier: Apache-2.0
 * The settings table, its parser, and the text form that ranks compare.  No thread of its own; see config.h. */
#include "base/config.h"

#include "base/log.h"

#include <ctype.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

enum kind { KIND_CHOICE, KIND_BYTES, KIND_COUNT, KIND_SEED, KIND_SECONDS, KIND_MICROS, KIND_TEXT, KIND_PORTS };
enum auto_as { AUTO_NO, AUTO_ZERO, AUTO_ONES };

#define KIB 1024ull
#define MIB (1024ull * KIB)
#define GIB (1024ull * MIB)

#define FIELD(f) .offset = offsetof(struct gb_settings, f), .size = sizeof(((struct gb_settings *)0)->f)

/* clang-format off */
static const struct gb_setting rows[] = {
    {.name = "GPUBRIDGE_EMULATE", .type = "none | cuda | hip", .value = "none", .kind = KIND_CHOICE, .per_rank = 1,
     .help = "This rank drives the emulated vendor library; CPU tensors are then its device tensors. One word for all "
             "ranks, or a comma list by local rank: cuda,cuda,hip,hip.",
     FIELD(emulate)},
    {.name = "GPUBRIDGE_ISLAND", .type = "label", .value = "", .kind = KIND_TEXT, .per_rank = 1,
     .help = "Label of this rank's island; ranks with equal labels share one. One label, or a comma list by local rank. "
             "Unset: GPUBRIDGE_ISLAND_BY decides.",
     FIELD(island)},
    {.name = "GPUBRIDGE_ISLAND_BY", .type = "arch | vendor | host", .value = "arch", .kind = KIND_CHOICE, .agreed = 1,
     .help = "What puts ranks into one island: vendor and architecture, the vendor alone, or the host.",
     FIELD(island_by)},
    {.name = "GPUBRIDGE_ISLAND_REDUCE", .type = "exact | native", .value = "exact", .kind = KIND_CHOICE, .agreed = 1,
     .scope = GB_SCOPE_COMM, .built = 1,
     .help = "Who adds inside an island: our kernels in rank order (exact), or the vendor's reduce-scatter (native), whose "
             "order of summation is the library's own.",
     FIELD(island_reduce)},
    {.name = "GPUBRIDGE_GATE", .type = "auto | on | off", .value = "auto", .kind = KIND_CHOICE,
     .help = "Whether the device side of an operation is enqueued in advance behind flags (on) or launched when the network "
             "is ready (off). auto: on for CUDA, off for HIP.",
     FIELD(gate)},
    {.name = "GPUBRIDGE_MEM_BYTES", .type = "bytes", .value = "1G", .kind = KIND_BYTES, .min = 16 * MIB, .max = 1024 * GIB,
     .help = "Upper limit of the staging and scratch memory that this process takes; it grows on demand.",
     FIELD(mem_bytes)},
    {.name = "GPUBRIDGE_TRANSPORT", .type = "auto | tcp | inproc | shm | rdma", .value = "auto", .kind = KIND_CHOICE,
     .agreed = 1, .built = 4,
     .help = "What carries messages between processes. auto: shared memory between processes of one host where it can be "
             "had, TCP elsewhere. shm: shared memory or nothing. inproc joins several contexts of one process and serves "
             "tests.",
     FIELD(transport)},
    {.name = "GPUBRIDGE_LANES", .type = "1 to 64, or auto", .value = "auto", .kind = KIND_COUNT, .auto_as = AUTO_ZERO,
     .agreed = 1, .min = 1, .max = 64,
     .help = "TCP streams per link that carry bulk data.",
     FIELD(lanes)},
    {.name = "GPUBRIDGE_WORKERS", .type = "1 to 64, or auto", .value = "auto", .kind = KIND_COUNT, .auto_as = AUTO_ZERO,
     .min = 1, .max = 64,
     .help = "I/O threads of this process; they move bulk lanes and run CPU reductions. auto: by the cores it may use.",
     FIELD(workers)},
    {.name = "GPUBRIDGE_CHUNK_BYTES", .type = "bytes, or auto", .value = "auto", .kind = KIND_BYTES, .auto_as = AUTO_ZERO,
     .agreed = 1, .scope = GB_SCOPE_COMM, .min = 4 * KIB, .max = 1 * GIB,
     .help = "The unit that is pipelined across the bridge.",
     FIELD(chunk_bytes)},
    {.name = "GPUBRIDGE_FLAT_BYTES", .type = "bytes, or auto", .value = "auto", .kind = KIND_BYTES, .auto_as = AUTO_ONES,
     .agreed = 1, .scope = GB_SCOPE_COMM, .max = 1 * GIB,
     .help = "Up to this many bytes per rank everybody sends to everybody in one round, without the vendor library. 0: never.",
     FIELD(flat_bytes)},
    {.name = "GPUBRIDGE_HOST_BYTES", .type = "bytes, or auto", .value = "auto", .kind = KIND_BYTES, .auto_as = AUTO_ONES,
     .agreed = 1, .scope = GB_SCOPE_COMM, .max = 1 * GIB,
     .help = "Collectives of GPU tensors up to this many bytes are copied to host memory as a whole and added there: no kernel, few driver calls. 0: never.",
     FIELD(host_bytes)},
    {.name = "GPUBRIDGE_SHARED_STAGING", .type = "off | on", .value = "on", .kind = KIND_CHOICE,
     .help = "Ranks with GPUs on one host read each other's staging memory, so that no processor copies messages between "
             "them. off: messages are copied through shared memory, or TCP.",
     FIELD(shared_staging)},
    {.name = "GPUBRIDGE_COMPRESSION", .type = "none | bf16 | fp16 | fp8 | fp8_e5m2 | int8 | mxfp4 | auto", .value = "none",
     .kind = KIND_CHOICE, .agreed = 1, .scope = GB_SCOPE_COMM,
     .help = "Codec of the hop between islands, for sums of floating-point data. auto: none, bf16, fp8 or int8, as a "
             "measurement says when a group is made.",
     FIELD(compression)},
    {.name = "GPUBRIDGE_COMPRESSION_MIN_BYTES", .type = "bytes", .value = "64K", .kind = KIND_BYTES, .agreed = 1,
     .scope = GB_SCOPE_COMM, .max = 1024 * GIB,
     .help = "Operations on fewer bytes than this (all blocks together) cross uncompressed.",
     FIELD(compression_min_bytes)},
    {.name = "GPUBRIDGE_COMPRESSION_DTYPES", .type = "all | f32 | half", .value = "all", .kind = KIND_CHOICE, .agreed = 1,
     .scope = GB_SCOPE_COMM,
     .help = "Data that is compressed: float32, float16 and bfloat16 (all), float32 alone, or the other two (half).",
     FIELD(compression_dtypes)},
    {.name = "GPUBRIDGE_COMPRESSION_GATHER", .type = "off | on", .value = "off", .kind = KIND_CHOICE, .agreed = 1,
     .scope = GB_SCOPE_COMM,
     .help = "Compress all_gather and broadcast, too. What all ranks then have is what was decoded.",
     FIELD(compression_gather)},
    {.name = "GPUBRIDGE_COMPRESSION_SEED", .type = "0 to 4294967295, or off", .value = "off", .kind = KIND_SEED,
     .auto_as = AUTO_ONES, .agreed = 1, .scope = GB_SCOPE_COMM, .max = 4294967295,
     .help = "Round stochastically when values are encoded, with this seed: up or down by chance, right on average. The same "
             "seed and the same operations give the same bits. off: to the nearest value.",
     FIELD(compression_seed)},
    {.name = "GPUBRIDGE_IFNAME", .type = "interface list", .value = "", .kind = KIND_TEXT,
     .help = "Network interfaces to use: eth (prefix), =eth0 (exact), ^lo,docker (all but these). Unset: the one whose route "
             "leads to the master.",
     FIELD(ifname)},
    {.name = "GPUBRIDGE_PORT_RANGE", .type = "low-high", .value = "", .kind = KIND_PORTS,
     .help = "Listening ports that may be used, both ends included; one per process on a host. Unset: any free port.",
     FIELD(port_range)},
    {.name = "GPUBRIDGE_SECRET_FILE", .type = "path", .value = "", .kind = KIND_TEXT,
     .help = "File with the job's secret, 16 bytes or more. Unset: the secret comes through the caller, which stops "
             "accidents but nobody who can read the store.",
     FIELD(secret_file)},
    {.name = "GPUBRIDGE_ENCRYPT", .type = "off | on", .value = "off", .kind = KIND_CHOICE, .agreed = 1, .built = 1,
     .help = "Encrypt what crosses between hosts.",
     FIELD(encrypt)},
    {.name = "GPUBRIDGE_CHECKSUM", .type = "off | on | auto", .value = "auto", .kind = KIND_CHOICE, .agreed = 1,
     .help = "Checksum over the payload of every bulk frame; a damaged one raises and names the peer. auto: between hosts; "
             "inside one host the bytes only cross its memory. Headers and small messages always carry one.",
     FIELD(checksum)},
    {.name = "GPUBRIDGE_SELF_TEST", .type = "off | on", .value = "on", .kind = KIND_CHOICE, .agreed = 1,
     .scope = GB_SCOPE_COMM,
     .help = "Known bytes cross every new link both ways before a comm uses it, so a wrong edge is found at once.",
     FIELD(self_test)},
    {.name = "GPUBRIDGE_BLOCKING_WAIT", .type = "off | on", .value = "off", .kind = KIND_CHOICE,
     .help = "wait() on a GPU collective holds the host until the result is there, not only the stream.",
     FIELD(blocking_wait)},
    {.name = "GPUBRIDGE_POLL", .type = "spin | adaptive | event", .value = "adaptive", .kind = KIND_CHOICE,
     .help = "How to wait for the network: burn a core, spin for GPUBRIDGE_SPIN_US and then sleep, or sleep at once.",
     FIELD(poll)},
    {.name = "GPUBRIDGE_SPIN_US", .type = "microseconds, or auto", .value = "auto", .kind = KIND_MICROS,
     .auto_as = AUTO_ONES, .max = 1000000,
     .help = "How long adaptive polling spins. auto: longer where every rank has a core of its own.",
     FIELD(spin_ns)},
    {.name = "GPUBRIDGE_LOG", .type = "error | warn | info | debug | trace", .value = "warn", .kind = KIND_CHOICE,
     .help = "Lines above this level are dropped.",
     FIELD(log)},
    {.name = "GPUBRIDGE_PEER_TIMEOUT_S", .type = "seconds", .value = "3", .kind = KIND_SECONDS, .min = 100000000,
     .max = 3600000000000,
     .help = "Silence of a peer's control thread that counts as death. A closed connection is seen at once.",
     FIELD(peer_timeout_ns)},
    {.name = "GPUBRIDGE_CONNECT_TIMEOUT_S", .type = "seconds", .value = "60", .kind = KIND_SECONDS, .min = 100000000,
     .max = 86400000000000,
     .help = "How long to dial a peer that does not answer.",
     FIELD(connect_timeout_ns)},
    {.name = "GPUBRIDGE_CACHE_DIR", .type = "path, or off", .value = "", .kind = KIND_TEXT,
     .help = "Folder of compiled GPU kernels, shared by the processes of a host. Unset: gpubridge/ below XDG_CACHE_HOME or ~/.cache.",
     FIELD(cache_dir)},
    {.name = "GPUBRIDGE_CUDA_LIB", .type = "path", .value = "", .kind = KIND_TEXT,
     .help = "The CUDA driver library. Unset: libcuda.so.1.",
     FIELD(cuda_lib)},
    {.name = "GPUBRIDGE_HIP_LIB", .type = "path", .value = "", .kind = KIND_TEXT,
     .help = "The HIP runtime library. Unset: libamdhip64.so.",
     FIELD(hip_lib)},
    {.name = "GPUBRIDGE_NCCL_LIB", .type = "path", .value = "", .kind = KIND_TEXT,
     .help = "The NCCL library. Unset: libnccl.so.2.",
     FIELD(nccl_lib)},
    {.name = "GPUBRIDGE_RCCL_LIB", .type = "path", .value = "", .kind = KIND_TEXT,
     .help = "The RCCL library. Unset: librccl.so.1.",
     FIELD(rccl_lib)},
    {.name = "GPUBRIDGE_VERBS_LIB", .type = "path", .value = "", .kind = KIND_TEXT,
     .help = "The libibverbs library, for the rdma transport. Unset: libibverbs.so.1.",
     FIELD(verbs_lib)},
    {.name = "GPUBRIDGE_FAULT", .type = "fault specification", .value = "", .kind = KIND_TEXT,
     .help = "Tests only: damages, delays or cuts this process's own links.",
     FIELD(fault)},
};
/* clang-format on */

#define ROW_COUNT ((int)(sizeof rows / sizeof rows[0]))

/* Read by other parts (the Python package), so not a typing mistake. */
static const char *const elsewhere[] = {"GPUBRIDGE_LIBRARY"};

extern char **environ;

const struct gb_setting *gb_settings_row(int index)
{
    return index >= 0 && index < ROW_COUNT ? &rows[index] : NULL;
}

static const struct gb_setting *row_find(const char *name, size_t n)
{
    for (int i = 0; i < ROW_COUNT; i++)
        if (strlen(rows[i].name) == n && memcmp(rows[i].name, name, n) == 0) return &rows[i];
    return NULL;
}

/* ---- choices ---- */

/* Copies word `index` of "a | b | c"; returns 0 past the end. */
static int choice_word(const char *words, int index, char *out, size_t capacity)
{
    for (const char *at = words;; index--) {
        const char *bar = strstr(at, " | ");
        size_t n = bar ? (size_t)(bar - at) : strlen(at);
        if (index == 0) {
            snprintf(out, capacity, "%.*s", (int)n, at);
            return 1;
        }
        if (!bar) return 0;
        at = bar + 3;
    }
}

static int choice_index(const char *words, const char *value)
{
    char word[32];
    for (int i = 0; choice_word(words, i, word, sizeof word); i++)
        if (strcmp(word, value) == 0) return i;
    return -1;
}

void gb_settings_word(const char *name, int32_t choice, char *word, size_t capacity)
{
    const struct gb_setting *row = row_find(name, strlen(name));
    if (!row || row->kind != KIND_CHOICE || !choice_word(row->type, choice, word, capacity))
        snprintf(word, capacity, "?");
}

/* ---- parsing one value ---- */

static int bad(const struct gb_setting *row, const char *value, const char *why)
{
    return GB_FAIL(GPUBRIDGE_ERR_SETTING, "%s=%s: %s; legal: %s%s", row->name, value, why, row->type,
                   row->per_rank ? ", or a comma list of them by local rank" : "");
}

static int parse_choice(const struct gb_setting *row, const char *value, int32_t *out)
{
    int index = choice_index(row->type, value);
    if (index < 0) return bad(row, value, "not a word it knows");
    if (row->built && index >= row->built) {
        char legal[64] = "", word[32];
        for (int i = 0; i < row->built && choice_word(row->type, i, word, sizeof word); i++) {
            size_t n = strlen(legal);
            snprintf(legal + n, sizeof legal - n, "%s%s", i ? ", " : "", word);
        }
        return GB_FAIL(GPUBRIDGE_ERR_UNSUPPORTED, "%s=%s is not part of this version; it has: %s", row->name, value,
                       legal);
    }
    *out = index;
    return 0;
}

/* Digits and at most one point, then an optional K, M or G (each may be followed by "iB" or "B") if `suffix`. */
static int parse_number(const char *value, int suffix, long double *out)
{
    if (!isdigit((unsigned char)value[0])) return -1;
    char *end;
    long double x = 0, scale = 1;
    for (end = (char *)value; isdigit((unsigned char)*end); end++) x = x * 10 + (*end - '0');
    if (*end == '.')
        for (end++; isdigit((unsigned char)*end); end++) x += (long double)(*end - '0') * (scale /= 10);
    if (suffix && *end) {
        static const char letters[] = "KMGkmg";
        const char *letter = strchr(letters, *end);
        if (letter) {
            x *= (long double)(1ull << (10 * ((letter - letters) % 3 + 1)));
            end++;
            if (*end == 'i') end++;
        }
        if (*end == 'B') end++;
    }
    if (*end) return -1;
    *out = x;
    return 0;
}

/* The word for a number that is not given. */
static const char *auto_word(const struct gb_setting *row)
{
    return row->kind == KIND_SEED ? "off" : "auto";
}

static int parse_scaled(const struct gb_setting *row, const char *value, uint64_t unit, uint64_t *out)
{
    if (row->auto_as && strcmp(value, auto_word(row)) == 0) {
        *out = row->auto_as == AUTO_ZERO ? 0 : UINT64_MAX;
        return 0;
    }
    long double x;
    if (parse_number(value, row->kind == KIND_BYTES, &x) != 0) return bad(row, value, "not a number it can read");
    x = floorl(x * (long double)unit + 0.5L);
    if (x < (long double)row->min || x > (long double)row->max * (row->kind == KIND_MICROS ? 1000.0L : 1.0L)) {
        char why[96];
        long double show = row->kind == KIND_SECONDS ? (long double)unit : 1.0L;
        snprintf(why, sizeof why, "out of range %.10Lg to %.10Lg", (long double)row->min / show,
                 (long double)row->max / show);
        return bad(row, value, why);
    }
    *out = (uint64_t)x;
    return 0;
}

static int parse_ports(const struct gb_setting *row, const char *value, uint16_t out[2])
{
    unsigned low, high;
    int n = 0;
    if (value[0] == 0) {
        out[0] = out[1] = 0;
        return 0;
    }
    if (sscanf(value, "%5u-%5u%n", &low, &high, &n) != 2 || value[n] != 0 || low < 1 || high > 65535 || low > high)
        return bad(row, value, "not two ports from 1 to 65535 in ascending order, like 29600-29663");
    out[0] = (uint16_t)low;
    out[1] = (uint16_t)high;
    return 0;
}

static int parse_text(const struct gb_setting *row, const char *value, char *out)
{
    if (strlen(value) >= row->size) {
        char why[48];
        snprintf(why, sizeof why, "longer than %d bytes", row->size - 1);
        return bad(row, value, why);
    }
    memset(out, 0, row->size);
    memcpy(out, value, strlen(value));
    return 0;
}

static int parse_value(const struct gb_setting *row, const char *value, struct gb_settings *out)
{
    void *field = (char *)out + row->offset;
    uint64_t x = 0;
    switch ((enum kind)row->kind) {
    case KIND_CHOICE:
        return parse_choice(row, value, field);
    case KIND_TEXT:
        return parse_text(row, value, field);
    case KIND_PORTS:
        return parse_ports(row, value, field);
    case KIND_BYTES:
    case KIND_SEED:
        return parse_scaled(row, value, 1, field);
    case KIND_COUNT:
        GB_TRY(parse_scaled(row, value, 1, &x));
        *(uint32_t *)field = (uint32_t)x;
        return 0;
    case KIND_SECONDS:
    case KIND_MICROS:
        GB_TRY(parse_scaled(row, value, row->kind == KIND_SECONDS ? 1000000000u : 1000u, &x));
        *(int64_t *)field = (int64_t)x;
        return 0;
    }
    return 0;
}

/* Item `local_rank` of a comma list; a single item serves every rank. */
static int pick_item(const struct gb_setting *row, const char *value, int local_rank, char *item, size_t capacity)
{
    int count = 1;
    for (const char *c = value; *c; c++) count += *c == ',';
    if (count > 1 && (local_rank < 0 || local_rank >= count))
        return GB_FAIL(
            GPUBRIDGE_ERR_SETTING,
            "%s=%s has %d entries, but this process has local rank %d: give one entry per rank of this host, "
            "or a single one for all",
            row->name, value, count, local_rank);
    const char *at = value;
    for (int i = 0; count > 1 && i < local_rank; i++) at = strchr(at, ',') + 1;
    while (isspace((unsigned char)*at)) at++;
    size_t n = strcspn(at, ",");
    while (n && isspace((unsigned char)at[n - 1])) n--;
    if (n == 0 && count > 1) return bad(row, value, "has an empty entry");
    if (n >= capacity) return bad(row, value, "has an entry that is too long");
    memcpy(item, at, n);
    item[n] = 0;
    return 0;
}

static int apply(const struct gb_setting *row, const char *value, int local_rank, struct gb_settings *out)
{
    char item[128];
    if (value[0] == 0) return parse_value(row, row->value, out);
    if (!row->per_rank) return parse_value(row, value, out);
    GB_TRY(pick_item(row, value, local_rank, item, sizeof item));
    return parse_value(row, item, out);
}

/* ---- sources ---- */

/* Edit distance of two names, for names up to 63 letters. */
static int distance(const char *a, const char *b)
{
    int row[64];
    int na = (int)strnlen(a, 63), nb = (int)strnlen(b, 63);
    for (int j = 0; j <= nb; j++) row[j] = j;
    for (int i = 1; i <= na; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= nb; j++) {
            int best = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            if (row[j] + 1 < best) best = row[j] + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            row[j] = best;
        }
    }
    return row[nb];
}

static const char *nearest_name(const char *name)
{
    int best = 0, best_distance = distance(name, rows[0].name);
    for (int i = 1; i < ROW_COUNT; i++) {
        int d = distance(name, rows[i].name);
        if (d < best_distance) best = i, best_distance = d;
    }
    return rows[best].name;
}

static void warn_unknown(void)
{
    for (char **entry = environ; entry && *entry; entry++) {
        size_t n = strcspn(*entry, "=");
        int known = strncmp(*entry, "GPUBRIDGE_", 10) != 0 || row_find(*entry, n) != NULL;
        for (size_t i = 0; i < sizeof elsewhere / sizeof elsewhere[0]; i++)
            known |= strlen(elsewhere[i]) == n && memcmp(elsewhere[i], *entry, n) == 0;
        if (known) continue;
        char name[64];
        snprintf(name, sizeof name, "%.*s", (int)n, *entry);
        GB_WARN("%s in the environment is no setting and has no effect; did you mean %s?", name, nearest_name(name));
    }
}

/* One "NAME=value" of an override text. */
static int apply_line(const char *line, size_t n, int local_rank, int comm, struct gb_settings *out)
{
    char text[1200];
    if (n >= sizeof text)
        return GB_FAIL(GPUBRIDGE_ERR_SETTING, "a settings line of %zu bytes (%.40s...) is too long; at most %zu", n,
                       line, sizeof text - 1);
    memcpy(text, line, n);
    text[n] = 0;
    while (n && isspace((unsigned char)text[n - 1])) text[--n] = 0;
    char *name = text + strspn(text, " \t");
    if (!*name) return 0;
    char *equals = strchr(name, '=');
    if (!equals) return GB_FAIL(GPUBRIDGE_ERR_SETTING, "settings line \"%s\" is not NAME=value", name);
    *equals = 0;
    const struct gb_setting *row = row_find(name, strlen(name));
    if (!row) return GB_FAIL(GPUBRIDGE_ERR_SETTING, "%s is no setting; did you mean %s?", name, nearest_name(name));
    if (comm && row->scope != GB_SCOPE_COMM)
        return GB_FAIL(GPUBRIDGE_ERR_SETTING,
                       "%s belongs to the process, not to one group: set it in the environment or in the context's "
                       "settings",
                       name);
    return apply(row, equals + 1, local_rank, out);
}

static int apply_text(const char *overrides, int local_rank, int comm, struct gb_settings *out)
{
    for (const char *at = overrides; at && *at;) {
        size_t n = strcspn(at, "\n");
        GB_TRY(apply_line(at, n, local_rank, comm, out));
        at += n + (at[n] == '\n');
    }
    return 0;
}

int gb_settings_load(const char *overrides, int local_rank, struct gb_settings *out)
{
    struct gb_settings settings = {0};
    for (int i = 0; i < ROW_COUNT; i++) {
        const char *value = getenv(rows[i].name);
        GB_TRY(apply(&rows[i], value ? value : "", local_rank, &settings));
    }
    GB_TRY(apply_text(overrides, local_rank, 0, &settings));
    warn_unknown();
    *out = settings;
    return 0;
}

int gb_settings_load_comm(const struct gb_settings *base, const char *overrides, struct gb_settings *out)
{
    struct gb_settings settings = *base;
    GB_TRY(apply_text(overrides, 0, 1, &settings));
    *out = settings;
    return 0;
}

/* ---- what ranks compare ---- */

static void render(const struct gb_setting *row, const struct gb_settings *settings, char *text, size_t capacity)
{
    const void *field = (const char *)settings + row->offset;
    uint64_t x = 0;
    switch ((enum kind)row->kind) {
    case KIND_CHOICE:
        if (!choice_word(row->type, *(const int32_t *)field, text, capacity)) snprintf(text, capacity, "?");
        return;
    case KIND_TEXT:
        snprintf(text, capacity, "%s", (const char *)field);
        return;
    case KIND_PORTS:
        snprintf(text, capacity, "%u-%u", ((const uint16_t *)field)[0], ((const uint16_t *)field)[1]);
        return;
    case KIND_COUNT:
        x = *(const uint32_t *)field;
        break;
    case KIND_BYTES:
    case KIND_SEED:
        x = *(const uint64_t *)field;
        break;
    case KIND_SECONDS:
    case KIND_MICROS:
        x = (uint64_t)*(const int64_t *)field;
        break;
    }
    if ((row->auto_as == AUTO_ZERO && x == 0) || (row->auto_as == AUTO_ONES && x == UINT64_MAX))
        snprintf(text, capacity, "%s", auto_word(row));
    else
        snprintf(text, capacity, "%" PRIu64, x);
}

void gb_settings_agreed_text(const struct gb_settings *settings, char text[GB_SETTINGS_AGREED_BYTES])
{
    size_t n = 0;
    memset(text, 0, GB_SETTINGS_AGREED_BYTES);
    for (int i = 0; i < ROW_COUNT; i++) {
        char value[40];
        if (!rows[i].agreed) continue;
        render(&rows[i], settings, value, sizeof value);
        if (n) text[n++] = ' ';
        for (const char *c = rows[i].name + 10; *c; c++) text[n++] = (char)tolower((unsigned char)*c);
        n += (size_t)snprintf(text + n, GB_SETTINGS_AGREED_BYTES - n, "=%s", value);
    }
}

uint64_t gb_settings_agreed_hash(const struct gb_settings *settings)
{
    char text[GB_SETTINGS_AGREED_BYTES];
    gb_settings_agreed_text(settings, text);
    return XXH3_64bits(text, strlen(text));
}

void gb_settings_agreed_diff(const char *mine, const char *theirs, size_t bytes, char *text, size_t capacity)
{
    size_t n = strnlen(theirs, bytes), start = 0, i = 0;
    for (; mine[i] && i < n && mine[i] == theirs[i]; i++)
        if (mine[i] == ' ') start = i + 1;
    if (!mine[i] && i == n) {
        snprintf(text, capacity, "the agreed settings are equal");
        return;
    }
    const char *equals = strchr(mine + start, '=');
    size_t name = equals ? (size_t)(equals - (mine + start)) : 0;
    if (!name || n < start + name + 1 || memcmp(mine + start, theirs + start, name + 1) != 0) {
        snprintf(text, capacity, "the two sides have different settings, so their library versions differ");
        return;
    }
    size_t at = start + name + 1, there = at;
    while (there < n && theirs[there] != ' ' && isprint((unsigned char)theirs[there])) there++;
    char upper[48];
    size_t u = 0;
    for (; u < name && u < sizeof upper - 1; u++) upper[u] = (char)toupper((unsigned char)mine[start + u]);
    upper[u] = 0;
    snprintf(text, capacity, "GPUBRIDGE_%s is %.*s here and %.*s there; set it to one value on all ranks", upper,
             (int)strcspn(mine + at, " "), mine + at, (int)(there - at), theirs + at);
}
