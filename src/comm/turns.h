/* SPDX-License-Identifier: Apache-2.0
 *
 * turns.h: the order of vendor calls between groups.  The *leader* hears from every rank that may call a vendor library
 * (of all islands) when it has submitted such an operation, and gives a ticket once all of the group's have.  Tickets
 * reach every rank in one order, so all islands do vendor operations in one order, whatever the order of submission:
 * two islands with two orders would wait for each other across the bridge.  One leader for all groups is found when the
 * first group has all such ranks, as torch's world does.  Vendor communicators are made at their first use, in the same
 * order, one per distinct set of island members.  Engine role. */
#ifndef GB_COMM_TURNS_H
#define GB_COMM_TURNS_H

#include "comm/context.h"

/* At comm creation: fixes who leads; every member decides the same from the hellos. */
void gb_turns_join(gpubridge_comm *comm);
void gb_turns_announce(gpubridge_context *context, struct gb_op *op);
/* Messages.  `link` NULL: from this process itself. */
void gb_turns_on_announce(gpubridge_context *context, struct gb_link *link, uint64_t group, uint32_t seq,
                          uint32_t members);
void gb_turns_on_ticket(gpubridge_context *context, uint64_t group, uint32_t seq);
/* Starts, in order, what has its ticket and its vendor communicator. */
void gb_turns_advance(gpubridge_context *context);
/* A comm was aborted: drops its waiting turns, and what ccls.h says. */
void gb_turns_aborted(gpubridge_context *context, gpubridge_comm *comm);
/* No comm is left: frees what remains. */
void gb_turns_close(gpubridge_context *context);

#endif
