/* SPDX-License-Identifier: Apache-2.0
 * The emulators' own exports, for tests: capture state, and operations that are pending on a device.  */
#include "hooks.h"
#include "emu.h"

static _Atomic int capturing = -1;

int hook_capturing(void)
{
    int set = atomic_load(&capturing);
    return set >= 0 ? set : emu_conf()->capturing;
}

EMU_API void gbemu_set_capturing(int status);
EMU_API unsigned long long gbemu_pending(int device);
EMU_API const char *gbemu_vendor(void);

void gbemu_set_capturing(int status)
{
    atomic_store(&capturing, status);
}

unsigned long long gbemu_pending(int device)
{
    struct emu_dev *dev = emu_dev_at(device);
    if (!dev) return 0;
    pthread_mutex_lock(&dev->mu);
    unsigned long long n = dev->pending;
    pthread_mutex_unlock(&dev->mu);
    return n;
}

const char *gbemu_vendor(void)
{
    return emu_vendor.name;
}
