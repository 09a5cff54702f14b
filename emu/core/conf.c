/* SPDX-License-Identifier: Apache-2.0
 * Settings of the emulator, read once from the environment, plus the small services that depend on nothing else:
 * complaints, clock, random numbers.  The fault table counts calls per API, under a lock.  */
#include "emu.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MAX_FAULTS 16

struct fault {
    char api[48];
    unsigned nth; /* 0: every call */
    int code;
    unsigned delay_us;
    unsigned seen; /* guarded by fault_mu */
};

static struct emu_conf conf;
static pthread_once_t conf_once = PTHREAD_ONCE_INIT;
static struct fault faults[MAX_FAULTS];
static int fault_count;
static pthread_mutex_t fault_mu = PTHREAD_MUTEX_INITIALIZER;

static long env_long(const char *name, long fallback)
{
    const char *text = getenv(name);
    if (!text || !*text) return fallback;
    char *end;
    errno = 0;
    long v = strtol(text, &end, 0);
    if (errno || *end) {
        fprintf(stderr, "gbemu[%s]: %s=%s is not a number; using %ld\n", emu_vendor.name, name, text, fallback);
        return fallback;
    }
    return v;
}

/* "api:nth:code[,...]" for GBEMU_FAIL, "api:us[,...]" for GBEMU_SLOW. */
static void read_faults(const char *name, bool slow)
{
    const char *text = getenv(name);
    while (text && *text && fault_count < MAX_FAULTS) {
        struct fault *f = &faults[fault_count];
        int used = 0;
        int got = slow ? sscanf(text, "%47[^:]:%u%n", f->api, &f->delay_us, &used)
                       : sscanf(text, "%47[^:]:%u:%d%n", f->api, &f->nth, &f->code, &used);
        if (got != (slow ? 2 : 3) || (text[used] && text[used] != ',')) {
            fprintf(stderr, "gbemu[%s]: %s: cannot read \"%s\"; want %s\n", emu_vendor.name, name, text,
                    slow ? "api:microseconds[,...]" : "api:nth:code[,...]");
            return;
        }
        fault_count++;
        text += used;
        if (*text) text++;
    }
}

static void read_rtc(void)
{
    const char *text = getenv("GBEMU_RTC");
    if (!text || !*text || !strcmp(text, "auto"))
        conf.rtc = EMU_RTC_AUTO;
    else if (!strcmp(text, "gcc"))
        conf.rtc = EMU_RTC_GCC;
    else if (!strcmp(text, "twin"))
        conf.rtc = EMU_RTC_TWIN;
    else
        fprintf(stderr, "gbemu[%s]: GBEMU_RTC=%s: want auto, twin or gcc\n", emu_vendor.name, text);
}

/* What a model of GPU, with a driver of its time, answers.  Figures of public data sheets and release notes. */
struct profile {
    const char *name, *vendor, *arch;
    int driver_version, nccl_version, multiprocessors, hw_queues;
};

static const struct profile profiles[] = {
    {"V100", "cuda", "sm_70", 12080, 22602, 80, 8},
    {"A100", "cuda", "sm_80", 12080, 22602, 108, 8},
    {"H200", "cuda", "sm_90", 13000, 22809, 132, 8},
    {"MI50", "hip", "gfx906:sramecc+:xnack-", 50731921, 21701, 60, 4},
    {"MI210", "hip", "gfx90a:sramecc+:xnack-", 60241133, 22005, 104, 4},
    {"MI300X", "hip", "gfx942:sramecc+:xnack-", 70151831, 22707, 304, 4},
};

/* The name of GBEMU_PROFILE that is for this process: one for all, or a comma list by LOCAL_RANK. */
static const struct profile *find_profile(void)
{
    const char *at = getenv("GBEMU_PROFILE");
    if (!at || !*at) return NULL;
    for (long i = strchr(at, ',') ? env_long("LOCAL_RANK", 0) : 0; i > 0 && strchr(at, ','); i--)
        at = strchr(at, ',') + 1;
    const size_t n = strcspn(at, ",");
    for (size_t i = 0; i < sizeof profiles / sizeof *profiles; i++)
        if (strlen(profiles[i].name) == n && !strncmp(at, profiles[i].name, n))
            return strcmp(profiles[i].vendor, emu_vendor.name) == 0 ? &profiles[i] : NULL;
    fprintf(stderr, "gbemu[%s]: GBEMU_PROFILE=%s: there is V100, A100, H200, MI50, MI210, MI300X\n", emu_vendor.name,
            at);
    return NULL;
}

static void read_model(void)
{
    const struct profile *p = find_profile();
    const char *arch = getenv("GBEMU_ARCH");
    conf.nccl_version = (int)env_long("GBEMU_NCCL_VERSION", p ? p->nccl_version : emu_vendor.nccl_version);
    conf.driver_version = (int)env_long("GBEMU_DRIVER_VERSION", p ? p->driver_version : emu_vendor.driver_version);
    conf.multiprocessors = p ? p->multiprocessors : 4;
    conf.wave = emu_vendor.wave;
    conf.hw_queues = (int)env_long("GBEMU_HW_QUEUES", p ? p->hw_queues : 0);
    if (conf.hw_queues < 0 || conf.hw_queues > EMU_MAX_HW_QUEUES) conf.hw_queues = EMU_MAX_HW_QUEUES;
    snprintf(conf.arch, sizeof conf.arch, "%s", arch && *arch ? arch : p ? p->arch : emu_vendor.arch);
    if (p)
        snprintf(conf.device_name, sizeof conf.device_name, "Emulated %s", p->name);
    else
        snprintf(conf.device_name, sizeof conf.device_name, "%s", emu_vendor.device_name);
}

static void read_conf(void)
{
    /* Ranks of one job share the environment: their rank makes their delays differ. */
    conf.seed = (uint64_t)env_long("GBEMU_SEED", 1) * 0x9E3779B97F4A7C15u + (uint64_t)env_long("RANK", 0) * 7919u + 1;
    conf.delay_us = (unsigned)env_long("GBEMU_DELAY_US", 20);
    conf.poll_us = (unsigned)env_long("GBEMU_POLL_US", 100);
    if (conf.poll_us < 5) conf.poll_us = 5;
    conf.queue = (unsigned)env_long("GBEMU_QUEUE", 1019);
    if (conf.queue < 1) conf.queue = 1;
    conf.devices = (int)env_long("GBEMU_DEVICES", 8);
    if (conf.devices < 0) conf.devices = 0;
    if (conf.devices > EMU_MAX_DEVICES) conf.devices = EMU_MAX_DEVICES;
    conf.guard = env_long("GBEMU_GUARD", 0) != 0;
    conf.one_thread = env_long("GBEMU_ONE_THREAD", 0) != 0;
    conf.strict = (int)env_long("GBEMU_STRICT", 1);
    conf.leaks = env_long("GBEMU_LEAKS", 0) != 0;
    conf.capturing = env_long("GBEMU_CAPTURING", 0) != 0;
    conf.quarantine_bytes = (size_t)env_long("GBEMU_QUARANTINE_MB", 64) << 20;
    read_model();
    const char *loading = getenv("CUDA_MODULE_LOADING");
    conf.eager = loading && !strcmp(loading, "EAGER");
    read_rtc();
    read_faults("GBEMU_FAIL", false);
    read_faults("GBEMU_SLOW", true);
}

const struct emu_conf *emu_conf(void)
{
    pthread_once(&conf_once, read_conf);
    return &conf;
}

int emu_conf_fault(const char *api)
{
    emu_conf();
    int code = 0;
    unsigned delay = 0;
    if (!fault_count) return 0;
    pthread_mutex_lock(&fault_mu);
    for (int i = 0; i < fault_count; i++) {
        struct fault *f = &faults[i];
        if (strcmp(f->api, api) != 0) continue;
        f->seen++;
        if (f->delay_us)
            delay += f->delay_us;
        else if (f->nth == 0 || f->seen == f->nth)
            code = f->code;
    }
    pthread_mutex_unlock(&fault_mu);
    if (delay) emu_sleep_us(delay);
    return code;
}

static void say(const char *fmt, va_list ap)
{
    char line[1024];
    int n = snprintf(line, sizeof line, "gbemu[%s] pid %d: %s: ", emu_vendor.name, (int)getpid(),
                     emu_thread.api ? emu_thread.api : "worker");
    vsnprintf(line + n, sizeof line - (size_t)n - 1, fmt, ap);
    strcat(line, "\n");
    /* One write, so that lines of several ranks do not mix. */
    ssize_t ignored = write(STDERR_FILENO, line, strlen(line));
    (void)ignored;
}

void emu_say(const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    say(fmt, ap);
    va_end(ap);
}

void emu_complain(const char *fmt, ...)
{
    if (emu_conf()->strict == 0) return;
    va_list ap;
    va_start(ap, fmt);
    say(fmt, ap);
    va_end(ap);
    if (emu_conf()->strict >= 2) abort();
}

uint64_t emu_now_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

void emu_sleep_us(unsigned us)
{
    struct timespec ts = {.tv_sec = us / 1000000, .tv_nsec = (long)(us % 1000000) * 1000};
    while (nanosleep(&ts, &ts) != 0 && errno == EINTR) continue;
}

uint64_t emu_rand(uint64_t *state)
{
    uint64_t x = *state;
    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    *state = x;
    return x * 0x2545F4914F6CDD1Du;
}
