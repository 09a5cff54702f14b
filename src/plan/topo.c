/* SPDX-License-Identifier: Apache-2.0
 * Group layout from the members' island keys.  Pure; any thread. */
#include "plan/plan.h"

#include <stdlib.h>
#include <string.h>

/* One block of memory: the struct, then the arrays it points to. */
struct layout {
    struct gb_topo topo;
    uint32_t words[];
};

struct named {
    const char *key;
    uint32_t rank;
};

static int by_key(const void *a, const void *b)
{
    const struct named *x = a, *y = b;
    int order = strcmp(x->key, y->key);
    return order ? order : (x->rank > y->rank) - (x->rank < y->rank);
}

/* island[r] := lowest rank with r's key. */
static void find_lowest(struct named *names, uint32_t nranks, uint32_t *lowest)
{
    qsort(names, nranks, sizeof *names, by_key);
    for (uint32_t i = 0, first = 0; i < nranks; i++) {
        if (strcmp(names[i].key, names[first].key) != 0) first = i;
        lowest[names[i].rank] = names[first].rank;
    }
}

/* Numbers the islands in the order of their lowest rank.  Returns how many there are. */
static uint32_t number_islands(uint32_t nranks, uint32_t *island)
{
    uint32_t n = 0;
    for (uint32_t r = 0; r < nranks; r++) island[r] = island[r] == r ? n++ : island[island[r]];
    return n;
}

int gb_topo_create(uint32_t nranks, const char *const *keys, const uint8_t *vendor_of_rank, const uint8_t *staged,
                   struct gb_topo **topo)
{
    if (nranks == 0 || nranks > GB_PLAN_MAX_RANKS)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "a group of %u ranks: 1 to %u are possible", nranks, GB_PLAN_MAX_RANKS);
    size_t words = 4 * (size_t)nranks + 1;
    struct layout *l = calloc(1, sizeof *l + words * sizeof(uint32_t) + 2 * (size_t)nranks);
    struct named *names = malloc(nranks * sizeof *names);
    if (!l || !names) {
        free(l);
        free(names);
        return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for the layout of %u ranks", nranks);
    }
    uint32_t *island = l->words, *local = island + nranks, *first = local + nranks, *members = first + nranks + 1;
    uint8_t *vendor = (uint8_t *)(l->words + words), *is_staged = vendor + nranks;
    for (uint32_t r = 0; r < nranks; r++) names[r] = (struct named){keys[r], r};
    find_lowest(names, nranks, island);
    free(names);
    uint32_t nislands = number_islands(nranks, island);

    for (uint32_t r = 0; r < nranks; r++) {
        local[r] = first[island[r] + 1]++;
        is_staged[r] = staged && staged[r];
    }
    for (uint32_t i = 0; i < nislands; i++) {
        first[i + 1] += first[i];
        vendor[i] = 1;
    }
    for (uint32_t r = 0; r < nranks; r++) {
        members[first[island[r]] + local[r]] = r;
        vendor[island[r]] &= vendor_of_rank && vendor_of_rank[r];
    }
    l->topo = (struct gb_topo){.nranks = nranks,
                               .nislands = nislands,
                               .island = island,
                               .local = local,
                               .island_first = first,
                               .members = members,
                               .vendor = vendor,
                               .staged = is_staged};
    *topo = &l->topo;
    return 0;
}

void gb_topo_destroy(struct gb_topo *topo)
{
    free(topo); /* the first member of its block */
}
