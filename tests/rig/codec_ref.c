/* SPDX-License-Identifier: Apache-2.0
 * The wire codecs by their definition: a value becomes the nearest that the format has, in doubles. */
#include "codec_ref.h"

#include <float.h>
#include <math.h>
#include <string.h>

/* A small float: mantissa bits, exponent of the smallest normal number, the largest number. */
struct format {
    int mantissa, min_exp;
    double largest;
};

static const struct format formats[] = {
    [REF_BF16] = {7, -126, 0x1.fep127}, [REF_FP16] = {10, -14, 65504}, [REF_FP8_E4M3] = {3, -6, 448},
    [REF_FP8_E5M2] = {2, -14, 57344},   [REF_MXFP4] = {1, 0, 6},
};

/* Where random words come from; NULL: rounding is to nearest. */
struct dice {
    uint64_t seed, first;
};

uint64_t ref_random(uint64_t seed, uint64_t n)
{
    uint64_t z = seed + (n + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* Drops the fraction of a number >= 0, of which `bits` bits count, after adding as many random ones. */
static double drop(double units, int bits, const struct dice *dice, uint64_t i)
{
    uint64_t word = ref_random(dice->seed, dice->first + i) >> 32;
    return floor((floor(ldexp(units, bits)) + (double)(word >> (32 - bits))) / ldexp(1, bits));
}

/* A number of the format for a finite one: the nearest; halfway, the one with the even mantissa.  Saturates. */
static double number(const struct format *f, double y, const struct dice *dice, uint64_t i)
{
    int exp;
    if (fabs(y) > f->largest && dice) y = copysign(f->largest, y);
    frexp(y, &exp); /* |y| in [2^(exp - 1), 2^exp) */
    if (y == 0 || exp - 1 < f->min_exp) exp = f->min_exp + 1;
    double unit = ldexp(1, exp - 1 - f->mantissa), q;
    if (dice)
        q = copysign(drop(fabs(y) / unit, 22 - f->mantissa, dice, i) * unit, y);
    else
        q = nearbyint(y / unit) * unit;
    return fabs(q) > f->largest ? copysign(f->largest, y) : q;
}

static void quantise_cast(int codec, float *x, uint64_t n, const struct dice *dice)
{
    for (uint64_t i = 0; i < n; i++) {
        if (!isfinite(x[i])) continue;
        if (codec == REF_BF16 && dice) {
            uint32_t bits, word = (uint32_t)(ref_random(dice->seed, dice->first + i) >> 32);
            float a = fabsf(x[i]);
            memcpy(&bits, &a, sizeof bits);
            bits = (bits + (word >> 16)) >> 16;
            bits = (bits < 0x7f7f ? bits : 0x7f7f) << 16;
            memcpy(&a, &bits, sizeof a);
            x[i] = copysignf(a, x[i]);
        } else {
            x[i] = (float)number(&formats[codec], (double)x[i], dice, i);
        }
    }
}

/* The greatest finite magnitude, at most 1.75 (e5m2: 1.75, e4m3: 1.875, e2m1: 1.5) times the largest power of two. */
static double greatest(int codec, const float *x, uint64_t n)
{
    double limit = codec == REF_FP8_E4M3   ? 0x1.ep127
                   : codec == REF_FP8_E5M2 ? 0x1.cp127
                   : codec == REF_MXFP4    ? 0x1.8p127
                                           : (double)FLT_MAX;
    double most = 0;
    for (uint64_t i = 0; i < n; i++)
        if (isfinite(x[i]) && fabs((double)x[i]) > most) most = fabs((double)x[i]);
    return most < limit ? most : limit;
}

static void quantise_int8(float *x, uint64_t n, const struct dice *dice)
{
    float scale = (float)greatest(REF_INT8, x, n) * (1.0f / 127);
    if (scale < FLT_MIN) scale = FLT_MIN;
    if (scale > 0x1.020406p121f) scale = 0x1.020406p121f; /* 127 of it are no infinity */
    float inverse = 1.0f / scale;
    for (uint64_t i = 0; i < n; i++) {
        float y = x[i] * inverse, q = nearbyintf(y);
        if (dice && isfinite(y)) q = copysignf((float)drop(fmin(fabs((double)y), 127), 16, dice, i), y);
        if (q == 0) q = 0; /* an integer has one zero */
        x[i] = isfinite(x[i]) ? q * scale : NAN;
    }
}

/* e4m3, e5m2, e2m1: the scale is a power of two. */
static void quantise_scaled(int codec, float *x, uint64_t n, const struct dice *dice)
{
    const struct format *f = &formats[codec];
    double most = greatest(codec, x, n);
    int exp = 0, any_wild = 0, top = ilogb(f->largest);
    double fraction = frexp(most, &exp) * 2; /* in [1, 2) */
    int power = most < (double)FLT_MIN ? -127 : exp - 1 + (fraction > 1.75);
    double limit = codec == REF_FP8_E4M3 ? 0x1.ep127 : codec == REF_FP8_E5M2 ? 0x1.cp127 : 0x1.8p127;
    int scale = power + 127 > top ? power - top : -127;
    for (uint64_t i = 0; i < n; i++) any_wild |= !isfinite(x[i]);
    for (uint64_t i = 0; i < n; i++) {
        if (codec == REF_MXFP4 && any_wild) {
            x[i] = NAN;
        } else if (!isfinite(x[i])) {
            if (codec == REF_FP8_E4M3) x[i] = NAN;
        } else {
            double y = fabs((double)x[i]) > limit ? copysign(limit, (double)x[i]) : (double)x[i];
            x[i] = (float)ldexp(number(f, ldexp(y, -scale), dice, i), scale);
        }
    }
}

static void quantise(int codec, float *x, uint64_t n, const struct dice *dice)
{
    uint64_t block = codec == REF_MXFP4 ? 32 : 128;
    if (codec == REF_NONE) return;
    if (codec == REF_BF16 || codec == REF_FP16) {
        quantise_cast(codec, x, n, dice);
        return;
    }
    for (uint64_t at = 0; at < n; at += block) {
        uint64_t len = n - at < block ? n - at : block;
        struct dice here = dice ? (struct dice){dice->seed, dice->first + at} : (struct dice){0, 0};
        if (codec == REF_INT8)
            quantise_int8(x + at, len, dice ? &here : NULL);
        else
            quantise_scaled(codec, x + at, len, dice ? &here : NULL);
    }
}

void ref_quantise(int codec, float *x, uint64_t n)
{
    quantise(codec, x, n, NULL);
}

void ref_quantise_random(int codec, float *x, uint64_t n, uint64_t seed, uint64_t first)
{
    quantise(codec, x, n, &(struct dice){seed, first});
}

uint64_t ref_encoded_bytes(int codec, uint64_t n)
{
    uint64_t scales = 0, codes = n;
    if (codec == REF_NONE) return 4 * n;
    if (codec == REF_BF16 || codec == REF_FP16) codes = 2 * n;
    if (codec == REF_FP8_E4M3 || codec == REF_FP8_E5M2) scales = (n + 127) / 128;
    if (codec == REF_INT8) scales = 4 * ((n + 127) / 128);
    if (codec == REF_MXFP4) scales = (n + 31) / 32, codes = (n + 1) / 2;
    return (scales + 15) / 16 * 16 + (codes + 15) / 16 * 16;
}
