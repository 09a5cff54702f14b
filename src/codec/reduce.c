/* SPDX-License-Identifier: Apache-2.0
 *
 * reduce.c: the CPU side of reduce.h: dtype tables and the loops around the arithmetic of kernels.inc, written so that
 * the compiler vectorises them: blocks that stay in the first-level cache, one pass per source, constant operation. Not
 * the arithmetic itself.  Any thread. */
#ifdef __GNUC__
#ifndef __clang__
#pragma GCC optimize("O3") /* the loops below are the memory-speed path of CPU islands, in debug builds as well */
#endif
#endif

#include "codec/reduce.h"

#include "codec/kernels.h"

#include "codec/message.h"

#include <gpubridge/gpubridge.h>

#include <assert.h>
#include <string.h>

#include "codec/kernels.inc"

static_assert((int)GB_K_I8 == GPUBRIDGE_I8 && (int)GB_K_I64 == GPUBRIDGE_I64 && (int)GB_K_F16 == GPUBRIDGE_F16 &&
                  (int)GB_K_F64 == GPUBRIDGE_F64 && (int)GB_K_BOOL == GPUBRIDGE_BOOL &&
                  (int)GB_K_C128 == GPUBRIDGE_C128 && (int)GB_K_U64 == GPUBRIDGE_U64,
              "kernels.inc numbers the dtypes as gpubridge.h does");
static_assert((int)GB_K_SUM == GPUBRIDGE_SUM && (int)GB_K_AVG == GPUBRIDGE_AVG && (int)GB_K_MAX == GPUBRIDGE_MAX &&
                  (int)GB_K_BXOR == GPUBRIDGE_BXOR && (int)GB_K_PREMUL == GPUBRIDGE_PREMUL_SUM,
              "kernels.inc numbers the operations as gpubridge.h does");
static_assert((int)GB_ANY_WAY == GB_WAY_ANY && (int)GB_PACK == GB_WAY_PACK && (int)GB_ADD == GB_WAY_ADD,
              "the ways of kernels.inc");
static_assert(sizeof(struct gb_reduce_args) == 208 && offsetof(struct gb_reduce_args, count) == 136 &&
                  offsetof(struct gb_reduce_args, stats) == 176 && offsetof(struct gb_reduce_args, enc_mask) == 192 &&
                  offsetof(struct gb_reduce_args, dst_is_enc) == 202,
              "kernels.inc repeats the layout for run-time compilers");

static const struct {
    const char *name;
    uint8_t bytes, acc_bytes;
    uint16_t ops; /* bit per enum gpubridge_reduce_op */
} dtypes[GPUBRIDGE_DTYPE_COUNT] = {
#define OPS_BITWISE (1u << GPUBRIDGE_BAND | 1u << GPUBRIDGE_BOR | 1u << GPUBRIDGE_BXOR)
#define OPS_ORDERED (1u << GPUBRIDGE_SUM | 1u << GPUBRIDGE_PRODUCT | 1u << GPUBRIDGE_MIN | 1u << GPUBRIDGE_MAX)
#define OPS_INT     (OPS_ORDERED | 1u << GPUBRIDGE_AVG | OPS_BITWISE)
#define OPS_FLOAT   (OPS_ORDERED | 1u << GPUBRIDGE_AVG | 1u << GPUBRIDGE_PREMUL_SUM)
#define OPS_COMPLEX (1u << GPUBRIDGE_SUM | 1u << GPUBRIDGE_AVG | 1u << GPUBRIDGE_PREMUL_SUM)
    [GPUBRIDGE_I8] = {"i8", 1, 1, OPS_INT},       [GPUBRIDGE_U8] = {"u8", 1, 1, OPS_INT},
    [GPUBRIDGE_I16] = {"i16", 2, 2, OPS_INT},     [GPUBRIDGE_I32] = {"i32", 4, 4, OPS_INT},
    [GPUBRIDGE_I64] = {"i64", 8, 8, OPS_INT},     [GPUBRIDGE_F16] = {"f16", 2, 4, OPS_FLOAT},
    [GPUBRIDGE_BF16] = {"bf16", 2, 4, OPS_FLOAT}, [GPUBRIDGE_F32] = {"f32", 4, 4, OPS_FLOAT},
    [GPUBRIDGE_F64] = {"f64", 8, 8, OPS_FLOAT},   [GPUBRIDGE_BOOL] = {"bool", 1, 1, OPS_ORDERED | OPS_BITWISE},
    [GPUBRIDGE_C64] = {"c64", 8, 8, OPS_COMPLEX}, [GPUBRIDGE_C128] = {"c128", 16, 16, OPS_COMPLEX},
    [GPUBRIDGE_U16] = {"u16", 2, 2, OPS_INT},     [GPUBRIDGE_U32] = {"u32", 4, 4, OPS_INT},
    [GPUBRIDGE_U64] = {"u64", 8, 8, OPS_INT},     [GPUBRIDGE_BYTE] = {"byte", 1, 1, 0},
};

static const char *const op_names[GPUBRIDGE_REDUCE_OP_COUNT] = {
    [GPUBRIDGE_SUM] = "SUM", [GPUBRIDGE_AVG] = "AVG",   [GPUBRIDGE_PRODUCT] = "PRODUCT",
    [GPUBRIDGE_MIN] = "MIN", [GPUBRIDGE_MAX] = "MAX",   [GPUBRIDGE_BAND] = "BAND",
    [GPUBRIDGE_BOR] = "BOR", [GPUBRIDGE_BXOR] = "BXOR", [GPUBRIDGE_PREMUL_SUM] = "PREMUL_SUM",
};

static int is_dtype(int dtype)
{
    return dtype >= 0 && dtype < GPUBRIDGE_DTYPE_COUNT;
}

size_t gb_dtype_bytes(int dtype)
{
    return is_dtype(dtype) ? dtypes[dtype].bytes : 0;
}

size_t gb_acc_bytes(int dtype)
{
    return is_dtype(dtype) ? dtypes[dtype].acc_bytes : 0;
}

const char *gb_dtype_name(int dtype)
{
    return is_dtype(dtype) ? dtypes[dtype].name : "?";
}

const char *gb_reduce_op_name(int op)
{
    return op >= 0 && op < GPUBRIDGE_REDUCE_OP_COUNT ? op_names[op] : "?";
}

int gb_reduce_supported(int dtype, int op)
{
    return is_dtype(dtype) && op >= 0 && op < GPUBRIDGE_REDUCE_OP_COUNT && (dtypes[dtype].ops >> op & 1);
}

#define BLOCK 1024 /* elements: at most 8 KiB of accumulator */

/* Element i of raw memory: memcpy, so that neither the type nor the alignment of the caller's memory matters. */
#define GET(STO, p, i)                                                                                                 \
    __extension__({                                                                                                    \
        STO b_;                                                                                                        \
        memcpy(&b_, (p) + (i) * sizeof(STO), sizeof b_);                                                               \
        b_;                                                                                                            \
    })
#define PUT(STO, p, i, x)                                                                                              \
    __extension__({                                                                                                    \
        STO b_ = (x);                                                                                                  \
        memcpy((p) + (i) * sizeof(STO), &b_, sizeof b_);                                                               \
    })

/* reduce_X walks blocks: read the first source into acc, fold the others into it, write.  The sum of two plain sources,
 * the usual case, is one loop. */
#define CPU_LOOPS(X, ACC, STO, ASTO, OPS)                                                                              \
    GB_FN void read_##X(ACC *restrict x, size_t n, const unsigned char *src, int partial, int scale, double factor)    \
    {                                                                                                                  \
        if (partial)                                                                                                   \
            for (size_t i = 0; i < n; i++) x[i] = gb_adec_##X(GET(ASTO, src, i));                                      \
        else                                                                                                           \
            for (size_t i = 0; i < n; i++) x[i] = gb_dec_##X(GET(STO, src, i));                                        \
        if (scale)                                                                                                     \
            for (size_t i = 0; i < n; i++) x[i] = gb_scale_##X(x[i], factor);                                          \
    }                                                                                                                  \
    GB_FN void fold_##X(ACC *restrict acc, size_t n, const ACC *restrict x, const int op)                              \
    {                                                                                                                  \
        for (size_t i = 0; i < n; i++) acc[i] = gb_fold_##X(op, acc[i], x[i]);                                         \
    }                                                                                                                  \
    GB_FN void write_##X(unsigned char *dst, size_t n, const ACC *restrict acc, int partial)                           \
    {                                                                                                                  \
        if (partial)                                                                                                   \
            for (size_t i = 0; i < n; i++) PUT(ASTO, dst, i, gb_aenc_##X(acc[i]));                                     \
        else                                                                                                           \
            for (size_t i = 0; i < n; i++) PUT(STO, dst, i, gb_enc_##X(acc[i]));                                       \
    }                                                                                                                  \
    GB_FN void add2_##X(unsigned char *dst, size_t n, const unsigned char *s, const unsigned char *t)                  \
    {                                                                                                                  \
        STO out[BLOCK];                                                                                                \
        for (size_t i = 0; i < n; i++)                                                                                 \
            out[i] = gb_enc_##X(gb_fold_##X(GB_K_SUM, gb_dec_##X(GET(STO, s, i)), gb_dec_##X(GET(STO, t, i))));        \
        memcpy(dst, out, n * sizeof(STO));                                                                             \
    }                                                                                                                  \
    GB_FN void reduce_##X(const struct gb_reduce_args *a, uint64_t count, int add2)                                    \
    {                                                                                                                  \
        ACC acc[BLOCK], x[BLOCK];                                                                                      \
        const int mean = a->op == GB_K_AVG && (a->flags & GB_REDUCE_FINAL);                                            \
        const size_t dst_bytes = a->dst_is_acc ? sizeof(ASTO) : sizeof(STO);                                           \
        for (uint64_t at = 0; at < count; at += BLOCK) {                                                               \
            const size_t n = count - at < BLOCK ? (size_t)(count - at) : BLOCK;                                        \
            unsigned char *dst = (unsigned char *)a->dst + at * dst_bytes;                                             \
            if (add2) {                                                                                                \
                add2_##X(dst, n, (const unsigned char *)a->src[0] + at * sizeof(STO),                                  \
                         (const unsigned char *)a->src[1] + at * sizeof(STO));                                         \
                continue;                                                                                              \
            }                                                                                                          \
            for (uint32_t k = 0; k < a->nsrc; k++) {                                                                   \
                const int partial = a->acc_mask >> k & 1, scale = a->premul_mask >> k & 1;                             \
                const unsigned char *src = a->src[k];                                                                  \
                read_##X(k ? x : acc, n, src + at * (partial ? sizeof(ASTO) : sizeof(STO)), partial, scale,            \
                         a->factor);                                                                                   \
                if (k == 0) continue;                                                                                  \
                OPS(a->op, FOLD, X, acc, n, x)                                                                         \
            }                                                                                                          \
            if (mean)                                                                                                  \
                for (size_t i = 0; i < n; i++) acc[i] = gb_mean_##X(acc[i], a->divisor);                               \
            write_##X(dst, n, acc, a->dst_is_acc);                                                                     \
        }                                                                                                              \
    }

#define FOLD(X, op, acc, n, x) fold_##X(acc, n, x, op)
GB_FAMILIES(CPU_LOOPS)

GB_FN void reduce_any(const struct gb_reduce_args *a)
{
    const uint64_t count = a->count * (GB_IS_COMPLEX(a->dtype) ? 2 : 1);
    const int is_sum = a->op == GPUBRIDGE_SUM || (a->op == GPUBRIDGE_AVG && !(a->flags & GB_REDUCE_FINAL));
    const int add2 = is_sum && a->nsrc == 2 && !(a->acc_mask | a->premul_mask) && !a->dst_is_acc;
#define REDUCE(X, a) reduce_##X(a, count, add2)
    GB_DISPATCH(a->dtype, REDUCE, a)
#undef REDUCE
}

static int has_message(const struct gb_reduce_args *a)
{
    assert(a->nsrc >= 1 && a->nsrc <= GB_REDUCE_MAX_SRC);
    if (!a->dst_is_enc && (a->enc_mask & ((1u << a->nsrc) - 1)) == 0) return 0;
    assert(gb_acc_bytes(a->dtype) == (a->dtype == GPUBRIDGE_C64 ? 8 : 4) &&
           dtypes[a->dtype].ops & 1u << GPUBRIDGE_PREMUL_SUM);
    return 1;
}

static __attribute__((noinline)) void reduce_baseline(const struct gb_reduce_args *args)
{
    reduce_any(args);
}

#ifdef __x86_64__

/* Wider vectors, the same operations: no fused multiply-add in this target, so equal bits. */
static __attribute__((noinline, target("avx2"))) void reduce_avx2(const struct gb_reduce_args *args)
{
    reduce_any(args);
}

const char *const gb_kernel_names[] = {[GB_WAY_ANY] = "gb_reduce", [GB_WAY_PACK] = "gb_pack", [GB_WAY_ADD] = "gb_add"};

int gb_reduce_way(const struct gb_reduce_args *args)
{
    const int op = args->op, dtype = args->dtype;
    const int is_narrow = dtype == GPUBRIDGE_F16 || dtype == GPUBRIDGE_BF16;
    const int is_mean = op == GPUBRIDGE_AVG && (args->flags & GB_REDUCE_FINAL);
    const uint32_t encoded = args->enc_mask & ((1u << args->nsrc) - 1u), plain = ((1u << args->nsrc) - 1u) & ~encoded;
    if (op != GPUBRIDGE_SUM && op != GPUBRIDGE_AVG && op != GPUBRIDGE_PREMUL_SUM) return GB_WAY_ANY;
    if (!is_narrow && dtype != GPUBRIDGE_F32 && dtype != GPUBRIDGE_C64) return GB_WAY_ANY;
    if (is_narrow && ((args->acc_mask & plain) || (!args->dst_is_enc && args->dst_is_acc))) return GB_WAY_ANY;
    if (args->dst_is_enc)
        return args->nsrc == 1 && !encoded && !is_mean && !(args->flags & GB_REDUCE_STOCHASTIC) ? GB_WAY_PACK
                                                                                                : GB_WAY_ANY;
    if (args->nsrc != 2 || !encoded || !plain) return GB_WAY_ANY;
    return is_mean && (args->divisor & (args->divisor - 1)) ? GB_WAY_ANY : GB_WAY_ADD;
}

void gb_reduce_host(const struct gb_reduce_args *args)
{
    /* The host program may flush denormals (torch.set_flush_denormal) or have changed the rounding: the default state
     * around the loops, which stand in functions of their own so that nothing is moved out of it. */
    unsigned int saved = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(0x1f80);
    if (has_message(args))
        gb_reduce_messages(args);
    else if (__builtin_cpu_supports("avx2"))
        reduce_avx2(args);
    else
        reduce_baseline(args);
    __builtin_ia32_ldmxcsr(saved);
}

#else

void gb_reduce_host(const struct gb_reduce_args *args)
{
#ifdef __aarch64__
    uint64_t saved;
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved));
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0) : "memory");
#endif
    if (has_message(args))
        gb_reduce_messages(args);
    else
        reduce_baseline(args);
#ifdef __aarch64__
    __asm__ volatile("msr fpcr, %0" : : "r"(saved) : "memory");
#endif
}

#endif
