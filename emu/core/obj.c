/* SPDX-License-Identifier: Apache-2.0
 * Handles: a hash set of all objects, so that a handle that was never given out, was destroyed, or is of another kind
 * is caught without touching its memory.  Dead objects wait in a quarantine of fixed length before they are freed.  */
#include "emu.h"

#include <stdio.h>
#include <stdlib.h>

#define QUARANTINE 4096

static const char *const kind_name[EMU_KINDS] = {
    [EMU_STREAM] = "stream", [EMU_EVENT] = "event",     [EMU_MODULE] = "module",   [EMU_FUNCTION] = "function",
    [EMU_COMM] = "comm",     [EMU_PROGRAM] = "program", [EMU_CONTEXT] = "context",
};

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
/* All guarded by mu.  Open addressing; TOMB marks a removed entry. */
static struct emu_obj **table;
static size_t table_size, table_used, table_live;
static struct emu_obj *quarantine_head, **quarantine_tail = &quarantine_head;
static int quarantine_count;
static int alive_count[EMU_KINDS];
static struct emu_obj tomb;

static size_t slot_of(const void *p)
{
    return (size_t)(((uintptr_t)p >> 4) * 0x9E3779B97F4A7C15u) & (table_size - 1);
}

static struct emu_obj **find(const void *p)
{
    if (!table_size) return NULL;
    for (size_t i = slot_of(p); table[i]; i = (i + 1) & (table_size - 1))
        if (table[i] == p) return &table[i];
    return NULL;
}

static void insert(struct emu_obj *o)
{
    size_t i = slot_of(o);
    while (table[i]) i = (i + 1) & (table_size - 1);
    table[i] = o;
    table_used++;
}

static void grow(void)
{
    struct emu_obj **old = table;
    size_t old_size = table_size;
    table_size = table_live * 4 < 1024 ? 1024 : old_size;
    while (table_size < table_live * 4) table_size *= 2;
    table = calloc(table_size, sizeof *table);
    if (!table) abort();
    table_used = 0;
    for (size_t i = 0; i < old_size; i++)
        if (old[i] && old[i] != &tomb) insert(old[i]);
    free(old);
}

void *emu_obj_new(enum emu_kind kind, size_t size, struct emu_dev *dev)
{
    struct emu_obj *o = calloc(1, size);
    if (!o) abort();
    *o = (struct emu_obj){.kind = kind, .alive = true, .refs = 1, .dev = dev};
    pthread_mutex_lock(&mu);
    if (table_used * 2 >= table_size) grow();
    insert(o);
    table_live++;
    alive_count[kind]++;
    pthread_mutex_unlock(&mu);
    return o;
}

void *emu_obj_get(enum emu_kind kind, const void *handle)
{
    pthread_mutex_lock(&mu);
    struct emu_obj **at = handle ? find(handle) : NULL;
    struct emu_obj *o = at ? *at : NULL;
    bool same = o && o->kind == kind, alive = o && o->alive;
    if (same && alive) o->refs++;
    pthread_mutex_unlock(&mu);
    if (same && alive) return o;
    emu_complain("%p is %s %s%s", handle, same ? "a destroyed" : "not a", kind_name[kind],
                 same || !o ? "" : " but another kind of handle");
    return NULL;
}

void emu_obj_ref(void *obj)
{
    struct emu_obj *o = obj;
    pthread_mutex_lock(&mu);
    o->refs++;
    pthread_mutex_unlock(&mu);
}

/* Called with mu held: the object goes to quarantine, the oldest one there is freed. */
static void retire(struct emu_obj *o)
{
    o->next = NULL;
    *quarantine_tail = o;
    quarantine_tail = &o->next;
    if (++quarantine_count <= QUARANTINE) return;
    struct emu_obj *old = quarantine_head;
    quarantine_head = old->next;
    if (!quarantine_head) quarantine_tail = &quarantine_head;
    quarantine_count--;
    *find(old) = &tomb;
    table_live--;
    free(old);
}

static void finish(struct emu_obj *o)
{
    if (o->fini) o->fini(o);
    pthread_mutex_lock(&mu);
    retire(o);
    pthread_mutex_unlock(&mu);
}

void emu_obj_put(void *obj)
{
    struct emu_obj *o = obj;
    pthread_mutex_lock(&mu);
    bool last = --o->refs == 0;
    pthread_mutex_unlock(&mu);
    if (last) finish(o);
}

void emu_obj_end(void *obj)
{
    struct emu_obj *o = obj;
    pthread_mutex_lock(&mu);
    bool last = false;
    if (o->alive) {
        o->alive = false;
        alive_count[o->kind]--;
        last = --o->refs == 0;
    }
    pthread_mutex_unlock(&mu);
    if (last) finish(o);
}

/* One live handle of the device, contexts and communicators apart. */
static struct emu_obj *any_of_device(const struct emu_dev *dev)
{
    struct emu_obj *found = NULL;
    pthread_mutex_lock(&mu);
    for (size_t i = 0; i < table_size && !found; i++) {
        struct emu_obj *o = table[i];
        if (o && o != &tomb && o->alive && o->dev == dev && o->kind != EMU_CONTEXT && o->kind != EMU_COMM) found = o;
    }
    pthread_mutex_unlock(&mu);
    return found;
}

void emu_obj_end_device(struct emu_dev *dev)
{
    struct emu_obj *o;
    while ((o = any_of_device(dev)) != NULL) emu_obj_end(o);
}

int emu_obj_count(enum emu_kind kind)
{
    pthread_mutex_lock(&mu);
    int n = alive_count[kind];
    pthread_mutex_unlock(&mu);
    return n;
}
