/* SPDX-License-Identifier: Apache-2.0
 * What every fuzz target defines; called by libFuzzer, or by replay.c. */
#ifndef GB_TESTS_FUZZ_H
#define GB_TESTS_FUZZ_H

#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#endif
