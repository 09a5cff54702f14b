/* SPDX-License-Identifier: Apache-2.0
 * sanitized.h: whether a test does less: in an instrumented build, ten times slower at least; and where GB_TEST_SHORT
 * is set, for the second run of a test over another transport.  Less are the repetitions, never what is asserted. */
#ifndef GB_TESTS_SANITIZED_H
#define GB_TESTS_SANITIZED_H

#include <stdlib.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED 1
#endif
#endif
#ifndef SANITIZED
#define SANITIZED 0
#endif
#define SHORT            (SANITIZED || getenv("GB_TEST_SHORT"))
#define SANITIZED_FACTOR (SANITIZED ? 13 : 1)

#endif
