/* SPDX-License-Identifier: Apache-2.0
 * The reference of coded.h: one element at a time.  Any thread. */
#include "coded.h"

#include "codec_ref.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int coded_islands(const struct ref_layout *layout, int island[REF_MAX_RANKS])
{
    int n = 0;
    for (int r = 0; r < layout->size; r++) {
        island[r] = n;
        for (int q = 0; q < r; q++)
            if (strcmp(layout->islands[q], layout->islands[r]) == 0) island[r] = island[q];
        n += island[r] == n;
    }
    return n;
}

size_t coded_width(int dtype)
{
    return dtype == GPUBRIDGE_BF16 ? 2 : 4;
}

float coded_load(int dtype, const void *p, uint64_t i)
{
    uint32_t bits = 0;
    float x;
    if (dtype == GPUBRIDGE_BF16) {
        memcpy((char *)&bits + 2, (const char *)p + 2 * i, 2);
        memcpy(&x, &bits, 4);
        return x;
    }
    memcpy(&x, (const char *)p + 4 * i, 4);
    return x;
}

void coded_store(int dtype, float x, void *p, uint64_t i)
{
    uint32_t bits = 0x7fc00000u;
    if (!isnan(x)) memcpy(&bits, &x, 4);
    if (dtype == GPUBRIDGE_BF16) {
        if (!isnan(x)) bits += 0x7fff + (bits >> 16 & 1);
        memcpy((char *)p + 2 * i, (char *)&bits + 2, 2);
    } else {
        memcpy((char *)p + 4 * i, &bits, 4);
    }
}

void coded_fill(int dtype, uint64_t seed, int rank, uint64_t count, void *out)
{
    uint64_t state = seed * 0x9e3779b97f4a7c15u + (uint64_t)rank * 0xd1342543de82ef95u + 1;
    for (uint64_t i = 0; i < count; i++) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        float x = (float)(int32_t)(state >> 32) / 2147483648.0f * ldexpf(1, (int)(state % 13) - 9);
        coded_store(dtype, i / 128 % 7 == 3 ? 0.0f : x, out, i);
    }
}

/* As a message, the `part`-th of those that the operation encodes. */
static void quantise(const struct coded_sum *sum, float *x, uint64_t count, int part)
{
    if (sum->seed)
        ref_quantise_random(sum->codec, x, count, ref_random(*sum->seed, (uint64_t)part), 0);
    else
        ref_quantise(sum->codec, x, count);
}

void coded_want(const struct ref_layout *layout, const struct coded_sum *sum, void *const *inputs, uint64_t count,
                void *out)
{
    int island[REF_MAX_RANKS], n = coded_islands(layout, island);
    float *total = calloc(count, sizeof *total), *partial = calloc(count, sizeof *partial);
    for (int i = 0; i < n; i++) {
        int seen = 0;
        for (int r = 0; r < layout->size; r++) {
            if (island[r] != i) continue;
            for (uint64_t e = 0; e < count; e++) {
                float x = coded_load(sum->dtype, inputs[r], e);
                if (sum->op == GPUBRIDGE_PREMUL_SUM) x *= sum->factor;
                partial[e] = seen ? partial[e] + x : x;
            }
            seen = 1;
        }
        quantise(sum, partial, count, i);
        for (uint64_t e = 0; e < count; e++) total[e] = i ? total[e] + partial[e] : partial[e];
    }
    for (uint64_t e = 0; e < count && sum->op == GPUBRIDGE_AVG; e++) total[e] /= (float)layout->size;
    if (sum->kind == GPUBRIDGE_ALL_REDUCE && n > 2) quantise(sum, total, count, n);
    for (uint64_t e = 0; e < count; e++) coded_store(sum->dtype, total[e], out, e);
    free(total);
    free(partial);
}
