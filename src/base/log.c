/* SPDX-License-Identifier: Apache-2.0
 * The log sink.  Any thread; a mutex keeps lines whole. */
#include "base/log.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic int max_level = GB_LOG_WARN;        /* relaxed: a late change of verbosity is harmless */
static char label[96];                             /* guarded by lock */
static void (*sink_fn)(void *, int, const char *); /* guarded by lock */
static void *sink_arg;                             /* guarded by lock */

static const char *const words[] = {"error", "warning", "info", "debug", "trace"};

void gb_log_set_level(enum gb_log_level level)
{
    atomic_store_explicit(&max_level, (int)level, memory_order_relaxed);
}

void gb_log_set_label(const char *text)
{
    pthread_mutex_lock(&lock);
    snprintf(label, sizeof label, "%s", text);
    pthread_mutex_unlock(&lock);
}

void gb_log_set_sink(void (*sink)(void *arg, int level, const char *line), void *arg)
{
    pthread_mutex_lock(&lock);
    sink_fn = sink;
    sink_arg = arg;
    pthread_mutex_unlock(&lock);
}

int gb_log_is_on(enum gb_log_level level)
{
    return (int)level <= atomic_load_explicit(&max_level, memory_order_relaxed);
}

void gb_log(enum gb_log_level level, const char *fmt, ...)
{
    if (!gb_log_is_on(level)) return;
    char line[1200];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    pthread_mutex_lock(&lock);
    if (sink_fn)
        sink_fn(sink_arg, (int)level, line);
    else
        fprintf(stderr, "gpubridge %s%s%s: %s\n", words[level], label[0] ? " " : "", label, line);
    pthread_mutex_unlock(&lock);
}
