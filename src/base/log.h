/* SPDX-License-Identifier: Apache-2.0
 * Log lines.  Default: warnings and errors to stderr.  Never called per chunk on the data path. */
#ifndef GB_BASE_LOG_H
#define GB_BASE_LOG_H

enum gb_log_level { GB_LOG_ERROR, GB_LOG_WARN, GB_LOG_INFO, GB_LOG_DEBUG, GB_LOG_TRACE };

/* Lines above `level` are dropped. */
void gb_log_set_level(enum gb_log_level level);
/* Words that begin every line of this process, e.g. "rank 3 host-a"; copied. */
void gb_log_set_label(const char *label);
/* NULL restores stderr.  The sink may be called from any thread, one call at a time. */
void gb_log_set_sink(void (*sink)(void *arg, int level, const char *line), void *arg);
int gb_log_is_on(enum gb_log_level level);
void gb_log(enum gb_log_level level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

#define GB_WARN(...) gb_log(GB_LOG_WARN, __VA_ARGS__)
#define GB_INFO(...) gb_log(GB_LOG_INFO, __VA_ARGS__)
#define GB_DEBUG(...)                                                                                                  \
    do {                                                                                                               \
        if (gb_log_is_on(GB_LOG_DEBUG)) gb_log(GB_LOG_DEBUG, __VA_ARGS__);                                             \
    } while (0)

#endif
