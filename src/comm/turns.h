/* SPDX-License-Identifier: Apache-2.0
 *
 * turns.h: the order of device operations between groups.  The *leader* hears from every GPU rank of a group when it
 * has submitted such an operation, and gives a ticket once all of them have.  Tickets reach every rank in one order, so
 * all ranks start these operations in one order, whatever the order of submission: vendor calls of an island must, two
 * islands with two orders would wait for each other across the bridge, and so would a rank that makes a vendor
 * communicator, which drains the device, and one that does not.  One leader for all groups is found when the first
 * group with vendor calls has all GPU ranks, as torch's world does; a job in which no island has several GPUs has none
 * and takes no turns.  Nor do point-to-point and small operations.
 *
 * A vendor communicator is made at its first use, when that is next (ccls.h).  Creation holds the launcher until all
 * members have come and this device is empty, so it must wait for nothing but them.  Hence its members agree first:
 *   member, next and idle    READY  -> lowest member (made the id)
 *   lowest, all are READY    FREEZE -> members: hold operations back from the device; YES if it is empty, else NO
 *   lowest                   all YES: GO, all create, then go on; a NO: THAW, all go on, READY again when idle
 * Nothing circular is left.  Tickets have one order, so of the sets that are waited for the one with the earliest
 * ticket is next on all its members, and what is on their devices are operations with earlier tickets, which all their
 * ranks have started or will without this one, and others, which keep no order and go on as long as nobody has said
 * YES. Who said YES waits for answers, which nobody delays; who creates waits for members that create.  Engine role. */
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
