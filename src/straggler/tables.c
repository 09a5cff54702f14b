/* SPDX-License-Identifier: Apache-2.0
 * From a false-alarm budget to the constants of the bank (sections 5 and 6 of docs/straggler-engine.md): run length of
 * each member, its exponent by Siegmund's formula, the clipped Gaussian mean and its inverse.  Pure; any thread. */
#include "straggler/num.h"
#include "straggler/stream.h"

#include "base/err.h"

static const double sigmas[GB_MEMBERS] = {0.1, 0.2, 0.4, 1.0, 2.0, 4.0};
/* Share of the budget per member, both sides; their sum exceeds 1 because members raise the same alarms (measured). */
static const double shares[GB_MEMBERS] = {0.40, 0.26, 0.20, 0.12, 0.05, 0.05};
static const double gross_share = 0.03, count_share = 0.03;

/* Mean of a standard normal clipped at 2 after a shift of 0, 0.25, ... 4. */
static const double clipped_mean[17] = {0.0,
                                        0.238060794047,
                                        0.472697343417,
                                        0.7003123453,
                                        0.917066683729,
                                        1.118986798797,
                                        1.302261923517,
                                        1.463676332639,
                                        1.601064864857,
                                        1.713657594178,
                                        1.802204136811,
                                        1.86883328049,
                                        1.916684582874,
                                        1.949413145281,
                                        1.970693209492,
                                        1.98382620642,
                                        1.99150929754};

/* X > 0 with e^X - X - 1 = target; e^X grows fast, so Newton on the logarithm converges from above. */
static double solve_exponent(double target)
{
    double x = gb_log(target + 1.0) + 1.0;
    for (int i = 0; i < 60; i++) x = gb_log(target + 1.0 + x);
    return x;
}

int gb_tables_init(struct gb_tables *t, double run_length, double min_slowdown)
{
    if (!(run_length >= 1000.0 && run_length <= 1e18))
        return GB_FAIL(GPUBRIDGE_ERR_INVALID,
                       "straggler: a false alarm every %g stream-steps is outside 1e3 ... 1e18; change alarms or days",
                       run_length);
    for (int j = 0; j < GB_MEMBERS; j++) {
        double k = sigmas[j] * 0.5;
        t->k[j] = k;
        t->clip[j] = j < GB_NARROW ? 2.0 : j == GB_NARROW ? 4.0 : 6.0;
        t->exponent[j] = solve_exponent(2.0 * k * k * (2.0 * run_length / shares[j]));
        double reference = t->exponent[j] / (2.0 * k) - 1.166;
        t->reference[j] = reference > 0.5 ? reference : 0.5;
    }
    t->gross_probability = gb_exp(gb_log(gross_share / run_length) / 3.0);
    t->count_threshold = gb_log(run_length / count_share);
    t->min_log = gb_log(1.0 + min_slowdown);
    return GPUBRIDGE_OK;
}

double gb_gauss_clipped_inverse(double mean)
{
    for (int i = 0; i < 16; i++)
        if (mean < clipped_mean[i + 1])
            return 0.25 * ((double)i + (mean - clipped_mean[i]) / (clipped_mean[i + 1] - clipped_mean[i]));
    return 4.0;
}
