/* SPDX-License-Identifier: Apache-2.0
 * The launcher is not part of this version: opening one says so, and nothing else can be reached without one. */
#include "engine/launcher.h"

#include <stdlib.h>

int gb_launcher_open(struct gb_device *device, int gate, void (*wake)(void *), void *wake_arg,
                     struct gb_launcher **launcher)
{
    (void)device, (void)gate, (void)wake, (void)wake_arg, (void)launcher;
    return GB_FAIL(GPUBRIDGE_ERR_UNSUPPORTED, "GPU tensors are not supported by this version: use CPU tensors");
}

#define UNREACHABLE(decl)                                                                                              \
    decl                                                                                                               \
    {                                                                                                                  \
        abort();                                                                                                       \
    }
UNREACHABLE(void gb_launcher_close(struct gb_launcher *l))
UNREACHABLE(void *gb_launcher_mem(struct gb_launcher *l, uint64_t b))
UNREACHABLE(void gb_launcher_mem_free(struct gb_launcher *l, void *m))
UNREACHABLE(void *gb_launcher_host(struct gb_launcher *l, uint64_t b))
UNREACHABLE(void gb_launcher_host_free(struct gb_launcher *l, void *m))
UNREACHABLE(int gb_launcher_record(struct gb_launcher *l, void *s, void **e))
UNREACHABLE(void gb_launcher_start(struct gb_launcher *l, struct gb_dev_op *o))
UNREACHABLE(void gb_launcher_kick(struct gb_launcher *l))
UNREACHABLE(void gb_launcher_abort(struct gb_launcher *l, struct gb_dev_op *o))
UNREACHABLE(int gb_launcher_wait_stream(struct gb_launcher *l, struct gb_dev_op *o, void *s))
UNREACHABLE(void gb_launcher_release(struct gb_launcher *l, struct gb_dev_op *o))
UNREACHABLE(void gb_launcher_call(struct gb_launcher *l, void (*fn)(void *), void *a))
UNREACHABLE(void gb_launcher_drop_set(struct gb_launcher *l, uint32_t s))
