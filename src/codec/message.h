/* SPDX-License-Identifier: Apache-2.0
 * reduce.c's other half: operations with an encoded source or destination.  Called with the floating-point state of
 * reduce.h; any thread. */
#ifndef GB_CODEC_MESSAGE_H
#define GB_CODEC_MESSAGE_H

#include "codec/reduce.h"

void gb_reduce_messages(const struct gb_reduce_args *args);

/* For tests: the vector widths that this machine has, from 0 on until NULL, the widest last; and the operation by one.
 */
const char *gb_message_way(int way);
void gb_reduce_messages_by(int way, const struct gb_reduce_args *args);

#endif
