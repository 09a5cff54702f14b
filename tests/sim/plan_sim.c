/* SPDX-License-Identifier: Apache-2.0
 * Runs random worlds.  `plan_sim [cases] [seed]`, or GB_SIM_CASES; `plan_sim 1 SEED` replays one that failed.
 * After the worlds it damages plans on purpose and demands that this is seen. */
#include "sim.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

struct tally {
    uint64_t worlds, ops, steps, messages, lent, calls, failed;
    uint64_t damaged[SIM_DAMAGE_COUNT], seen[SIM_DAMAGE_COUNT];
};

/* 0 right, 1 wrong, -1 nothing to damage. */
static int one(uint64_t seed, enum sim_damage damage, struct tally *tally, int quiet)
{
    struct sim_world *w = malloc(sizeof *w);
    if (!w) abort();
    int rc = sim_world_init(w, seed);
    if (!rc && damage != SIM_NO_DAMAGE && !sim_world_damage(w, damage)) rc = -2;
    if (rc == 0) rc = sim_run(w);
    tally->worlds++;
    tally->ops += w->nops;
    tally->steps += w->nsteps;
    tally->messages += w->nmessages;
    tally->lent += w->nlent;
    tally->calls += w->ncalls;
    if (rc == -1 && !quiet) {
        printf("seed %" PRIu64 ": %s\n", seed, w->text);
        sim_world_print(w, stdout);
    }
    sim_world_fini(w);
    free(w);
    return rc == -2 ? -1 : rc != 0;
}

int main(int argc, char **argv)
{
    const char *env = getenv("GB_SIM_CASES");
    uint64_t cases = argc > 1 ? strtoull(argv[1], NULL, 10) : env ? strtoull(env, NULL, 10) : 4000;
    uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    struct tally t = {0};
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (uint64_t i = 0; i < cases && t.failed < 5; i++) t.failed += one(seed + i, SIM_NO_DAMAGE, &t, 0) == 1;
    printf("%" PRIu64 " worlds, %" PRIu64 " operations, %" PRIu64 " steps, %" PRIu64 " messages (%" PRIu64
           " lent), %" PRIu64 " vendor calls: %" PRIu64 " failed\n",
           t.worlds, t.ops, t.steps, t.messages, t.lent, t.calls, t.failed);
    if (cases < 100) return t.failed != 0;

    static const char *const names[] = {"",
                                        "forgotten dependencies",
                                        "shortened messages",
                                        "swapped vendor calls",
                                        "folds in another order",
                                        "crossed waits"};
    struct tally ignored = {0};
    for (int d = 1; d < SIM_DAMAGE_COUNT; d++) {
        for (uint64_t i = 0; i < cases && t.damaged[d] < 100; i++) {
            int rc = one(seed + i, (enum sim_damage)d, &ignored, 1);
            t.damaged[d] += rc >= 0;
            t.seen[d] += rc == 1;
        }
        printf("%s: %" PRIu64 " of %" PRIu64 " seen\n", names[d], t.seen[d], t.damaged[d]);
    }
    /* A forgotten wait may be harmless by luck of the draw; the others never are. */
    int blind = t.seen[SIM_FORGET_DEPS] * 3 < t.damaged[SIM_FORGET_DEPS];
    for (int d = SIM_SHORT_MESSAGE; d < SIM_DAMAGE_COUNT; d++) blind |= t.damaged[d] == 0 || t.seen[d] < t.damaged[d];
    if (blind) printf("the simulator is blind to damage\n");
    return t.failed != 0 || blind;
}
