/* SPDX-License-Identifier: Apache-2.0
 * Per-thread last-error text and the words for each status.  Any thread. */
#include "base/err.h"

#include <stdio.h>
#include <string.h>

static _Thread_local char last_text[1024];

int gb_err_set(int status, const char *file, int line, const char *fmt, ...)
{
    const char *base = strrchr(file, '/');
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(last_text, sizeof last_text, fmt, ap);
    va_end(ap);
    if (n >= 0 && (size_t)n < sizeof last_text)
        snprintf(last_text + n, sizeof last_text - (size_t)n, " (%s:%d)", base ? base + 1 : file, line);
    return status;
}

const char *gb_err_text(void)
{
    return last_text;
}

void gb_err_put(const char *text)
{
    snprintf(last_text, sizeof last_text, "%s", text);
}
