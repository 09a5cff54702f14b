/* SPDX-License-Identifier: Apache-2.0
 *
 * fault.h: a transport that wraps another one and misbehaves on order.  Tests only (gb_net_config.fault).
 *
 * Specification: items joined by ';', each LANE:ACTION.  LANE is control, express, bulk, bulkN or all.  Offsets count
 * the bytes that this process writes on the lane after its handshake.
 *   - corrupt@N  flips a bit of byte N
 *   - close@N    shuts the connection down at byte N
 *   - stall@N    writes nothing after byte N
 *   - drop@N     claims to write, but nothing leaves, after byte N
 *   - short=N    reads and writes at most N bytes per call
 *   - delay=N    sleeps N microseconds before every write
 *   - late=N     control only: finds no room for N microseconds before every write, without sleeping
 */
#ifndef GB_TRANSPORT_FAULT_H
#define GB_TRANSPORT_FAULT_H

#include "transport/transport.h"

int gb_fault_open(struct gb_net *net, const char *spec) GB_NODISCARD; /* NULL or "": no wrapping */
void gb_fault_close(struct gb_net *net);
void gb_fault_lane_up(struct gb_sock *sock); /* counting starts */

#endif
