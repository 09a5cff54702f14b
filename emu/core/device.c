/* SPDX-License-Identifier: Apache-2.0
 * Devices, primary contexts, what the calling thread has current, and the driver's lock per device.  The lock is not
 * ours to protect data with: it reproduces which calls of which threads stand still while a free waits for the device.
 */
#include "emu.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

_Thread_local struct emu_thread emu_thread;

static struct emu_dev devices[EMU_MAX_DEVICES];
static pthread_once_t devices_once = PTHREAD_ONCE_INIT;
static _Atomic int initialised;
static _Atomic int forked;

static void after_fork(void)
{
    atomic_store(&forked, 1);
}

static void report_leaks(void)
{
    int mem[3];
    emu_mem_count(mem);
    emu_thread.api = "leaks at exit";
    emu_say("device %d, pinned %d, registered %d, streams %d, events %d, modules %d, programs %d, comms %d",
            mem[EMU_MEM_DEVICE], mem[EMU_MEM_PINNED], mem[EMU_MEM_REGISTERED], emu_obj_count(EMU_STREAM),
            emu_obj_count(EMU_EVENT), emu_obj_count(EMU_MODULE), emu_obj_count(EMU_PROGRAM), emu_obj_count(EMU_COMM));
}

static void make_devices(void)
{
    for (int i = 0; i < EMU_MAX_DEVICES; i++) {
        devices[i].index = i;
        pthread_mutex_init(&devices[i].mu, NULL);
        pthread_cond_init(&devices[i].cv, NULL);
        pthread_mutex_init(&devices[i].hw_mu, NULL);
        pthread_cond_init(&devices[i].hw_cv, NULL);
    }
    pthread_atfork(NULL, NULL, after_fork);
    if (emu_conf()->leaks) atexit(report_leaks);
}

int emu_dev_count(void)
{
    return emu_conf()->devices;
}

struct emu_dev *emu_dev_at(int index)
{
    pthread_once(&devices_once, make_devices);
    return index >= 0 && index < emu_dev_count() ? &devices[index] : NULL;
}

int emu_init(void)
{
    pthread_once(&devices_once, make_devices);
    if (atomic_load(&forked)) return EMU_NOT_INIT;
    if (emu_dev_count() == 0) return EMU_NO_DEVICE;
    atomic_store(&initialised, 1);
    return EMU_OK;
}

static uint64_t fnv(const void *data, size_t size, uint64_t h)
{
    const unsigned char *p = data;
    for (size_t i = 0; i < size; i++) h = (h ^ p[i]) * 1099511628211u;
    return h;
}

uint64_t emu_host_id(void)
{
    char text[128] = "";
    const char *env = getenv("NCCL_HOSTID");
    if (env && *env) {
        snprintf(text, sizeof text, "%s", env);
    } else {
        int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
        if (fd >= 0) {
            ssize_t n = read(fd, text, sizeof text - 1);
            text[n > 0 ? n : 0] = 0;
            close(fd);
        }
    }
    return fnv(text, strlen(text), 14695981039346656037u);
}

void emu_dev_uuid(int index, unsigned char out[16])
{
    uint64_t id[2] = {emu_host_id(), fnv(emu_vendor.name, strlen(emu_vendor.name), (uint64_t)index + 1)};
    memcpy(out, id, 16);
}

void emu_dev_pci(int index, char *out, size_t size)
{
    snprintf(out, size, "0000:%02x:00.0", emu_vendor.pci_bus_base + index);
}

int emu_dev_retain(struct emu_dev *dev, struct emu_obj **context)
{
    pthread_mutex_lock(&dev->mu);
    dev->retained++;
    if (!dev->context) dev->context = emu_obj_new(EMU_CONTEXT, sizeof *dev->context, dev);
    *context = dev->context;
    pthread_mutex_unlock(&dev->mu);
    return EMU_OK;
}

int emu_dev_release(struct emu_dev *dev)
{
    pthread_mutex_lock(&dev->mu);
    int left = dev->retained > 0 ? --dev->retained : -1;
    pthread_mutex_unlock(&dev->mu);
    if (left < 0) {
        emu_complain("the primary context of device %d is not retained", dev->index);
        return EMU_NO_CONTEXT;
    }
    if (left == 0) {
        emu_dev_sync(dev);
        emu_stream_destroy_all(dev);
        emu_obj_end_device(dev);
        atomic_store(&dev->sticky, 0);
    }
    return EMU_OK;
}

static int current_device(struct emu_dev **out)
{
    if (!emu_vendor.needs_context) {
        emu_init();
        *out = emu_dev_at(emu_thread.device);
        return *out ? EMU_OK : EMU_NO_DEVICE;
    }
    if (!emu_thread.context) return EMU_NO_CONTEXT;
    struct emu_dev *dev = emu_thread.context->dev;
    pthread_mutex_lock(&dev->mu);
    bool live = dev->retained > 0;
    pthread_mutex_unlock(&dev->mu);
    if (!live) emu_complain("the current context was destroyed (primary context released to zero)");
    *out = dev;
    return live ? EMU_OK : EMU_CONTEXT_DESTROYED;
}

int emu_gate(struct emu_dev *dev)
{
    pthread_mutex_lock(&dev->mu);
    while (dev->exclusive) pthread_cond_wait(&dev->cv, &dev->mu);
    pthread_mutex_unlock(&dev->mu);
    return atomic_load(&dev->sticky);
}

/* Statuses after which real hardware refuses every later call of the process. */
static bool is_fatal(int status)
{
    return (status >= 700 && status <= 720 && status != 712 && status != 713) || status == 214;
}

int emu_enter(const char *api, struct emu_dev **dev)
{
    emu_thread.api = api;
    if (emu_thread.in_callback) {
        emu_complain("called from a host function of a stream, where no API call is permitted");
        return EMU_NOT_PERMITTED;
    }
    if (atomic_load(&forked)) return EMU_NOT_INIT;
    int injected = emu_conf_fault(api);
    if (!dev) return injected;
    if (emu_vendor.needs_context && !atomic_load(&initialised)) return EMU_NOT_INIT;
    int rc = current_device(dev);
    if (rc) return rc;
    if (injected && is_fatal(injected)) emu_dev_fail(*dev, injected);
    rc = emu_gate(*dev);
    return rc ? rc : injected;
}

void emu_exclusive_begin(struct emu_dev *dev)
{
    pthread_mutex_lock(&dev->mu);
    while (dev->exclusive) pthread_cond_wait(&dev->cv, &dev->mu);
    dev->exclusive = true;
    while (dev->pending && !atomic_load(&dev->sticky)) pthread_cond_wait(&dev->cv, &dev->mu);
    pthread_mutex_unlock(&dev->mu);
}

void emu_exclusive_end(struct emu_dev *dev)
{
    pthread_mutex_lock(&dev->mu);
    dev->exclusive = false;
    pthread_cond_broadcast(&dev->cv);
    pthread_mutex_unlock(&dev->mu);
}

void emu_drain(struct emu_dev *dev, const _Atomic int *stop)
{
    struct {
        struct emu_stream *s;
        uint64_t seq;
    } tail[256];
    int n = 0;
    pthread_mutex_lock(&dev->mu);
    for (struct emu_stream *s = dev->streams; s && n < 256; s = s->next) {
        pthread_mutex_lock(&s->mu);
        if (s->done < s->submitted) {
            emu_obj_ref(s);
            tail[n].s = s;
            tail[n++].seq = s->submitted;
        }
        pthread_mutex_unlock(&s->mu);
    }
    pthread_mutex_unlock(&dev->mu);
    for (int i = 0; i < n; i++) {
        emu_stream_wait(tail[i].s, tail[i].seq, stop);
        emu_obj_put(tail[i].s);
    }
}

void emu_dev_fail(struct emu_dev *dev, int status)
{
    int none = 0;
    if (!atomic_compare_exchange_strong(&dev->sticky, &none, status)) return;
    pthread_mutex_lock(&dev->mu);
    pthread_cond_broadcast(&dev->cv);
    pthread_mutex_unlock(&dev->mu);
}
