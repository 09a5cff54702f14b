/* SPDX-License-Identifier: Apache-2.0
 * Modules, functions and launches.  An image is what rtc.c made: a reference to a built-in twin, or a shared object
 * in memory.  Blocks of a launch run one after the other in a random order.  */
#include "image.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAX_ARG_BYTES 4096

struct module {
    struct emu_obj obj;
    void *dl;
    const struct emu_twin *twins;
    pthread_mutex_t mu;
    struct function *functions; /* guarded by mu */
};
struct function {
    struct emu_obj obj;
    struct module *module; /* a reference */
    const struct emu_twin *twin;
    _Atomic int loaded;
    struct function *next;
};
struct launch_arg {
    struct function *function; /* a reference */
    struct emu_dim grid, block;
    size_t offset[32];
    _Alignas(16) unsigned char values[];
};

static void run_busy(void *const *args, const unsigned *dims, void *(*alias)(const void *))
{
    uint32_t us;
    memcpy(&us, args[0], sizeof us);
    if (dims[0] == 0) emu_sleep_us(us);
}

static const unsigned busy_sizes[] = {4};
static const struct emu_twin builtin[] = {{"gbemu_busy", 1, busy_sizes, run_busy}, {NULL, 0, NULL, NULL}};

static void fini_module(void *obj)
{
    struct module *m = obj;
    if (m->dl) dlclose(m->dl);
}

static void fini_function(void *obj)
{
    emu_obj_put(((struct function *)obj)->module);
}

static bool load_object(struct module *m, const void *bytes, size_t size)
{
    char path[64];
    int fd = memfd_create("gbemu-module", MFD_CLOEXEC);
    if (fd < 0) return false;
    bool written = write(fd, bytes, size) == (ssize_t)size;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    m->dl = written ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    if (!m->dl) emu_complain("cannot load the image: %s", written ? dlerror() : "short write");
    close(fd);
    m->twins = m->dl ? dlsym(m->dl, "gbemu_twins") : NULL;
    return m->twins != NULL;
}

int emu_module_load(struct emu_dev *dev, const void *image, void **out)
{
    const struct image_head *head = image;
    if (!image || memcmp(head->magic, IMAGE_MAGIC, sizeof head->magic) != 0 ||
        strcmp(head->vendor, emu_vendor.name) != 0) {
        emu_complain("not an image that this library's run-time compiler made");
        return EMU_BAD_IMAGE;
    }
    if (!image_arch_fits(head->arch)) {
        emu_complain("image is for %s, the device is %s", head->arch, emu_conf()->arch);
        return EMU_WRONG_ARCH;
    }
    struct module *m = emu_obj_new(EMU_MODULE, sizeof *m, dev);
    m->obj.fini = fini_module;
    pthread_mutex_init(&m->mu, NULL);
    bool ok;
    if (head->kind == IMAGE_TWIN) {
        m->twins = image_twins(head->hash);
        ok = m->twins != NULL;
    } else {
        ok = load_object(m, head + 1, head->size);
    }
    if (!ok) {
        emu_obj_end(m);
        return EMU_BAD_IMAGE;
    }
    /* Eager loading puts the code on the device now, and stops everybody as a free does. */
    if (emu_conf()->eager) {
        emu_exclusive_begin(dev);
        emu_exclusive_end(dev);
    }
    *out = m;
    return EMU_OK;
}

int emu_module_unload(struct emu_dev *dev, void *handle)
{
    struct module *m = emu_obj_get(EMU_MODULE, handle);
    if (!m) return EMU_BAD_HANDLE;
    emu_exclusive_begin(dev);
    emu_exclusive_end(dev);
    pthread_mutex_lock(&m->mu);
    struct function *f = m->functions;
    m->functions = NULL;
    pthread_mutex_unlock(&m->mu);
    while (f) {
        struct function *next = f->next;
        emu_obj_end(f);
        f = next;
    }
    emu_obj_end(m);
    emu_obj_put(m);
    return EMU_OK;
}

static const struct emu_twin *find_twin(const struct emu_twin *t, const char *name)
{
    while (t->name && strcmp(t->name, name) != 0) t++;
    return t->name ? t : NULL;
}

int emu_module_function(void *handle, const char *name, void **out)
{
    struct module *m = emu_obj_get(EMU_MODULE, handle);
    if (!m) return EMU_BAD_HANDLE;
    const struct emu_twin *t = find_twin(m->twins, name);
    if (!t) t = find_twin(builtin, name);
    pthread_mutex_lock(&m->mu);
    struct function *f = m->functions;
    while (f && f->twin != t) f = f->next;
    if (t && !f) {
        f = emu_obj_new(EMU_FUNCTION, sizeof *f, m->obj.dev);
        f->obj.fini = fini_function;
        emu_obj_ref(m);
        f->module = m;
        f->twin = t;
        /* Eager loading has put it on the device already. */
        atomic_store(&f->loaded, emu_conf()->eager);
        f->next = m->functions;
        m->functions = f;
    }
    pthread_mutex_unlock(&m->mu);
    emu_obj_put(m);
    *out = f;
    return t ? EMU_OK : EMU_NOT_FOUND;
}

/* Lazy loading: waits for what is pending; other threads' calls go through meanwhile. */
static void load_function(struct emu_dev *dev, struct function *f)
{
    if (atomic_load(&f->loaded)) return;
    emu_drain(dev, NULL);
    atomic_store(&f->loaded, 1);
}

int emu_function_load(struct emu_dev *dev, void *handle)
{
    struct function *f = emu_obj_get(EMU_FUNCTION, handle);
    if (!f) return EMU_BAD_HANDLE;
    load_function(dev, f);
    emu_obj_put(f);
    return EMU_OK;
}

static uint64_t gcd(uint64_t a, uint64_t b)
{
    while (b) {
        uint64_t t = a % b;
        a = b;
        b = t;
    }
    return a;
}

static void run_launch(struct emu_stream *s, const char *api, void *arg)
{
    struct launch_arg *l = arg;
    const struct emu_twin *t = l->function->twin;
    void *args[32];
    for (unsigned i = 0; i < t->count; i++) args[i] = l->values + l->offset[i];
    uint64_t blocks = (uint64_t)l->grid.x * l->grid.y * l->grid.z;
    /* i -> (a i + b) mod n visits every block once, in an order that no kernel can count on. */
    uint64_t a = emu_rand(&s->rng) % blocks, b = emu_rand(&s->rng) % blocks;
    while (gcd(a, blocks) != 1) a = (a + 1) % blocks ? (a + 1) % blocks : 1;
    for (uint64_t i = 0, at = b; i < blocks; i++, at = (at + a) % blocks) {
        unsigned dims[9] = {(unsigned)(at % l->grid.x),
                            (unsigned)(at / l->grid.x % l->grid.y),
                            (unsigned)(at / l->grid.x / l->grid.y),
                            l->grid.x,
                            l->grid.y,
                            l->grid.z,
                            l->block.x,
                            l->block.y,
                            l->block.z};
        t->run(args, dims, emu_mem_alias);
    }
}

static void drop_launch(void *arg)
{
    emu_obj_put(((struct launch_arg *)arg)->function);
}

static int check_dims(struct emu_dim g, struct emu_dim b)
{
    uint64_t threads = (uint64_t)b.x * b.y * b.z;
    if (!g.x || !g.y || !g.z || !threads || threads > 1024 || g.y > 65535 || g.z > 65535) {
        emu_complain("bad launch: grid %u x %u x %u, block %u x %u x %u", g.x, g.y, g.z, b.x, b.y, b.z);
        return EMU_INVALID;
    }
    return EMU_OK;
}

int emu_launch(struct emu_stream *s, void *handle, struct emu_dim grid, struct emu_dim block, void **params)
{
    union {
        struct launch_arg l;
        unsigned char bytes[sizeof(struct launch_arg) + MAX_ARG_BYTES];
    } a;
    int rc = check_dims(grid, block);
    if (rc) return rc;
    struct function *f = emu_obj_get(EMU_FUNCTION, handle);
    if (!f) return EMU_BAD_HANDLE;
    a.l = (struct launch_arg){.function = f, .grid = grid, .block = block};
    size_t used = 0;
    if (f->obj.dev != s->obj.dev || f->twin->count > 32 || (f->twin->count && !params)) rc = EMU_INVALID;
    for (unsigned i = 0; !rc && i < f->twin->count; i++) {
        size_t n = f->twin->sizes[i];
        used = (used + 15) / 16 * 16;
        if (used + n > MAX_ARG_BYTES || !params[i]) {
            rc = EMU_INVALID;
            break;
        }
        a.l.offset[i] = used;
        memcpy(a.bytes + offsetof(struct launch_arg, values) + used, params[i], n);
        used += n;
    }
    if (rc) {
        emu_complain("bad launch of %s: %u arguments", f->twin->name, f->twin->count);
        emu_obj_put(f);
        return rc;
    }
    if (emu_conf()->one_thread && f->twin != builtin) a.l.grid = a.l.block = (struct emu_dim){1, 1, 1};
    load_function(s->obj.dev, f);
    /* On failure emu_post has dropped the reference. */
    return emu_post(s, run_launch, drop_launch, &a, offsetof(struct launch_arg, values) + used, NULL);
}
