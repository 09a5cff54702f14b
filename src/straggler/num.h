/* SPDX-License-Identifier: Apache-2.0
 * Logarithm, exponential and constants that give the same bits on every compiler and machine: only + - * / and integer
 * work on the bits of a double.  Not a maths library: arguments must be in the stated range.  */
#ifndef GB_STRAGGLER_NUM_H
#define GB_STRAGGLER_NUM_H

#include <stdint.h>
#include <string.h>

#define GB_LN2 0.6931471805599453

/* Natural logarithm of a positive normal double; error below 2 units in the last place. */
static inline double gb_log(double x)
{
    int64_t bits;
    memcpy(&bits, &x, 8);
    int64_t e = (bits - 0x3fe6a09e667f3bcd) >> 52; /* the mantissa ends up in [sqrt(1/2), sqrt(2)) */
    bits -= (int64_t)((uint64_t)e << 52);
    double f;
    memcpy(&f, &bits, 8);
    double s = (f - 1.0) / (f + 1.0), s2 = s * s;
    double p = 1.0 / 19.0;
    p = p * s2 + 1.0 / 17.0;
    p = p * s2 + 1.0 / 15.0;
    p = p * s2 + 1.0 / 13.0;
    p = p * s2 + 1.0 / 11.0;
    p = p * s2 + 1.0 / 9.0;
    p = p * s2 + 1.0 / 7.0;
    p = p * s2 + 1.0 / 5.0;
    p = p * s2 + 1.0 / 3.0;
    p = p * s2 + 1.0;
    return (double)e * GB_LN2 + 2.0 * s * p;
}

/* Exponential of |x| <= 700, clamped there. */
static inline double gb_exp(double x)
{
    x = x > 700.0 ? 700.0 : x < -700.0 ? -700.0 : x;
    double t = x * 1.4426950408889634;
    int64_t n = (int64_t)(t >= 0.0 ? t + 0.5 : t - 0.5);
    double r = (x - (double)n * 0.693147180369123816490) - (double)n * 1.90821492927058770002e-10;
    double p = 1.0 / 6227020800.0;
    p = p * r + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 1.0 / 2.0;
    p = p * r + 1.0;
    p = p * r + 1.0;
    int64_t bits = (n + 1023) << 52;
    double scale;
    memcpy(&scale, &bits, 8);
    return p * scale;
}

#endif
