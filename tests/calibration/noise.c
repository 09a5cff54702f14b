/* SPDX-License-Identifier: Apache-2.0
 * Noise families with a relative standard deviation of `sd` per step, see noise.h.  Normals come from a 256-layer
 * ziggurat over xoshiro256++, so a stream-step costs a few nanoseconds.  */
#include "noise.h"

#include "straggler/num.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char *const names[NOISE_FAMILY_COUNT] = {"gaussian", "lognormal", "t3",    "stalls", "ar0.05",  "ar0.1",
                                                      "ar0.3",    "ar0.66",    "drift", "wander", "settling"};

#define LAYERS 256
static const double tail_start = 3.6541528853610088, layer_area = 0.00492867323399;
/* Filled once by noise_init before any thread draws. */
static double layer_x[LAYERS + 1], layer_f[LAYERS + 1];

static void fill_layers(void)
{
    double x = tail_start, f = exp(-0.5 * x * x);
    layer_x[0] = layer_area / f;
    layer_x[1] = x;
    for (int i = 2; i < LAYERS; i++) {
        x = sqrt(-2.0 * log(layer_area / x + f));
        f = exp(-0.5 * x * x);
        layer_x[i] = x;
    }
    layer_x[LAYERS] = 0.0;
    for (int i = 0; i <= LAYERS; i++) layer_f[i] = exp(-0.5 * layer_x[i] * layer_x[i]);
}

static inline uint64_t rotl(uint64_t x, int k)
{
    return (x << k) | (x >> (64 - k));
}

static inline uint64_t draw(struct noise *n)
{
    uint64_t *s = n->s, r = rotl(s[0] + s[3], 23) + s[0], t = s[1] << 17;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= t;
    s[3] = rotl(s[3], 45);
    return r;
}

double noise_uniform(struct noise *n)
{
    return ((double)(draw(n) >> 12) + 0.5) * 0x1p-52;
}

static double draw_tail(struct noise *n)
{
    double x, y;
    do {
        x = -log(noise_uniform(n)) / tail_start;
        y = -log(noise_uniform(n));
    } while (y + y < x * x);
    return tail_start + x;
}

double noise_normal(struct noise *n)
{
    for (;;) {
        uint64_t bits = draw(n);
        unsigned i = bits & 255;
        double sign = (bits & 256) ? -1.0 : 1.0, u = (double)(bits >> 11) * 0x1p-53, x = u * layer_x[i];
        if (x < layer_x[i + 1]) return sign * x;
        if (i == 0) return sign * draw_tail(n);
        if (layer_f[i] + noise_uniform(n) * (layer_f[i + 1] - layer_f[i]) < exp(-0.5 * x * x)) return sign * x;
    }
}

const char *noise_name(int family)
{
    return family >= 0 && family < NOISE_FAMILY_COUNT ? names[family] : "?";
}

int noise_find(const char *name)
{
    for (int i = 0; i < NOISE_FAMILY_COUNT; i++)
        if (strcmp(name, names[i]) == 0) return i;
    return -1;
}

int noise_init(struct noise *n, int family, int ranks, int group, uint64_t seed)
{
    if (layer_x[1] == 0.0) fill_layers();
    memset(n, 0, sizeof *n);
    for (int i = 0; i < 4; i++) { /* splitmix64 */
        uint64_t z = (seed += 0x9e3779b97f4a7c15u);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        n->s[i] = z ^ (z >> 31);
    }
    n->family = family;
    n->ranks = ranks;
    n->group = group;
    n->sd = 0.05;
    n->wander_steps = 200.0;
    n->state = calloc((size_t)ranks * 2 + 1, sizeof *n->state);
    n->common = calloc((size_t)ranks + 1, sizeof *n->common);
    n->age = calloc((size_t)ranks + 1, sizeof *n->age);
    if (!n->state || !n->common || !n->age) {
        noise_fini(n);
        return -1;
    }
    for (int r = 0; r < ranks; r++)
        if (family != NOISE_DRIFT) n->state[r] = noise_normal(n);
    return 0;
}

void noise_fini(struct noise *n)
{
    free(n->state);
    free(n->common);
    free(n->age);
    n->state = n->common = NULL;
    n->age = NULL;
}

void noise_restart(struct noise *n, int rank)
{
    n->age[rank] = 0;
}

/* Student t with 3 degrees of freedom and unit variance: normal over the root of a chi-squared, in batches. */
static void fill_t3(struct noise *n, double *x)
{
    double h[64], u[64];
    for (int r = 0; r < n->ranks; r += 64) {
        int m = n->ranks - r < 64 ? n->ranks - r : 64;
        for (int i = 0; i < m; i++) {
            x[r + i] = noise_normal(n);
            h[i] = noise_normal(n);
            u[i] = noise_uniform(n);
        }
        for (int i = 0; i < m; i++) x[r + i] = x[r + i] / sqrt(h[i] * h[i] - 2.0 * gb_log(u[i]));
    }
}

static void fill_autoregressive(struct noise *n, double phi, double *x)
{
    double innovation = sqrt(1.0 - phi * phi);
    for (int r = 0; r < n->ranks; r++) x[r] = n->state[r] = phi * n->state[r] + innovation * noise_normal(n);
}

static void fill_stalls(struct noise *n, double *x)
{
    const double p = 0.02, mean = 0.20;
    double base = sqrt(n->sd * n->sd - (2.0 * p * mean * mean - p * p * mean * mean));
    for (int r = 0; r < n->ranks; r++) {
        double t = base * noise_normal(n);
        if (noise_uniform(n) < p) t += -mean * log(noise_uniform(n));
        x[r] = t / n->sd;
    }
}

/* Random walk of 0.05 % per step around 0 (pulled back over 10,000 steps): a common level that drifts by several %. */
static void move_drift(struct noise *n)
{
    for (int g = 0; g * n->group < n->ranks; g++) {
        double *d = &n->state[n->ranks + g];
        *d = *d * (1.0 - 1e-4) + 5e-4 * noise_normal(n);
        n->common[g] = *d;
    }
}

/* Standardised noise of each rank. */
static void fill_standard(struct noise *n, double *x)
{
    static const double phi[] = {0.05, 0.1, 0.3, 0.66};
    switch (n->family) {
    case NOISE_T3:
        fill_t3(n, x);
        break;
    case NOISE_STALLS:
        fill_stalls(n, x);
        break;
    case NOISE_AR05:
    case NOISE_AR10:
    case NOISE_AR30:
    case NOISE_AR66:
        fill_autoregressive(n, phi[n->family - NOISE_AR05], x);
        break;
    default:
        for (int r = 0; r < n->ranks; r++) x[r] = noise_normal(n);
        break;
    }
}

static void mix_common(struct noise *n, double *x)
{
    double own = sqrt(1.0 - n->share), shared = sqrt(n->share), c = 0.0;
    for (int r = 0; r < n->ranks; r++) {
        if (r % n->group == 0) c = noise_normal(n);
        x[r] = own * x[r] + shared * c;
    }
}

void noise_step(struct noise *n, double *seconds)
{
    fill_standard(n, seconds);
    if (n->share > 0.0) mix_common(n, seconds);
    if (n->family == NOISE_DRIFT) move_drift(n);
    if (n->family == NOISE_GAUSSIAN || n->family == NOISE_STALLS ||
        (n->family >= NOISE_AR05 && n->family <= NOISE_AR66)) {
        for (int r = 0; r < n->ranks; r++)
            seconds[r] = 1.0 + n->sd * seconds[r] < 0.05 ? 0.05 : 1.0 + n->sd * seconds[r];
        return;
    }
    if (n->family == NOISE_LOGNORMAL || n->family == NOISE_T3) {
        for (int r = 0; r < n->ranks; r++) {
            double t = gb_exp(n->sd * seconds[r]); /* a t3 value may be hundreds of deviations out */
            seconds[r] = t < 0.05 ? 0.05 : t > 20.0 ? 20.0 : t;
        }
        return;
    }
    double decay = exp(-1.0 / n->wander_steps), kick = sqrt(1.0 - decay * decay);
    for (int r = 0; r < n->ranks; r++) {
        double y = n->sd * seconds[r];
        switch (n->family) {
        case NOISE_DRIFT:
            seconds[r] = (1.0 + y) * (1.0 + n->common[r / n->group]);
            break;
        case NOISE_WANDER:
            n->state[r] = decay * n->state[r] + kick * noise_normal(n);
            seconds[r] = 1.0 + y + 0.001 * n->state[r];
            break;
        case NOISE_SETTLING: {
            double left = 1.0 - (double)n->age[r] / 400.0;
            seconds[r] = 1.0 + y + (left > 0.0 ? 0.0035 * left : 0.0);
            break;
        }
        default:
            seconds[r] = 1.0 + y;
            break;
        }
        n->age[r]++;
        if (seconds[r] < 0.05) seconds[r] = 0.05;
    }
}
