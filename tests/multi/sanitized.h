/* SPDX-License-Identifier: Apache-2.0
 * sanitized.h: whether this build is instrumented, so that tests can do less: ten times slower at least. */
#ifndef GB_TESTS_SANITIZED_H
#define GB_TESTS_SANITIZED_H

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
#define SANITIZED_FACTOR (SANITIZED ? 13 : 1)

#endif
