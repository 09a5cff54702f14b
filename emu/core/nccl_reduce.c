/* SPDX-License-Identifier: Apache-2.0
 * Arithmetic of emulated NCCL: each step is rounded to the type, as the real ring does.  8-bit floats are only moved.  */
#include "nccl.h"

#include <string.h>

size_t nccl_dtype_bytes(int dtype)
{
    static const unsigned char bytes[NCCL_DTYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return dtype >= 0 && dtype < NCCL_DTYPES ? bytes[dtype] : 0;
}

bool nccl_can_reduce(int dtype) { return dtype != NCCL_E4M3 && dtype != NCCL_E5M2; }

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

static float bf16_get(uint16_t h) { return from_bits((uint32_t)h << 16); }

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
/* NaN wins MIN and MAX for floats; for integers x != x is never true. */
#define FOLD(T, A, GET, PUT)                                                                                           \
    {                                                                                                                  \
        T *a = acc;                                                                                                    \
        const T *b = in;                                                                                               \
        for (size_t i = 0; i < count; i++) {                                                                           \
            A x = GET(a[i]), y = GET(b[i]);                                                                            \
            switch (op) {                                                                                              \
            case NCCL_PROD: x = (A)(x * y); break;                                                                     \
            case NCCL_MAX: x = x > y || x != x ? x : y; break;                                                         \
            case NCCL_MIN: x = x < y || x != x ? x : y; break;                                                         \
            default: x = (A)(x + y); break;                                                                            \
            }                                                                                                          \
            a[i] = (T)PUT(x);                                                                                          \
        }                                                                                                              \
        break;                                                                                                         \
    }
/* Signed sums and products wrap, which only unsigned arithmetic may; comparisons keep the sign. */
#define FOLD_SIGNED(T, U)                                                                                              \
    {                                                                                                                  \
        T *a = acc;                                                                                                    \
        const T *b = in;                                                                                               \
        for (size_t i = 0; i < count; i++) {                                                                           \
            T x = a[i], y = b[i];                                                                                      \
            switch (op) {                                                                                              \
            case NCCL_PROD: x = (T)((U)x * (U)y); break;                                                               \
            case NCCL_MAX: x = x > y ? x : y; break;                                                                   \
            case NCCL_MIN: x = x < y ? x : y; break;                                                                   \
            default: x = (T)((U)x + (U)y); break;                                                                      \
            }                                                                                                          \
            a[i] = x;                                                                                                  \
        }                                                                                                              \
        break;                                                                                                         \
    }

void nccl_fold(void *acc, const void *in, size_t count, int dtype, int op)
{
    switch (dtype) {
    case NCCL_I8: FOLD_SIGNED(int8_t, uint32_t)
    case NCCL_U8: FOLD(uint8_t, uint32_t, SAME, SAME)
    case NCCL_I32: FOLD_SIGNED(int32_t, uint32_t)
    case NCCL_U32: FOLD(uint32_t, uint32_t, SAME, SAME)
    case NCCL_I64: FOLD_SIGNED(int64_t, uint64_t)
    case NCCL_U64: FOLD(uint64_t, uint64_t, SAME, SAME)
    case NCCL_F16: FOLD(uint16_t, float, f16_get, f16_put)
    case NCCL_F32: FOLD(float, float, SAME, SAME)
    case NCCL_F64: FOLD(double, double, SAME, SAME)
    case NCCL_BF16: FOLD(uint16_t, float, bf16_get, bf16_put)
    default: break;
    }
}

#define EACH(T, EXPR)                                                                                                  \
    {                                                                                                                  \
        T *p = x;                                                                                                      \
        for (size_t i = 0; i < count; i++) p[i] = (T)(EXPR);                                                           \
        break;                                                                                                         \
    }

void nccl_scale(void *x, size_t count, int dtype, double factor)
{
    float f = (float)factor;
    switch (dtype) {
    case NCCL_I8: EACH(int8_t, p[i] * (int8_t)factor)
    case NCCL_U8: EACH(uint8_t, p[i] * (uint8_t)factor)
    case NCCL_I32: EACH(int32_t, (uint32_t)p[i] * (uint32_t)(int32_t)factor)
    case NCCL_U32: EACH(uint32_t, p[i] * (uint32_t)factor)
    case NCCL_I64: EACH(int64_t, (uint64_t)p[i] * (uint64_t)(int64_t)factor)
    case NCCL_U64: EACH(uint64_t, p[i] * (uint64_t)factor)
    case NCCL_F16: EACH(uint16_t, f16_put(f16_get(p[i]) * f))
    case NCCL_F32: EACH(float, p[i] * f)
    case NCCL_F64: EACH(double, p[i] * factor)
    case NCCL_BF16: EACH(uint16_t, bf16_put(bf16_get(p[i]) * f))
    default: break;
    }
}

void nccl_divide(void *x, size_t count, int dtype, int n)
{
    switch (dtype) {
    case NCCL_I8: EACH(int8_t, p[i] / n)
    case NCCL_U8: EACH(uint8_t, p[i] / n)
    case NCCL_I32: EACH(int32_t, p[i] / n)
    case NCCL_U32: EACH(uint32_t, p[i] / (uint32_t)n)
    case NCCL_I64: EACH(int64_t, p[i] / n)
    case NCCL_U64: EACH(uint64_t, p[i] / (uint64_t)n)
    default: break;
    }
}

double nccl_scalar(int dtype, const void *bits)
{
    union {
        int8_t i8;
        uint8_t u8;
        int32_t i32;
        uint32_t u32;
        int64_t i64;
        uint64_t u64;
        uint16_t h;
        float f;
        double d;
    } v;
    memcpy(&v, bits, nccl_dtype_bytes(dtype));
    switch (dtype) {
    case NCCL_I8: return v.i8;
    case NCCL_U8: return v.u8;
    case NCCL_I32: return v.i32;
    case NCCL_U32: return v.u32;
    case NCCL_I64: return (double)v.i64;
    case NCCL_U64: return (double)v.u64;
    case NCCL_F16: return f16_get(v.h);
    case NCCL_F32: return v.f;
    case NCCL_F64: return v.d;
    case NCCL_BF16: return bf16_get(v.h);
    default: return 0;
    }
}
