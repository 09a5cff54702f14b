/* SPDX-License-Identifier: Apache-2.0
 * The search for vendor libraries: see dl.h.  Not the symbol tables, which belong to who uses them. */
#include "base/dl.h"

#include "base/log.h"

#include <dlfcn.h>
#include <limits.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_COPIES 4
#define MAX_ROOTS  8

/* What the process has mapped: copies of the wanted library, and directories that hold installed Python packages. */
struct loaded {
    const struct gb_dl_spec *spec;
    char copies[MAX_COPIES][PATH_MAX];
    char roots[MAX_ROOTS][PATH_MAX];
    char torch_root[PATH_MAX];
    int ncopies, nroots;
};

struct tried {
    char text[700];
    size_t used;
};

static void note(struct tried *tried, const char *what)
{
    int n =
        snprintf(tried->text + tried->used, sizeof tried->text - tried->used, "%s%s", tried->used ? ", " : "", what);
    if (n > 0) tried->used += (size_t)n;
    if (tried->used >= sizeof tried->text) tried->used = sizeof tried->text - 1;
}

static void add_root(struct loaded *l, const char *path, size_t n)
{
    for (int i = 0; i < l->nroots; i++)
        if (strlen(l->roots[i]) == n && strncmp(l->roots[i], path, n) == 0) return;
    if (l->nroots < MAX_ROOTS) snprintf(l->roots[l->nroots++], PATH_MAX, "%.*s", (int)n, path);
}

static int look_at(struct dl_phdr_info *info, size_t size, void *arg)
{
    struct loaded *l = arg;
    const char *path = info->dlpi_name, *base = strrchr(path, '/');
    if (!base) return 0;
    base++;
    const struct gb_dl_spec *spec = l->spec;
    int is_copy =
        strncmp(base, spec->prefix, strlen(spec->prefix)) == 0 && !(spec->exclude && strstr(base, spec->exclude));
    if (is_copy && l->ncopies < MAX_COPIES) snprintf(l->copies[l->ncopies++], PATH_MAX, "%s", path);
    static const char *const homes[] = {"/site-packages/", "/dist-packages/"};
    for (size_t i = 0; i < sizeof homes / sizeof *homes; i++) {
        const char *at = strstr(path, homes[i]);
        if (!at) continue;
        size_t n = (size_t)(at - path) + strlen(homes[i]) - 1;
        add_root(l, path, n);
        if (strncmp(base, "libtorch", 8) == 0) snprintf(l->torch_root, PATH_MAX, "%.*s", (int)n, path);
    }
    return 0;
}

static int open_path(const char *path, int flags, struct gb_dl *dl)
{
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL | flags);
    struct link_map *map = NULL;
    if (!handle) return 0;
    dl->handle = handle;
    if (dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0 || !map || !map->l_name) map = NULL;
    const char *name = map && *map->l_name ? map->l_name : path;
    snprintf(dl->path, sizeof dl->path, "%.*s", (int)sizeof dl->path - 1, name); /* for people: a longer one is cut */
    return 1;
}

/* Several copies are mapped: one of them serves torch, and its device memory is that copy's. */
static const char *choose_copy(const struct gb_dl_spec *spec, const struct loaded *l)
{
    const char *chosen = l->copies[0];
    for (int i = 0; i < l->ncopies; i++)
        if (*l->torch_root && strncmp(l->copies[i], l->torch_root, strlen(l->torch_root)) == 0) chosen = l->copies[i];
    if (l->ncopies > 1)
        gb_log(GB_LOG_ERROR,
               "two copies of %s are loaded, %s and %s: memory of one is foreign to the other; using %s; remove one "
               "from the "
               "library path%s%s",
               spec->what, l->copies[0], l->copies[1], chosen, spec->setting ? " or choose by " : "",
               spec->setting ? spec->setting : "");
    return chosen;
}

static int find_loaded(const struct gb_dl_spec *spec, struct loaded *l, struct gb_dl *dl)
{
    dl_iterate_phdr(look_at, l);
    if (l->ncopies > 1) return open_path(choose_copy(spec, l), RTLD_NOLOAD, dl);
    for (const char *const *s = spec->sonames; *s; s++)
        if (open_path(*s, RTLD_NOLOAD, dl)) return 1;
    return l->ncopies && open_path(choose_copy(spec, l), RTLD_NOLOAD, dl);
}

static int open_in(const char *dir, const struct gb_dl_spec *spec, struct gb_dl *dl)
{
    char path[PATH_MAX + 512];
    for (const char *const *s = spec->sonames; *s; s++) {
        snprintf(path, sizeof path, "%s/%s", dir, *s);
        if (open_path(path, 0, dl)) return 1;
    }
    return 0;
}

static int search_dirs(const struct gb_dl_spec *spec, const struct loaded *l, struct tried *tried, struct gb_dl *dl)
{
    char dir[PATH_MAX + 256];
    for (const char *const *d = spec->dirs; d && *d; d++) {
        if (**d == '/') {
            note(tried, *d);
            if (open_in(*d, spec, dl)) return 1;
            continue;
        }
        for (int i = 0; i < l->nroots; i++) {
            snprintf(dir, sizeof dir, "%s/%s", l->roots[i], *d);
            if (i == 0) note(tried, dir);
            if (open_in(dir, spec, dl)) return 1;
        }
    }
    return 0;
}

/* PYTHONPATH-less search needs a place to start from: where an interpreter's prefix would have put packages next to us.
 */
static void add_own_root(struct loaded *l)
{
    char dir[PATH_MAX];
    gb_dl_own_dir(dir, sizeof dir);
    static const char *const homes[] = {"/site-packages", "/dist-packages"};
    for (size_t i = 0; i < sizeof homes / sizeof *homes; i++) {
        const char *at = strstr(dir, homes[i]);
        if (at) add_root(l, dir, (size_t)(at - dir) + strlen(homes[i]));
    }
}

int gb_dl_open(const struct gb_dl_spec *spec, const char *path, struct gb_dl *dl)
{
    struct gb_dl found = {0};
    if (path && *path) {
        if (!open_path(path, 0, &found))
            return GB_FAIL(GPUBRIDGE_ERR_LIBRARY, "cannot open %s: %s; correct or unset %s", spec->what, dlerror(),
                           spec->setting ? spec->setting : "the path");
        *dl = found;
        return 0;
    }
    struct loaded *l = calloc(1, sizeof *l);
    struct tried tried = {.used = 0};
    if (!l) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory to search for %s", spec->what);
    l->spec = spec;
    int ok = find_loaded(spec, l, &found);
    for (const char *const *s = spec->sonames; *s && !ok; s++) {
        note(&tried, *s);
        ok = open_path(*s, 0, &found);
    }
    note(&tried, "in the loader's path");
    if (!ok) add_own_root(l);
    if (!ok) ok = search_dirs(spec, l, &tried, &found);
    free(l);
    if (!ok)
        return GB_FAIL(GPUBRIDGE_ERR_LIBRARY, "cannot find %s (tried %s); install it%s%s%s", spec->what, tried.text,
                       spec->setting ? ", or set " : "", spec->setting ? spec->setting : "",
                       spec->setting ? " to the file" : "");
    *dl = found;
    return 0;
}

void *gb_dl_find(const struct gb_dl *dl, const char *name)
{
    return dl->handle ? dlsym(dl->handle, name) : NULL;
}

void gb_dl_own_dir(char *dir, size_t capacity)
{
    static const int here = 0; /* an address inside this file's object */
    Dl_info info;
    char real[PATH_MAX];
    *dir = 0;
    if (!dladdr(&here, &info) || !info.dli_fname || !realpath(info.dli_fname, real)) return;
    char *slash = strrchr(real, '/');
    if (slash) *slash = 0;
    snprintf(dir, capacity, "%s", real);
}
