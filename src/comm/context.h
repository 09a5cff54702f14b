/* SPDX-License-Identifier: Apache-2.0
 *
 * context.h: one rank's process-wide state, and the comms that live in it. */
#ifndef GB_COMM_CONTEXT_H
#define GB_COMM_CONTEXT_H

#include "base/config.h"
#include "ccl/ccl.h"
#include "engine/engine.h"
#include "wire/member.h"

#include <sys/types.h>

struct gb_device;
struct gb_turn;       /* turns.c */
struct gb_shared_ccl; /* ccls.c */

/* Order of device operations between groups, vendor communicators (turns.h).  Engine role. */
struct gb_turns {
    struct gb_uuid leader;                     /* of all GPU ranks; zero: none known */
    struct gb_turn *waiting;                   /* as leader: operations that some members announced */
    struct gb_shared_ccl *ccls;                /* vendor communicators by member set */
    struct gb_shared_ccl *holder;              /* holds the launcher back: it is being agreed on or made; NULL: none */
    struct gb_op *granted_head, *granted_tail; /* have their ticket, wait for their vendor communicator */
    uint32_t epoch;                            /* vendor communicators aborted so far */
};

struct gb_lost_link { /* why a link went down, for comms that are being made */
    struct gb_link *link;
    int status;
    char text[400];
    struct gb_lost_link *next;
};

struct gb_stray_abort { /* aborts of groups that are not made here yet */
    uint64_t group;
    int status;
    char text[400];
    struct gb_stray_abort *next;
};

struct gpubridge_context {
    pid_t pid; /* another value in a child after fork */
    struct gb_uuid uuid;
    int32_t global_rank, local_rank;
    char host[64];
    uint64_t host_id;
    char island[64]; /* island key */
    char versions[64];
    struct gb_settings settings;
    int device_kind; /* enum gpubridge_device_kind */
    int device_index;
    char device_id[64];
    int emulated;
    struct gb_device *device; /* NULL on a CPU */
    struct gb_launcher *launcher;
    const struct gb_ccl *ccl;
    char ccl_name[48];     /* "NCCL 2.28.9"; "" when none can be opened */
    char ccl_missing[400]; /* why not */
    struct gb_pool *pool;
    struct gb_net *net;
    struct gb_engine *engine;
    struct gb_turns turns;
    struct gb_link *leader_link;         /* engine role: held, to turns.leader; NULL: this process, or nobody known */
    struct gb_stray_abort *stray_aborts; /* engine role */
    pthread_mutex_t lock;
    uint32_t next_stream_set;     /* guarded by lock */
    int farewell_status;          /* guarded by lock: the first culprit this process knows of goes into its GOODBYE */
    char farewell[400];           /* guarded by lock */
    char own_reason[192];         /* guarded by lock: of leaving, when no peer is the culprit */
    struct gb_lost_link *lost;    /* guarded by lock */
    struct gb_uuid *proven;       /* guarded by lock: peers whose link passed the self-test */
    size_t nproven;               /* guarded by lock */
    struct gpubridge_comm *comms; /* engine role */
};

struct gb_member {
    struct gb_member_hello hello;
    uint8_t has_left; /* engine role: destroyed the comm or said goodbye */
};

struct gpubridge_comm {
    gpubridge_context *context;
    struct gb_group group;
    struct gb_member *members; /* [size] */
    struct gb_settings settings;
    uint64_t birth;
    uint64_t ccl_set;            /* key of the vendor communicator of this rank's island */
    struct gb_link *leader_link; /* gives tickets; NULL: this process does */
    struct gpubridge_comm *next; /* engine role */
};

/* Not NULL and not used after fork. */
int gb_context_check(const gpubridge_context *context) GB_NODISCARD;
/* A counted link to a member. */
int gb_comm_get_link(gpubridge_comm *comm, uint32_t rank, struct gb_link **link) GB_NODISCARD;

/* self_test.c: proves the links that are new to this process; fails with the edge named.  User thread. */
int gb_comm_self_test(gpubridge_comm *comm) GB_NODISCARD;

/* control.c: the engine's hooks */
void gb_control_hooks(gpubridge_context *context, struct gb_engine_hooks *hooks);
/* Engine role: tells every member that this rank leaves the comm. */
void gb_control_leave(gpubridge_comm *comm);
/* Engine role: to the leader (an announcement of an operation of `members` ranks), or from it (a ticket). */
void gb_control_send_turn(struct gb_link *link, int ticket, uint64_t group, uint32_t seq, uint32_t members);
void gb_control_send_ccl_id(struct gb_link *link, uint64_t set, const uint8_t id[GB_CCL_ID_BYTES]);
/* About the vendor communicator of `set`: enum gb_ccl_word of ccls.h. */
void gb_control_send_ccl_word(struct gb_link *link, int word, uint64_t set, uint32_t round);
/* Engine role. */
gpubridge_comm *gb_context_find_comm(gpubridge_context *context, uint64_t group);

/* island.c: device, launcher and vendor library of a context; island key */
int gb_island_open(gpubridge_context *context, int device_kind, int device_index) GB_NODISCARD;
void gb_island_close(gpubridge_context *context);

#endif
