/* SPDX-License-Identifier: Apache-2.0
 * reduce.c's other half: operations with an encoded source or destination.  Called with the floating-point state of
 * reduce.h; any thread. */
#ifndef GB_CODEC_MESSAGE_H
#define GB_CODEC_MESSAGE_H

#include "codec/reduce.h"

void gb_reduce_messages(const struct gb_reduce_args *args);
/* The same without wider vectors than the compiler's default, for tests. */
void gb_reduce_messages_baseline(const struct gb_reduce_args *args);

#endif
