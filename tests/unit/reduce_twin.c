/* SPDX-License-Identifier: Apache-2.0
 * The GPU kernels of kernels.inc as a CPU twin, run over a whole grid in turn: what a run-time compiler would be given.
 */
#include "codec/reduce.h"

#include "reduce_twin.h"

static unsigned tid, bid, bdim, gdim;

#define GB_KERNEL static
#define GB_TID    tid
#define GB_BID    bid
#define GB_BDIM   bdim
#define GB_GDIM   gdim
#include "codec/kernels.inc"

void twin_reduce(int way, const struct gb_reduce_args *args, unsigned blocks, unsigned threads)
{
    gdim = blocks;
    bdim = threads;
    for (bid = 0; bid < gdim; bid++)
        for (tid = 0; tid < bdim; tid++)
            if (way == GB_WAY_PACK)
                gb_pack(*args);
            else if (way == GB_WAY_ADD)
                gb_add(*args);
            else
                gb_reduce(*args);
}

void twin_poison(void *dst, uint64_t bytes, const uint32_t *given_up)
{
    gdim = 2;
    bdim = 3;
    for (bid = 0; bid < gdim; bid++)
        for (tid = 0; tid < bdim; tid++) gb_poison(dst, bytes, given_up);
}
