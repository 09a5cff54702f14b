/* SPDX-License-Identifier: Apache-2.0
 * Arithmetic of emulated NCCL: each step is rounded to the type, as the real ring does.  8-bit floats are only moved.
 */
#include "nccl.h"

#include <string.h>

size_t nccl_dtype_bytes(int dtype)
{
    static const unsigned char bytes[NCCL_DTYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return dtype >= 0 && dtype < NCCL_DTYPES ? bytes[dtype] : 0;
}

static float from_bits(uint32_t u)
{
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static uint32_t to_bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

static float bf16_get(uint16_t h)
{
    return from_bits((uint32_t)h << 16);
}

static uint16_t bf16_put(float f)
{
    uint32_t u = to_bits(f);
    if (f != f) return 0x7fff;
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static float f16_get(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = h >> 10 & 31, m = h & 0x3ff;
    if (e == 31) return from_bits(sign | 0x7f800000u | m << 13);
    if (e) return from_bits(sign | (e + 112) << 23 | m << 13);
    float f = (float)m * from_bits(0x33800000u); /* m * 2^-24 */
    return sign ? -f : f;
}

static uint16_t f16_put(float f)
{
    uint32_t u = to_bits(f), sign = u >> 16 & 0x8000;
    u &= 0x7fffffff;
    if (u > 0x7f800000u) return 0x7fff;
    if (u >= 0x477ff000u) return (uint16_t)(sign | 0x7c00);
    if (u < 0x38800000u) /* adding 0.5 leaves the multiple of 2^-24, rounded to even */
        return (uint16_t)(sign | (to_bits(from_bits(u) + 0.5f) - 0x3f000000u));
    u += 0xfff + (u >> 13 & 1);
    return (uint16_t)(sign | ((u - 0x38000000u) >> 13));
}

#define SAME(x) (x)
/* T: as stored; A: arithmetic; U: where sums and products may wrap (only unsigned ones may).  NaN wins MIN and MAX. */
#define ARITHMETIC(NAME, T, A, U, GET, PUT)                                                                            \
    static void fold_##NAME(void *acc, const void *in, size_t count, int op)                                           \
    {                                                                                                                  \
        T *a = acc;                                                                                                    \
        const T *b = in;                                                                                               \
        for (size_t i = 0; i < count; i++) {                                                                           \
            A x = GET(a[i]), y = GET(b[i]);                                                                            \
            if (op == NCCL_MAX)                                                                                        \
                x = y > x || !(y == y) ? y : x;                                                                        \
            else if (op == NCCL_MIN)                                                                                   \
                x = y < x || !(y == y) ? y : x;                                                                        \
            else                                                                                                       \
                x = (A)(op == NCCL_PROD ? (U)x * (U)y : (U)x + (U)y);                                                  \
            a[i] = (T)PUT(x);                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
    static void scale_##NAME(void *data, size_t count, double factor)                                                  \
    {                                                                                                                  \
        T *p = data;                                                                                                   \
        A f = (A)factor;                                                                                               \
        for (size_t i = 0; i < count; i++) {                                                                           \
            A x = GET(p[i]);                                                                                           \
            p[i] = (T)PUT((A)((U)x * (U)f));                                                                           \
        }                                                                                                              \
    }                                                                                                                  \
    static void divide_##NAME(void *data, size_t count, int n)                                                         \
    {                                                                                                                  \
        T *p = data;                                                                                                   \
        for (size_t i = 0; i < count; i++) p[i] = (T)PUT((A)(GET(p[i]) / (A)n));                                       \
    }                                                                                                                  \
    static double read_##NAME(const void *bits)                                                                        \
    {                                                                                                                  \
        T t;                                                                                                           \
        memcpy(&t, bits, sizeof t);                                                                                    \
        return (double)GET(t);                                                                                         \
    }

ARITHMETIC(i8, int8_t, int32_t, uint32_t, SAME, SAME)
ARITHMETIC(u8, uint8_t, uint32_t, uint32_t, SAME, SAME)
ARITHMETIC(i32, int32_t, int32_t, uint32_t, SAME, SAME)
ARITHMETIC(u32, uint32_t, uint32_t, uint32_t, SAME, SAME)
ARITHMETIC(i64, int64_t, int64_t, uint64_t, SAME, SAME)
ARITHMETIC(u64, uint64_t, uint64_t, uint64_t, SAME, SAME)
ARITHMETIC(f16, uint16_t, float, float, f16_get, f16_put)
ARITHMETIC(f32, float, float, float, SAME, SAME)
ARITHMETIC(f64, double, double, double, SAME, SAME)
ARITHMETIC(bf16, uint16_t, float, float, bf16_get, bf16_put)

#define ROW(NAME) {fold_##NAME, scale_##NAME, divide_##NAME, read_##NAME}
static const struct {
    void (*fold)(void *acc, const void *in, size_t count, int op);
    void (*scale)(void *data, size_t count, double factor);
    void (*divide)(void *data, size_t count, int n);
    double (*read)(const void *bits);
} types[NCCL_DTYPES] = {
    [NCCL_I8] = ROW(i8),   [NCCL_U8] = ROW(u8),   [NCCL_I32] = ROW(i32), [NCCL_U32] = ROW(u32), [NCCL_I64] = ROW(i64),
    [NCCL_U64] = ROW(u64), [NCCL_F16] = ROW(f16), [NCCL_F32] = ROW(f32), [NCCL_F64] = ROW(f64), [NCCL_BF16] = ROW(bf16),
};

bool nccl_can_reduce(int dtype)
{
    return types[dtype].fold != NULL;
}

void nccl_fold(void *acc, const void *in, size_t count, int dtype, int op)
{
    types[dtype].fold(acc, in, count, op);
}

void nccl_scale(void *x, size_t count, int dtype, double factor)
{
    types[dtype].scale(x, count, factor);
}

void nccl_divide(void *x, size_t count, int dtype, int n)
{
    bool is_float = dtype >= NCCL_F16 && dtype <= NCCL_BF16;
    if (!is_float) types[dtype].divide(x, count, n);
}

double nccl_scalar(int dtype, const void *bits)
{
    return types[dtype].read(bits);
}
