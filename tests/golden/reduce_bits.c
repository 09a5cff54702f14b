/* SPDX-License-Identifier: Apache-2.0
 * The bits of the arithmetic, pinned: runs every dtype and reduce op over fixed patterns and compares a hash of each
 * result with reduce_bits.txt.  One file for every compiler, level and architecture; needs nothing but the C library,
 * so it is also cross-compiled.  usage: reduce_bits FILE | --print */
#include "codec/reduce.h"

#include <gpubridge/gpubridge.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define COUNT 1031 /* no multiple of any vector length */
#define SRCS  5
#define LINES 2048

static char lines[LINES][80];
static int line_count;

/* xorshift64*: the patterns must not depend on a C library. */
static uint64_t next(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * 2685821657736338717u;
}

/* Random bits are mostly huge or tiny as floats, so every second element is made ordinary: a small exponent around 1.
 * Zeros, infinities, NaN and denormals are written at fixed places by all-zero and all-one exponent fields. */
static void fill(uint8_t *bytes, size_t element, uint64_t seed)
{
    static const uint16_t special[] = {0x0000, 0x8000, 0x7f80, 0xff80, 0x7fc0, 0x0001, 0x7c00, 0xfc00, 0x7ff0, 0x3f80};
    uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
    for (size_t i = 0; i < (size_t)COUNT * element; i++) bytes[i] = (uint8_t)(next(&state) >> 56);
    for (size_t i = 0; i < COUNT && element > 1; i++) {
        uint8_t *top = bytes + i * element + element - 2; /* little-endian: sign and exponent */
        uint16_t word = (uint16_t)(top[0] | top[1] << 8);
        if (i % 61 == seed % 61) {
            memset(bytes + i * element, 0, element);
            word = special[(i / 61 + seed) % 10];
        } else if (i % 2) {
            word = (uint16_t)((word & 0x83ffu) | 0x3c00u);
        }
        top[0] = (uint8_t)word;
        top[1] = (uint8_t)(word >> 8);
    }
}

static uint64_t fnv(const uint8_t *bytes, size_t n)
{
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < n; i++) hash = (hash ^ bytes[i]) * 1099511628211u;
    return hash;
}

/* As the last step of an operation (rounded to the dtype) and as a partial result (kept in the accumulator). */
static void run(int dtype, int op, uint8_t nsrc, int partial)
{
    static _Alignas(64) uint8_t src[SRCS][COUNT * 16], dst[COUNT * 16];
    struct gb_reduce_args args = {.dst = dst, .count = COUNT, .factor = 0.7, .divisor = 3, .nsrc = nsrc};
    const size_t out = partial ? gb_acc_bytes(dtype) : gb_dtype_bytes(dtype);
    for (int k = 0; k < nsrc; k++) {
        fill(src[k], gb_dtype_bytes(dtype), (uint64_t)(dtype * 100 + op * 7 + k + 1));
        args.src[k] = src[k];
    }
    args.dtype = (uint8_t)dtype;
    args.op = (uint8_t)op;
    args.premul_mask = op == GPUBRIDGE_PREMUL_SUM ? (1u << nsrc) - 1 : 0;
    args.flags = partial ? 0 : GB_REDUCE_FINAL;
    args.dst_is_acc = (uint8_t)partial;
    memset(dst, 0xa5, sizeof dst);
    gb_reduce_host(&args);
    snprintf(lines[line_count++], sizeof lines[0], "%s %s %d %s %016" PRIx64, gb_dtype_name(dtype),
             gb_reduce_op_name(op), nsrc, partial ? "partial" : "final", fnv(dst, COUNT * out));
}

static int compare(const char *path)
{
    FILE *file = fopen(path, "r");
    char want[100];
    int wrong = 0, seen = 0;
    if (!file) {
        perror(path);
        return 1;
    }
    for (; fgets(want, sizeof want, file); seen++) {
        want[strcspn(want, "\n")] = 0;
        if (seen < line_count && strcmp(want, lines[seen]) == 0) continue;
        wrong++;
        printf("expected %s, got %s\n", want, seen < line_count ? lines[seen] : "nothing");
    }
    fclose(file);
    printf("%d results, %d expected, %d differ\n", line_count, seen, wrong);
    return wrong || seen != line_count;
}

int main(int argc, char **argv)
{
    for (int dtype = 0; dtype < GPUBRIDGE_DTYPE_COUNT; dtype++)
        for (int op = 0; op < GPUBRIDGE_REDUCE_OP_COUNT; op++)
            for (uint8_t nsrc = 1; nsrc <= SRCS && gb_reduce_supported(dtype, op); nsrc += 1 + (nsrc > 2))
                for (int partial = 0; partial < 2; partial++) run(dtype, op, nsrc, partial);
    if (argc == 2 && strcmp(argv[1], "--print") != 0) return compare(argv[1]);
    for (int i = 0; i < line_count; i++) puts(lines[i]);
    return 0;
}
