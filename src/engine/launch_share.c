/* SPDX-License-Identifier: Apache-2.0
 * Staging memory that processes of one host share: ours, registered with our device and offered to the peers, and
 * theirs, registered here too, so that this device copies messages straight out of it.  Registering is a driver call,
 * so a region is used only once its reader has said that it did so: no flag ever waits for one. */
#include "engine/launch.h"

#include "base/log.h"

#include <stdlib.h>

/* ---- ours; after gb_device_enter ---- */

int gb_launch_region_make(struct gb_launch_pool *pool, struct gb_net *net, uint64_t bytes, struct gb_region *region)
{
    int is_registered = 0, rc = gb_region_make(bytes, region);
    if (!rc) rc = gb_device_host_register(pool->device, region->base, bytes);
    is_registered = !rc;
    if (!rc) rc = gb_net_offer(net, region);
    if (!rc) return 0;
    pthread_mutex_lock(&pool->lock);
    if (pool->net)
        GB_WARN("staging memory is not shared with processes of this host, messages to them are copied: %s",
                gb_err_text());
    pool->net = NULL; /* said once */
    pthread_mutex_unlock(&pool->lock);
    if (is_registered) gb_device_host_unregister(pool->device, region->base);
    if (region->base) gb_region_free(region);
    return rc;
}

void gb_launch_region_free(struct gb_launch_pool *pool, struct gb_region *region)
{
    gb_device_host_unregister(pool->device, region->base);
    gb_region_free(region);
}

void gb_launcher_share(struct gb_launcher *launcher, struct gb_net *net)
{
    pthread_mutex_lock(&launcher->stage.lock);
    if (!launcher->is_shared) launcher->stage.net = net;
    launcher->is_shared = 1;
    pthread_mutex_unlock(&launcher->stage.lock);
}

/* ---- theirs; launcher thread ---- */

int gb_launcher_can_borrow(const struct gb_launcher *launcher)
{
    return launcher->has_kernels && (launcher->fetch || !launcher->gated);
}

static int keep(struct gb_launcher *launcher, void *base)
{
    if (launcher->nborrowed == launcher->borrowed_capacity) {
        uint32_t capacity = launcher->nborrowed ? 2 * launcher->nborrowed : 16;
        void **grown = (void **)realloc((void *)launcher->borrowed, capacity * sizeof *grown);
        if (!grown) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory to note a peer's staging");
        launcher->borrowed = grown;
        launcher->borrowed_capacity = capacity;
    }
    launcher->borrowed[launcher->nborrowed++] = base;
    return 0;
}

struct offer {
    struct gb_launcher *launcher;
    void *region;
};

static void take_region(void *arg)
{
    struct offer *offer = arg;
    struct gb_launcher *launcher = offer->launcher;
    uint64_t bytes;
    void *base = gb_region_address(offer->region, &bytes);
    int rc = gb_device_host_register(launcher->device, base, bytes);
    if (!rc && keep(launcher, base) != 0) {
        gb_device_host_unregister(launcher->device, base);
        rc = GPUBRIDGE_ERR_NO_MEMORY;
    }
    if (rc && !launcher->told_foreign++)
        GB_WARN("messages of processes of this host are copied, their memory cannot be registered with this device: %s",
                gb_err_text());
    gb_region_answer(offer->region, rc ? GB_REGION_FAILED : GB_REGION_TAKEN);
    free(offer);
}

void gb_launcher_take_region(struct gb_launcher *launcher, void *region)
{
    struct offer *offer = gb_launcher_can_borrow(launcher) ? malloc(sizeof *offer) : NULL;
    if (!offer) {
        gb_region_answer(region, GB_REGION_UNWANTED);
        return;
    }
    *offer = (struct offer){launcher, region};
    gb_launcher_call(launcher, take_region, offer);
}

void gb_launch_share_fini(struct gb_launcher *launcher)
{
    for (uint32_t i = 0; i < launcher->nborrowed; i++)
        gb_device_host_unregister(launcher->device, launcher->borrowed[i]);
    launcher->nborrowed = 0;
}
