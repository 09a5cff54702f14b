/* SPDX-License-Identifier: Apache-2.0 */
#include "base/err.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
/* cmocka needs the four headers above first */
#include <cmocka.h>

static int fails(int n)
{
    return n > 3 ? GB_FAIL(GPUBRIDGE_ERR_INVALID, "n is %d, at most 3", n) : 0;
}

static int passes_up(int n, int *out)
{
    GB_TRY(fails(n));
    *out = n;
    return 0;
}

static void test_text_and_status(void **state)
{
    (void)state;
    int out = -7;
    assert_int_equal(passes_up(4, &out), GPUBRIDGE_ERR_INVALID);
    assert_int_equal(out, -7);
    assert_non_null(strstr(gb_err_text(), "n is 4, at most 3 (err_test.c:"));
    assert_int_equal(passes_up(2, &out), 0);
    assert_int_equal(out, 2);
}

static void test_long_text_is_cut(void **state)
{
    (void)state;
    char big[4000];
    memset(big, 'x', sizeof big - 1);
    big[sizeof big - 1] = 0;
    assert_int_equal(GB_FAIL(GPUBRIDGE_ERR_SYSTEM, "%s", big), GPUBRIDGE_ERR_SYSTEM);
    assert_true(strlen(gb_err_text()) < 1024);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_text_and_status),
        cmocka_unit_test(test_long_text_is_cut),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
