/* SPDX-License-Identifier: Apache-2.0
 * A CUSUM on "this rank arrived last" against the rank's own learned rate (section 8 of docs/straggler-engine.md): free
 * of any scale or noise model.  One rank at a time, on the engine's thread. */
#include "straggler/num.h"
#include "straggler/stream.h"

#include <math.h>

#define ARM_ARRIVALS 200.0

void gb_arrivals_reset(struct gb_arrivals *a)
{
    memset(a, 0, sizeof *a);
}

/* Likelihood-ratio weights for a doubled rate, and the threshold widened for runs of arrivals. */
static void refresh(struct gb_arrivals *a, const struct gb_tables *t)
{
    double p = a->last / a->steps;
    a->refresh_at = a->steps + (a->steps < 51200.0 ? a->steps * 0.125 : 6400.0);
    if (a->last < ARM_ARRIVALS || p > 0.6) {
        a->armed = 0;
        return;
    }
    double faster = p <= 0.25 ? 2.0 * p : p + (1.0 - p) / 3.0;
    double phi = (a->repeat / a->last - p) / (1.0 - p) + sqrt(p / (a->last * (1.0 - p)));
    phi = phi < 0.0 ? 0.0 : phi > 0.95 ? 0.95 : phi;
    a->weight_last = (float)gb_log(faster / p);
    a->weight_other = (float)gb_log((1.0 - faster) / (1.0 - p));
    a->threshold = (float)(t->count_threshold * (1.0 + phi) / (1.0 - phi));
    if (!a->armed) a->score = a->run = 0.0f;
    a->armed = 1;
}

static void commit(struct gb_arrivals *a, const struct gb_tables *t)
{
    a->steps += (double)a->pending_steps;
    a->last += (double)a->pending_last;
    a->repeat += (double)a->pending_repeat;
    a->pending_steps = a->pending_last = a->pending_repeat = 0.0f;
    if (a->steps >= 1048576.0) {
        a->steps *= 0.5;
        a->last *= 0.5;
        a->repeat *= 0.5;
        a->refresh_at = a->steps;
    }
    if (a->steps >= a->refresh_at && a->steps >= 200.0) refresh(a, t);
}

/* `gap` observed steps in which another rank was the last, all at once: the score only falls, so no alarm hides here.
 */
void gb_arrivals_skip(struct gb_arrivals *a, int64_t gap, const struct gb_tables *t)
{
    if (gap <= 0) return;
    double n = (double)gap, s = (double)a->score + n * (double)a->weight_other;
    a->was_last = 0;
    a->pending_steps = (float)((double)a->pending_steps + n);
    a->score = (float)(a->armed && s > 0.0 ? s : 0.0);
    a->run = a->score > 0.0f ? (float)((double)a->run + n) : 0.0f;
    if (a->score == 0.0f) commit(a, t);
}

int gb_arrivals_last(struct gb_arrivals *a, const struct gb_tables *t)
{
    a->pending_steps += 1.0f;
    a->pending_last += 1.0f;
    a->pending_repeat += a->was_last ? 1.0f : 0.0f;
    a->was_last = 1;
    if (!a->armed) {
        commit(a, t);
        return 0;
    }
    a->score = (float)((double)a->score + (double)a->weight_last);
    a->run += 1.0f;
    return (double)a->score >= (double)a->threshold * (1.0 + (double)a->run / a->steps);
}
