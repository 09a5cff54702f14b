/* SPDX-License-Identifier: Apache-2.0
 * Errors are values: every fallible function returns an enum gpubridge_status (0 or negative).
 * The first place that knows a failure describes it with GB_FAIL (text kept per thread, with file:line);
 * callers pass it up with GB_TRY.  Outputs are written only on success.  */
#ifndef GB_BASE_ERR_H
#define GB_BASE_ERR_H

#include <gpubridge/gpubridge.h>
#include <stdarg.h>
#include <stddef.h>

#define GB_NODISCARD __attribute__((warn_unused_result))

/* Stores "text (file:line)" as this thread's last error and returns `status`. */
int gb_err_set(int status, const char *file, int line, const char *fmt, ...) __attribute__((format(printf, 4, 5)));
/* The calling thread's last error text; "" when there is none.  Valid until the thread's next failure. */
const char *gb_err_text(void);
/* Replaces the text, e.g. by one that was recorded on another thread. */
void gb_err_put(const char *text);

#define GB_FAIL(status, ...) gb_err_set((status), __FILE__, __LINE__, __VA_ARGS__)
#define GB_TRY(expr)                                                                                                   \
    do {                                                                                                               \
        int gb_try_rc_ = (expr);                                                                                       \
        if (gb_try_rc_ != 0) return gb_try_rc_;                                                                        \
    } while (0)

#endif
