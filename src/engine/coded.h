/* SPDX-License-Identifier: Apache-2.0
 * coded.h: what happened to compressed data: counted per kind of operation and codec.  Private to the engine. */
#ifndef GB_ENGINE_CODED_H
#define GB_ENGINE_CODED_H

#include "engine/engine.h"

/* Any thread, after arithmetic on the host: `args` is what ran, args->stats what encoding met. */
void gb_coded_reduced(struct gb_op *op, const struct gb_step *step, const struct gb_reduce_args *args);
/* Engine role: a message between islands was sent or has arrived.  On staged ranks its bytes, which are in host memory
 * (its sender's, if it was lent), tell whether the device met NaN or infinity. */
void gb_coded_message(struct gb_op *op, const struct gb_step *step, const void *bytes);
/* Engine role: the operation finished. */
void gb_coded_finished(struct gb_op *op);

#endif
