/* SPDX-License-Identifier: Apache-2.0
 * The settings table: every knob of the library is one row here, and nothing else reads the environment.  Loading
 * parses all rows into a typed struct, so the rest of the code sees numbers and enums.  Called while a context or comm
 * is made, never on the data path; any thread, as long as nobody calls setenv at the same time. */
#ifndef GB_BASE_CONFIG_H
#define GB_BASE_CONFIG_H

#include "base/err.h"

#include <stddef.h>
#include <stdint.h>

/* The order of each enum is the order of the words in the row's type. */
enum gb_emulate { GB_EMULATE_NONE, GB_EMULATE_CUDA, GB_EMULATE_HIP };
enum gb_island_by { GB_ISLAND_BY_ARCH, GB_ISLAND_BY_VENDOR, GB_ISLAND_BY_HOST };
enum gb_island_reduce { GB_ISLAND_REDUCE_EXACT, GB_ISLAND_REDUCE_NATIVE };
enum gb_gate { GB_GATE_AUTO, GB_GATE_ON, GB_GATE_OFF };
enum gb_transport_choice {
    GB_TRANSPORT_AUTO,
    GB_TRANSPORT_TCP,
    GB_TRANSPORT_INPROC,
    GB_TRANSPORT_SHM,
    GB_TRANSPORT_RDMA
};
enum gb_compression {
    GB_COMPRESSION_NONE,
    GB_COMPRESSION_BF16,
    GB_COMPRESSION_FP16,
    GB_COMPRESSION_FP8,
    GB_COMPRESSION_FP8_E5M2,
    GB_COMPRESSION_INT8,
    GB_COMPRESSION_MXFP4,
    GB_COMPRESSION_AUTO
};
enum gb_compression_dtypes { GB_COMPRESSION_ALL, GB_COMPRESSION_F32, GB_COMPRESSION_HALF };
enum gb_checksum { GB_CHECKSUM_OFF, GB_CHECKSUM_ON, GB_CHECKSUM_AUTO };
enum gb_poll { GB_POLL_SPIN, GB_POLL_ADAPTIVE, GB_POLL_EVENT };

#define GB_FLAT_BYTES_AUTO UINT64_MAX
#define GB_SPIN_NS_AUTO    (-1)
#define GB_SEED_OFF        UINT64_MAX

struct gb_settings {
    int32_t emulate;       /* enum gb_emulate, picked by local rank */
    char island[64];       /* label of this rank's island, picked by local rank; "": by island_by */
    int32_t island_by;     /* enum gb_island_by */
    int32_t island_reduce; /* enum gb_island_reduce */
    int32_t gate;          /* enum gb_gate */
    uint64_t mem_bytes;
    int32_t transport;      /* enum gb_transport_choice; gb_settings_word gives its name */
    uint32_t lanes;         /* 0: auto */
    uint32_t workers;       /* 0: auto */
    uint64_t chunk_bytes;   /* 0: auto */
    uint64_t flat_bytes;    /* GB_FLAT_BYTES_AUTO: auto; 0: never */
    int32_t shared_staging; /* 0 / 1 */
    uint64_t host_bytes;    /* GB_FLAT_BYTES_AUTO: auto; 0: never */
    int32_t compression;    /* enum gb_compression */
    uint64_t compression_min_bytes;
    int32_t compression_dtypes; /* enum gb_compression_dtypes */
    int32_t compression_gather; /* 0 / 1 */
    uint64_t compression_seed;  /* of stochastic rounding; GB_SEED_OFF: to nearest */
    char ifname[256];           /* "": by route */
    uint16_t port_range[2];     /* inclusive; 0, 0: any free port */
    char secret_file[1024];     /* "": the secret comes from the context's config */
    int32_t encrypt;            /* 0 / 1 */
    int32_t checksum;           /* enum gb_checksum */
    int32_t self_test;          /* 0 / 1 */
    int32_t blocking_wait;      /* 0 / 1 */
    int32_t poll;               /* enum gb_poll */
    int64_t spin_ns;            /* GB_SPIN_NS_AUTO: auto */
    int32_t log;                /* enum gb_log_level */
    int64_t peer_timeout_ns;
    int64_t connect_timeout_ns;
    char cache_dir[1024]; /* "": the user's; "off": none */
    char cuda_lib[1024], hip_lib[1024], nccl_lib[1024], rccl_lib[1024], verbs_lib[1024]; /* "": searched */
    char fault[256]; /* test only: specification of transport/fault.h */
};

enum gb_setting_scope { GB_SCOPE_CONTEXT, GB_SCOPE_COMM };

struct gb_setting {
    const char *name;  /* environment name */
    const char *type;  /* choices: the words, separated by " | "; else words for the reader */
    const char *value; /* default, as it would be typed */
    const char *help;
    uint8_t kind;          /* private to config.c */
    uint8_t scope;         /* enum gb_setting_scope: COMM may be overridden for one comm */
    uint8_t agreed;        /* must be equal on all ranks of a comm */
    uint8_t per_rank;      /* a comma list gives one value per local rank */
    uint8_t built;         /* choices: the first `built` words work in this version; 0: all */
    uint8_t auto_as;       /* private to config.c */
    uint16_t offset, size; /* of the field in struct gb_settings */
    uint64_t min, max;
};

/* NULL past the end. */
const struct gb_setting *gb_settings_row(int index);

/* Fills *out from the defaults, then the environment, then `overrides` ("NAME=value\n...", may be NULL).  An empty
 * value means the default.  GPUBRIDGE_ERR_SETTING names the variable, its value and what is legal;
 * GPUBRIDGE_ERR_UNSUPPORTED: the value is known but not part of this version.  An unknown GPUBRIDGE_ name is a warning
 * in the environment and an error in `overrides`. */
int gb_settings_load(const char *overrides, int local_rank, struct gb_settings *out) GB_NODISCARD;
/* *out = *base with the overrides of one comm; settings of context scope are refused there. */
int gb_settings_load_comm(const struct gb_settings *base, const char *overrides, struct gb_settings *out) GB_NODISCARD;

/* The word of a choice: gb_settings_word("GPUBRIDGE_TRANSPORT", GB_TRANSPORT_TCP, ...) -> "tcp".  `word` holds >= 16.
 */
void gb_settings_word(const char *name, int32_t choice, char *word, size_t capacity);

/* "chunk_bytes=auto transport=tcp ...": all agreed settings in table order, in canonical form, at most
 * GB_SETTINGS_AGREED_BYTES with the 0.  Equal texts have equal hashes, on every machine. */
#define GB_SETTINGS_AGREED_BYTES 384
void gb_settings_agreed_text(const struct gb_settings *settings, char text[GB_SETTINGS_AGREED_BYTES]);
uint64_t gb_settings_agreed_hash(const struct gb_settings *settings);
/* Words for the first difference of two agreed texts: "GPUBRIDGE_CHUNK_BYTES is auto here and 65536 there".  `theirs`
 * may come from a peer: any bytes up to `bytes`. */
void gb_settings_agreed_diff(const char *mine, const char *theirs, size_t bytes, char *text, size_t capacity);

#endif
