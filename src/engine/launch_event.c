/* SPDX-License-Identifier: Apache-2.0
 * Events of the launcher: a stock of them, and the two calls that user threads make with their own streams. */
#include "engine/launch.h"

#include <stdlib.h>

int gb_launch_event_get(struct gb_launcher *launcher, void **event)
{
    void *found = NULL;
    pthread_mutex_lock(&launcher->lock);
    if (launcher->nevents) found = launcher->events[--launcher->nevents];
    pthread_mutex_unlock(&launcher->lock);
    if (!found) GB_TRY(gb_event_create(launcher->device, &found));
    *event = found;
    return 0;
}

/* Caller holds the lock.  An event that cannot be kept stays with the driver until the context goes. */
static void keep(struct gb_launcher *launcher, void *event)
{
    if (launcher->nevents == launcher->events_capacity) {
        uint32_t capacity = launcher->events_capacity ? launcher->events_capacity * 2 : 64;
        void **grown = realloc(launcher->events, capacity * sizeof *grown);
        if (!grown) return;
        launcher->events = grown;
        launcher->events_capacity = capacity;
    }
    launcher->events[launcher->nevents++] = event;
}

void gb_launch_event_put(struct gb_launcher *launcher, void *event)
{
    if (event) keep(launcher, event);
}

void gb_launch_events_fini(struct gb_launcher *launcher)
{
    for (uint32_t i = 0; i < launcher->nevents; i++) gb_event_destroy(launcher->device, launcher->events[i]);
    free(launcher->events);
    launcher->events = NULL;
    launcher->nevents = launcher->events_capacity = 0;
}

static int record_entered(struct gb_launcher *launcher, void *stream, void **event)
{
    void *fresh = NULL;
    int capturing = 0;
    GB_TRY(gb_stream_is_capturing(launcher->device, stream, &capturing));
    if (capturing)
        return GB_FAIL(
            GPUBRIDGE_ERR_UNSUPPORTED,
            "the stream is being captured into a graph: collectives that cross the network cannot be captured; issue "
            "them outside the capture");
    GB_TRY(gb_launch_event_get(launcher, &fresh));
    int rc = gb_event_record(launcher->device, fresh, stream);
    if (rc) {
        gb_launcher_forget(launcher, fresh);
        return rc;
    }
    *event = fresh;
    return 0;
}

int gb_launcher_record(struct gb_launcher *launcher, void *stream, void **event)
{
    struct gb_device_saved saved;
    GB_TRY(gb_device_enter(launcher->device, &saved));
    int rc = record_entered(launcher, stream, event);
    gb_device_leave(launcher->device, &saved);
    return rc;
}

void gb_launcher_forget(struct gb_launcher *launcher, void *event)
{
    pthread_mutex_lock(&launcher->lock);
    gb_launch_event_put(launcher, event);
    pthread_mutex_unlock(&launcher->lock);
}

int gb_launcher_wait_stream(struct gb_launcher *launcher, struct gb_dev_op *op, void *stream)
{
    struct gb_device_saved saved;
    GB_TRY(gb_device_enter(launcher->device, &saved));
    int rc = gb_stream_wait_event(launcher->device, stream, op->done);
    gb_device_leave(launcher->device, &saved);
    return rc;
}
