/* SPDX-License-Identifier: Apache-2.0
 * Moving bytes between ranks: a set of sends and receives that progress together on the calling worker.  */
#ifndef EMU_NCCL_MOVE_H
#define EMU_NCCL_MOVE_H

#include "nccl.h"

/* In front of every message: what the sender is doing, so that a receiver in another place notices. */
struct nccl_msg {
    uint32_t kind, dtype, op, root, phase, pad;
    uint64_t count, bytes, collective;
    uint64_t reserved[2];
};
struct nccl_xfer {
    int peer;
    bool is_send, done;
    char *data;
    size_t moved; /* header included */
    uint64_t end; /* sends: ring position after the last byte, once it is in */
    struct nccl_msg msg;
};
/* Runs until all transfers are done.  False: aborted, or the device failed.  A send is done when its receiver has taken
 * it all.  After an order mismatch it waits for the abort, as the real library does. */
bool nccl_move(struct nccl_comm *c, uint64_t batch, struct nccl_xfer *x, int count);

#endif
