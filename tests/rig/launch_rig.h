/* SPDX-License-Identifier: Apache-2.0
 * Ranks of one process, each with a device and a launcher, that execute real plans.  The network between them is a loop
 * of the test's own: it looks at flags, moves bytes between staging areas and stores flags, as the engine does, and can
 * be held.  Every call ends the test on failure. */
#ifndef GB_TESTS_LAUNCH_RIG_H
#define GB_TESTS_LAUNCH_RIG_H

#include "device/device.h"
#include "engine/launcher.h"

#define RIG_MAX_RANKS    6
#define RIG_PINNED_BYTES (16u << 20)

struct rig_rank {
    struct gb_device *device;
    struct gb_launcher *launcher;
    struct gb_ccl_comm *ccl;
    void *stream; /* the user's */
    void *pinned;
    _Atomic uint32_t wakes;
};

struct rig {
    uint32_t nranks;
    struct gb_topo *topo;
    struct rig_rank rank[RIG_MAX_RANKS];
};

/* One operation on all ranks. */
struct rig_op {
    struct rig *rig;
    struct gb_plan_spec spec;
    struct rig_side {
        struct gb_plan *plan;
        struct gb_dev_op op;
        void *dev_mem, *host_mem;
        uint8_t *net; /* [nsteps] 1: this network step is finished */
        uint32_t *meets, look[RIG_MAX_RANKS];
    } side[RIG_MAX_RANKS];
};

/* `letters`: the island of each rank; upper case N...Z with the first letter CUDA islands, H to M HIP islands.  `gate`:
 * of the CUDA ranks. */
void rig_open(struct rig *rig, const char *letters, int gate);
void rig_close(struct rig *rig);

void *rig_device_mem(struct rig *rig, uint32_t rank, uint64_t bytes);
void rig_device_free(struct rig *rig, uint32_t rank, void *mem);
/* On the rank's user stream, which is waited for. */
void rig_put(struct rig *rig, uint32_t rank, void *mem, const void *data, uint64_t bytes);
void rig_get(struct rig *rig, uint32_t rank, void *data, const void *mem, uint64_t bytes);
void rig_sync(struct rig *rig, uint32_t rank);

/* Plans, records the ready events and starts the operation on all ranks. */
struct rig_op *rig_start(struct rig *rig, const struct gb_plan_spec *spec, void *const *in, void *const *out,
                         uint32_t set);
/* One look of the network; at most `budget` messages.  Returns the number moved. */
int rig_step(struct rig_op *op, int budget);
int rig_is_done(const struct rig_op *op);
/* Until all ranks are done.  Fails after a minute. */
void rig_wait(struct rig_op *op);
void rig_free(struct rig_op *op);

#endif
