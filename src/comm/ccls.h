/* SPDX-License-Identifier: Apache-2.0
 *
 * ccls.h: the vendor communicators of a context, one per distinct set of island members, shared by the groups that have
 * it, made at their first use.  Not the order of their use: turns.h.  Engine role. */
#ifndef GB_COMM_CCLS_H
#define GB_COMM_CCLS_H

#include "comm/context.h"

/* Of the agreement to create one: READY, YES and NO go to the lowest member, the others come from it. */
enum gb_ccl_word { GB_CCL_READY, GB_CCL_FREEZE, GB_CCL_YES, GB_CCL_NO, GB_CCL_GO, GB_CCL_THAW, GB_CCL_WORDS };

/* At comm creation: which vendor communicator is used; every member decides the same from the hellos. */
void gb_ccls_join(gpubridge_comm *comm);
/* Before a use is announced: the lowest member makes the id and sends it. */
int gb_ccls_offer(gpubridge_comm *comm) GB_NODISCARD;
/* For an operation that is next: 0, the communicator is the group's now; GPUBRIDGE_AGAIN, it is being made, and
 * gb_turns_advance is called once it is; else why it cannot be made. */
int gb_ccls_use(gpubridge_comm *comm) GB_NODISCARD;
void gb_ccls_on_id(gpubridge_context *context, uint64_t set, const uint8_t id[GB_CCL_ID_BYTES]);
void gb_ccls_on_word(gpubridge_context *context, const struct gb_link *link, enum gb_ccl_word word, uint64_t set,
                     uint32_t round);
/* Now and then: operations that are held for an agreement go on after a while. */
void gb_ccls_tick(gpubridge_context *context, uint64_t now);
/* A comm was aborted, and none of its operations is next any more: its vendor communicator, and the comms that share
 * it, go too. */
void gb_ccls_aborted(gpubridge_context *context, gpubridge_comm *comm);
/* User thread, no comm is left: waits until the launcher makes no communicator any more, which reports to the engine.
 */
void gb_ccls_quiesce(gpubridge_context *context);
/* No comm is left: frees what remains. */
void gb_ccls_close(gpubridge_context *context);

#endif
