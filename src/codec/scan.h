/* SPDX-License-Identifier: Apache-2.0
 * scan.h: looks through an encoded message for NaN and infinity without decoding it.  Pure; any thread. */
#ifndef GB_CODEC_SCAN_H
#define GB_CODEC_SCAN_H

#include <stdint.h>

/* How many of `count` values are infinite or NaN when they are decoded. */
uint64_t gb_codec_not_finite(int codec, const void *message, uint64_t count);

#endif
