/* SPDX-License-Identifier: Apache-2.0
 * The matching state machine.  Engine role, but for gb_match_data and gb_match_data_done (I/O workers); always under
 * the link's lock.  No sockets here. */
#include "transport/match.h"

#include "base/clock.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#define GB_SLAB      64
#define GB_SLOT_BITS 20 /* slot id: generation in the upper 12 bits, index in the lower 20 */

struct gb_msg_slab {
    struct gb_msg_slab *next;
    struct gb_msg msg[GB_SLAB];
};

static const char mismatch_text[] = "the peer's message differs in operation, type, count or length";

void gb_msg_push(struct gb_msg_queue *q, struct gb_msg *m)
{
    m->q_next = NULL;
    m->q_prev = q->tail;
    if (q->tail)
        q->tail->q_next = m;
    else
        q->head = m;
    q->tail = m;
}

void gb_msg_unlink(struct gb_msg_queue *q, struct gb_msg *m)
{
    if (m->q_prev)
        m->q_prev->q_next = m->q_next;
    else
        q->head = m->q_next;
    if (m->q_next)
        m->q_next->q_prev = m->q_prev;
    else
        q->tail = m->q_prev;
    m->q_next = m->q_prev = NULL;
}

/* ---- cancelled groups ---- */

int gb_cancel_has(const struct gb_cancel_set *set, uint64_t group, uint32_t seq)
{
    for (size_t i = 0; i < set->count; i++)
        if (set->item[i].group == group && (set->item[i].seq < 0 || set->item[i].seq == (int64_t)seq)) return 1;
    return 0;
}

int gb_cancel_add(struct gb_cancel_set *set, uint64_t group, int64_t seq)
{
    if (seq < 0) gb_cancel_forget(set, group);
    for (size_t i = 0; i < set->count; i++)
        if (set->item[i].group == group && (set->item[i].seq < 0 || set->item[i].seq == seq)) return 0;
    if (set->count == set->capacity) {
        size_t capacity = set->capacity ? 2 * set->capacity : 16;
        void *item = realloc(set->item, capacity * sizeof *set->item);
        if (!item) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory to note a cancelled operation");
        set->item = item;
        set->capacity = capacity;
    }
    set->item[set->count].group = group;
    set->item[set->count++].seq = seq;
    return 0;
}

void gb_cancel_forget(struct gb_cancel_set *set, uint64_t group)
{
    size_t kept = 0;
    for (size_t i = 0; i < set->count; i++)
        if (set->item[i].group != group) set->item[kept++] = set->item[i];
    set->count = kept;
}

/* ---- messages, tables, slots ---- */

static size_t hash(const struct gb_key *k)
{
    uint64_t h = k->group ^ ((uint64_t)k->seq << 32 | k->xid) * 0x9e3779b97f4a7c15u;
    h ^= h >> 29;
    h *= 0xbf58476d1ce4e5b9u;
    return (size_t)(h ^ h >> 32);
}

static int key_equal(const struct gb_key *a, const struct gb_key *b)
{
    return a->group == b->group && a->seq == b->seq && a->xid == b->xid;
}

static struct gb_msg *find(const struct gb_match_table *t, const struct gb_key *key)
{
    struct gb_msg *m = t->bucket[hash(key) & (t->size - 1)];
    while (m && !key_equal(&m->key, key)) m = m->chain;
    return m;
}

/* Growth is a wish: without memory the chains just get longer. */
static void grow(struct gb_match_table *t)
{
    struct gb_msg **bucket = (struct gb_msg **)calloc(2 * t->size, sizeof *bucket);
    if (!bucket) return;
    for (size_t i = 0; i < t->size; i++)
        for (struct gb_msg *m = t->bucket[i], *next; m; m = next) {
            next = m->chain;
            size_t h = hash(&m->key) & (2 * t->size - 1);
            m->chain = bucket[h];
            bucket[h] = m;
        }
    free((void *)t->bucket);
    t->bucket = bucket;
    t->size *= 2;
}

static void insert(struct gb_match_table *t, struct gb_msg *m)
{
    if (t->count++ >= 2 * t->size) grow(t);
    size_t h = hash(&m->key) & (t->size - 1);
    m->chain = t->bucket[h];
    t->bucket[h] = m;
}

static void take_out(struct gb_match_table *t, struct gb_msg *m)
{
    struct gb_msg **p = &t->bucket[hash(&m->key) & (t->size - 1)];
    while (*p != m) p = &(*p)->chain;
    *p = m->chain;
    t->count--;
}

static struct gb_msg *msg_new(struct gb_match *mt, enum gb_msg_kind kind, const struct gb_key *key,
                              const struct gb_sig *sig, uint64_t bytes)
{
    if (!mt->free) {
        struct gb_msg_slab *slab = calloc(1, sizeof *slab);
        if (!slab) return NULL;
        slab->next = mt->slabs;
        mt->slabs = slab;
        for (int i = 0; i < GB_SLAB; i++) {
            slab->msg[i].chain = mt->free;
            mt->free = &slab->msg[i];
        }
    }
    struct gb_msg *m = mt->free;
    mt->free = m->chain;
    *m = (struct gb_msg){.link = mt->link, .kind = kind, .key = *key, .sig = *sig, .bytes = bytes};
    return m;
}

void gb_match_recycle(struct gb_match *mt, struct gb_msg *m)
{
    m->chain = mt->free;
    mt->free = m;
}

static int slot_take(struct gb_match *mt, struct gb_msg *m)
{
    if (mt->free_slot == UINT32_MAX) {
        uint32_t slots = mt->slots ? 2 * mt->slots : 64;
        if (slots > 1u << GB_SLOT_BITS) return -1;
        struct gb_match_slot *slot = realloc(mt->slot, slots * sizeof *slot);
        if (!slot) return -1;
        for (uint32_t i = mt->slots; i < slots; i++)
            slot[i] = (struct gb_match_slot){.gen = 1, .next_free = i + 1 < slots ? i + 1 : UINT32_MAX};
        mt->free_slot = mt->slots;
        mt->slot = slot;
        mt->slots = slots;
    }
    uint32_t i = mt->free_slot;
    mt->free_slot = mt->slot[i].next_free;
    mt->slot[i].msg = m;
    m->slot = (mt->slot[i].gen << GB_SLOT_BITS) | i;
    m->granted = 1;
    return 0;
}

static void slot_give(struct gb_match *mt, struct gb_msg *m)
{
    if (!m->granted) return;
    uint32_t i = m->slot & ((1u << GB_SLOT_BITS) - 1);
    mt->slot[i].msg = NULL;
    mt->slot[i].gen = (mt->slot[i].gen + 1) & 0xfff;
    mt->slot[i].next_free = mt->free_slot;
    mt->free_slot = i;
    m->granted = 0;
}

static struct gb_msg *slot_find(const struct gb_match *mt, uint32_t slot)
{
    uint32_t i = slot & ((1u << GB_SLOT_BITS) - 1);
    if (i >= mt->slots || mt->slot[i].gen != slot >> GB_SLOT_BITS) return NULL;
    return mt->slot[i].msg;
}

/* Takes a finished or refused message out of its table and gives its storage back. */
static void drop(struct gb_match *mt, struct gb_match_table *t, struct gb_msg *m)
{
    take_out(t, m);
    slot_give(mt, m);
    if (m->asking) gb_msg_unlink(&mt->asking, m);
    if (m->kind == GB_MSG_EARLY) free(m->buf);
    gb_match_recycle(mt, m);
}

int gb_match_init(struct gb_match *mt, const struct gb_match_hooks *hooks, void *arg, struct gb_link *link,
                  const struct gb_cancel_set *cancelled)
{
    *mt = (struct gb_match){.hooks = hooks,
                            .arg = arg,
                            .link = link,
                            .cancelled = cancelled,
                            .free_slot = UINT32_MAX,
                            .credit = GB_CREDIT_UNITS};
    mt->send.size = mt->recv.size = 64;
    mt->send.bucket = (struct gb_msg **)calloc(64, sizeof *mt->send.bucket);
    mt->recv.bucket = (struct gb_msg **)calloc(64, sizeof *mt->recv.bucket);
    if (mt->send.bucket && mt->recv.bucket) return 0;
    gb_match_fini(mt);
    return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for a link's message tables");
}

void gb_match_fini(struct gb_match *mt)
{
    for (size_t i = 0; mt->recv.bucket && i < mt->recv.size; i++)
        for (struct gb_msg *m = mt->recv.bucket[i]; m; m = m->chain)
            if (m->kind == GB_MSG_EARLY) free(m->buf);
    free((void *)mt->send.bucket);
    free((void *)mt->recv.bucket);
    free(mt->slot);
    while (mt->slabs) {
        struct gb_msg_slab *next = mt->slabs->next;
        free(mt->slabs);
        mt->slabs = next;
    }
    memset(mt, 0, sizeof *mt);
}

/* ---- events and frames ---- */

static uint32_t cost(uint64_t bytes)
{
    return 1 + (uint32_t)((bytes + GB_CREDIT_UNIT - 1) / GB_CREDIT_UNIT);
}

static void give_back(struct gb_match *mt, uint64_t bytes)
{
    mt->owed += cost(bytes);
}

static struct gb_frame frame_for(uint8_t type, const struct gb_key *key, const struct gb_sig *sig, uint64_t bytes)
{
    return (struct gb_frame){.type = type,
                             .group = key->group,
                             .seq = key->seq,
                             .xid = key->xid,
                             .op = sig->op,
                             .dtype = sig->dtype,
                             .reduce_op = sig->reduce_op,
                             .root_lo = sig->root_lo,
                             .plan_hash = sig->plan_hash,
                             .count = sig->count,
                             .bytes = bytes};
}

static void key_sig_of(const struct gb_frame *f, struct gb_key *key, struct gb_sig *sig)
{
    *key = (struct gb_key){.group = f->group, .seq = f->seq, .xid = f->xid};
    *sig = (struct gb_sig){.op = f->op,
                           .dtype = f->dtype,
                           .reduce_op = f->reduce_op,
                           .root_lo = f->root_lo,
                           .plan_hash = f->plan_hash,
                           .count = f->count};
}

static int emit(struct gb_match *mt, struct gb_frame *f, const void *payload, int urgent)
{
    f->credit = (uint16_t)mt->owed;
    mt->held -= mt->owed;
    mt->owed = 0;
    return mt->hooks->frame(mt->arg, f, payload, urgent);
}

static int agree(const struct gb_msg *m, const struct gb_sig *sig, uint64_t bytes)
{
    const struct gb_sig *a = &m->sig;
    return m->bytes == bytes && a->op == sig->op && a->dtype == sig->dtype && a->reduce_op == sig->reduce_op &&
           a->root_lo == sig->root_lo && a->plan_hash == sig->plan_hash && a->count == sig->count;
}

static void done(struct gb_match *mt, const struct gb_key *key, const struct gb_sig *sig, uint64_t bytes, void *cookie,
                 int status, uint64_t start_ns)
{
    struct gb_net_event ev = {.kind = GB_NET_DONE,
                              .status = status,
                              .link = mt->link,
                              .cookie = cookie,
                              .key = *key,
                              .sig = *sig,
                              .bytes = bytes,
                              .start_ns = start_ns};
    if (status == GPUBRIDGE_ERR_MISMATCH)
        ev.text = mismatch_text;
    else if (status == GPUBRIDGE_ERR_CANCELLED)
        ev.text = "cancelled";
    else if (status)
        ev.text = mt->down_text ? mt->down_text : "";
    mt->hooks->event(mt->arg, &ev);
}

/* Tells the other end that its message does not fit ours. */
static int nack(struct gb_match *mt, const struct gb_key *key, const struct gb_sig *own, uint64_t bytes, uint32_t slot,
                int to_sender)
{
    struct gb_frame f = frame_for(GB_FRAME_NACK, key, own, bytes);
    f.slot = slot;
    f.flags = to_sender ? GB_FRAME_TO_SENDER : 0;
    return emit(mt, &f, NULL, 1);
}

static int grant(struct gb_match *mt, struct gb_msg *m)
{
    if (slot_take(mt, m) != 0)
        return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no receive slot left on the link (%u in use)", mt->slots);
    struct gb_frame f = frame_for(GB_FRAME_GRANT, &m->key, &m->sig, m->bytes);
    f.slot = m->slot;
    f.flags = m->borrows ? GB_FRAME_BORROWS : 0;
    return emit(mt, &f, NULL, 0);
}

static void unexpected(struct gb_match *mt, const struct gb_msg *m)
{
    if (!(m->key.xid & GB_XID_P2P)) return;
    struct gb_net_event ev = {
        .kind = GB_NET_UNEXPECTED, .link = mt->link, .key = m->key, .sig = m->sig, .bytes = m->bytes};
    mt->hooks->event(mt->arg, &ev);
}

/* ---- posting ---- */

/* The payload stays; its place goes. */
static int lend(struct gb_match *mt, struct gb_msg *m, const struct gb_place *place)
{
    uint8_t body[GB_PLACE_BYTES];
    struct gb_frame f = frame_for(GB_FRAME_LENT, &m->key, &m->sig, m->bytes);
    gb_place_pack(place, body);
    f.slot = m->slot;
    f.check = gb_frame_check(body, sizeof body);
    m->stage = GB_MSG_LENT;
    return emit(mt, &f, body, 1);
}

static int start_move(struct gb_match *mt, struct gb_msg *m, uint32_t slot)
{
    struct gb_place place;
    if (m->asking) gb_msg_unlink(&mt->asking, m);
    m->asking = 0;
    m->slot = slot;
    m->start_ns = gb_now_ns();
    if (m->borrows && mt->hooks->find && mt->hooks->find(mt->arg, m, &place)) return lend(mt, m, &place);
    mt->hooks->move(mt->arg, m);
    return 0;
}

int gb_match_send(struct gb_match *mt, const struct gb_key *key, const struct gb_sig *sig, const void *buf,
                  uint64_t bytes, void *cookie)
{
    if (mt->down || gb_cancel_has(mt->cancelled, key->group, key->seq)) {
        done(mt, key, sig, bytes, cookie, mt->down ? mt->down : GPUBRIDGE_ERR_CANCELLED, 0);
        return 0;
    }
    struct gb_msg *m = find(&mt->send, key);
    if (m && m->kind != GB_MSG_GRANTED)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "a send with the same key (seq %u, xid %u) is still posted", key->seq,
                       key->xid);
    if (m && !agree(m, sig, bytes)) {
        int rc = nack(mt, key, sig, bytes, m->slot, 0);
        done(mt, key, &m->sig, m->bytes, cookie, GPUBRIDGE_ERR_MISMATCH, 0);
        drop(mt, &mt->send, m);
        return rc;
    }
    if (m) {
        m->kind = GB_MSG_SEND;
        m->buf = (void *)(uintptr_t)buf;
        m->cookie = cookie;
        return start_move(mt, m, m->slot);
    }
    if (bytes <= GB_EAGER_BYTES && mt->credit >= cost(bytes)) {
        mt->credit -= cost(bytes);
        struct gb_frame f = frame_for(GB_FRAME_EAGER, key, sig, bytes);
        f.check = gb_frame_check(buf, (size_t)bytes);
        GB_TRY(emit(mt, &f, buf, 1));
        done(mt, key, sig, bytes, cookie, 0, gb_now_ns());
        return 0;
    }
    m = msg_new(mt, GB_MSG_SEND, key, sig, bytes);
    if (!m) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for a posted send");
    m->buf = (void *)(uintptr_t)buf;
    m->cookie = cookie;
    m->asking = 1;
    gb_msg_push(&mt->asking, m);
    insert(&mt->send, m);
    return 0;
}

/* A posted receive meets what came before it. */
static int recv_late(struct gb_match *mt, struct gb_msg *m, const struct gb_sig *sig, void *buf, uint64_t bytes,
                     int borrows, void *cookie)
{
    if (m->kind != GB_MSG_EARLY && m->kind != GB_MSG_ASKED)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "a receive with the same key (seq %u, xid %u) is still posted",
                       m->key.seq, m->key.xid);
    if (m->kind == GB_MSG_ASKED && mt->down) {
        done(mt, &m->key, sig, bytes, cookie, mt->down, 0);
        return 0;
    }
    int rc = 0, fits = agree(m, sig, bytes);
    if (m->kind == GB_MSG_EARLY) give_back(mt, m->bytes);
    if (m->kind == GB_MSG_ASKED && fits) {
        m->kind = GB_MSG_RECV;
        m->buf = buf;
        m->cookie = cookie;
        m->asked = 1;
        m->borrows = borrows;
        return grant(mt, m);
    }
    if (fits) {
        if (bytes) memcpy(buf, m->buf, (size_t)bytes);
        done(mt, &m->key, sig, bytes, cookie, 0, gb_now_ns());
    } else {
        if (!mt->down) rc = nack(mt, &m->key, sig, bytes, 0, 1);
        done(mt, &m->key, &m->sig, m->bytes, cookie, GPUBRIDGE_ERR_MISMATCH, 0);
    }
    drop(mt, &mt->recv, m);
    return rc;
}

int gb_match_recv(struct gb_match *mt, const struct gb_key *key, const struct gb_sig *sig, void *buf, uint64_t bytes,
                  int borrows, void *cookie)
{
    struct gb_msg *m = find(&mt->recv, key);
    if (m) return recv_late(mt, m, sig, buf, bytes, borrows, cookie);
    if (mt->down || gb_cancel_has(mt->cancelled, key->group, key->seq)) {
        done(mt, key, sig, bytes, cookie, mt->down ? mt->down : GPUBRIDGE_ERR_CANCELLED, 0);
        return 0;
    }
    m = msg_new(mt, GB_MSG_RECV, key, sig, bytes);
    if (!m) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "no memory for a posted receive");
    m->buf = buf;
    m->cookie = cookie;
    m->borrows = borrows;
    insert(&mt->recv, m);
    if (bytes <= GB_EAGER_BYTES) return 0;
    return grant(mt, m);
}

/* ---- arriving frames ---- */

static int on_eager(struct gb_match *mt, const struct gb_key *key, const struct gb_sig *sig, const struct gb_frame *f,
                    const void *payload, const char **why)
{
    mt->held += cost(f->bytes);
    *why = "it spent more eager credit than it has";
    if (mt->held > GB_CREDIT_UNITS) return -1;
    *why = "a small message's checksum is wrong";
    if (gb_frame_check(payload, (size_t)f->bytes) != f->check) return GPUBRIDGE_ERR_CHECKSUM;
    if (gb_cancel_has(mt->cancelled, f->group, f->seq)) {
        give_back(mt, f->bytes);
        return 0;
    }
    struct gb_msg *m = find(&mt->recv, key);
    *why = "it sent a message twice";
    if (m && (m->kind != GB_MSG_RECV || m->stage != GB_MSG_IDLE)) return -1;
    if (m) {
        int rc = 0;
        give_back(mt, f->bytes);
        if (agree(m, sig, f->bytes)) {
            if (f->bytes) memcpy(m->buf, payload, (size_t)f->bytes);
            done(mt, key, sig, f->bytes, m->cookie, 0, gb_now_ns());
        } else {
            rc = nack(mt, key, &m->sig, m->bytes, 0, 1);
            done(mt, key, sig, f->bytes, m->cookie, GPUBRIDGE_ERR_MISMATCH, 0);
        }
        drop(mt, &mt->recv, m);
        *why = gb_err_text();
        return rc;
    }
    *why = "no memory for a message that came early";
    void *copy = malloc(f->bytes ? (size_t)f->bytes : 1);
    m = copy ? msg_new(mt, GB_MSG_EARLY, key, sig, f->bytes) : NULL;
    if (!m) {
        free(copy);
        return GPUBRIDGE_ERR_NO_MEMORY;
    }
    if (f->bytes) memcpy(copy, payload, (size_t)f->bytes);
    m->buf = copy;
    insert(&mt->recv, m);
    unexpected(mt, m);
    return 0;
}

static int on_rts(struct gb_match *mt, const struct gb_key *key, const struct gb_sig *sig, const struct gb_frame *f,
                  const char **why)
{
    if (gb_cancel_has(mt->cancelled, f->group, f->seq)) return 0;
    struct gb_msg *m = find(&mt->recv, key);
    if (!m) {
        *why = "no memory for an announcement";
        m = msg_new(mt, GB_MSG_ASKED, key, sig, f->bytes);
        if (!m) return GPUBRIDGE_ERR_NO_MEMORY;
        insert(&mt->recv, m);
        unexpected(mt, m);
        return 0;
    }
    *why = "it announced a message twice";
    if (m->kind == GB_MSG_EARLY || m->kind == GB_MSG_ASKED || (m->kind == GB_MSG_RECV && m->asked)) return -1;
    if (m->kind == GB_MSG_TOMB) {
        drop(mt, &mt->recv, m);
        return 0;
    }
    m->asked = 1;
    *why = gb_err_text();
    if (m->granted) return 0; /* the grant and the announcement crossed */
    if (agree(m, sig, f->bytes)) return grant(mt, m);
    int rc = nack(mt, key, &m->sig, m->bytes, 0, 1);
    done(mt, key, sig, f->bytes, m->cookie, GPUBRIDGE_ERR_MISMATCH, 0);
    drop(mt, &mt->recv, m);
    return rc;
}

static int on_grant(struct gb_match *mt, const struct gb_key *key, const struct gb_sig *sig, const struct gb_frame *f,
                    const char **why)
{
    if (gb_cancel_has(mt->cancelled, f->group, f->seq)) return 0;
    struct gb_msg *m = find(&mt->send, key);
    if (!m) {
        *why = "no memory for a grant";
        m = msg_new(mt, GB_MSG_GRANTED, key, sig, f->bytes);
        if (!m) return GPUBRIDGE_ERR_NO_MEMORY;
        m->slot = f->slot;
        m->borrows = f->flags & GB_FRAME_BORROWS;
        insert(&mt->send, m);
        return 0;
    }
    *why = "it granted a message twice";
    if (m->kind != GB_MSG_SEND || m->stage != GB_MSG_IDLE) return -1;
    *why = gb_err_text();
    if (agree(m, sig, f->bytes)) {
        m->borrows = f->flags & GB_FRAME_BORROWS;
        return start_move(mt, m, f->slot);
    }
    int rc = nack(mt, key, &m->sig, m->bytes, f->slot, 0);
    done(mt, key, sig, f->bytes, m->cookie, GPUBRIDGE_ERR_MISMATCH, 0);
    drop(mt, &mt->send, m);
    *why = gb_err_text();
    return rc;
}

static void on_nack(struct gb_match *mt, const struct gb_key *key, const struct gb_sig *sig, const struct gb_frame *f)
{
    int to_sender = f->flags & GB_FRAME_TO_SENDER;
    struct gb_msg *m = to_sender ? find(&mt->send, key) : slot_find(mt, f->slot);
    /* A sender that sent eagerly, or a receiver that cancelled, has nothing left to fail. */
    if (!m || m->stage != GB_MSG_IDLE || !key_equal(&m->key, key)) return;
    if (m->kind != (to_sender ? GB_MSG_SEND : GB_MSG_RECV)) return;
    done(mt, key, sig, f->bytes, m->cookie, GPUBRIDGE_ERR_MISMATCH, 0);
    drop(mt, to_sender ? &mt->send : &mt->recv, m);
}

static int send_return(struct gb_match *mt, const struct gb_key *key, const struct gb_sig *sig, uint64_t bytes)
{
    struct gb_frame f = frame_for(GB_FRAME_RETURN, key, sig, bytes);
    return emit(mt, &f, NULL, 1);
}

static int on_lent(struct gb_match *mt, const struct gb_key *key, const struct gb_sig *sig, const struct gb_frame *f,
                   const void *payload, const char **why)
{
    struct gb_place place;
    *why = "the checksum of a lent message's place is wrong";
    if (gb_frame_check(payload, GB_PLACE_BYTES) != f->check) return GPUBRIDGE_ERR_CHECKSUM;
    gb_place_parse(payload, &place);
    *why = "it lends a message that does not lie in the memory it shares";
    void *at = mt->hooks->place ? mt->hooks->place(mt->arg, &place, f->bytes) : NULL;
    if (!at) return -1;
    struct gb_msg *m = slot_find(mt, f->slot);
    *why = gb_err_text();
    if (!m) return send_return(mt, key, sig, f->bytes); /* cancelled here while it was on its way */
    *why = "a lent message does not fit the receive it names";
    if (m->stage != GB_MSG_IDLE || m->kind != GB_MSG_RECV || !m->borrows || !key_equal(&m->key, key) ||
        !agree(m, sig, f->bytes))
        return -1;
    take_out(&mt->recv, m);
    slot_give(mt, m);
    m->kind = GB_MSG_LOAN;
    struct gb_net_event ev = {.kind = GB_NET_DONE,
                              .link = mt->link,
                              .cookie = m->cookie,
                              .key = *key,
                              .sig = *sig,
                              .bytes = f->bytes,
                              .start_ns = gb_now_ns(),
                              .data = at,
                              .loan = m};
    mt->hooks->event(mt->arg, &ev);
    return 0;
}

int gb_match_return(struct gb_match *mt, struct gb_msg *loan)
{
    assert(loan->kind == GB_MSG_LOAN);
    int rc = mt->down ? 0 : send_return(mt, &loan->key, &loan->sig, loan->bytes);
    gb_match_recycle(mt, loan);
    return rc;
}

static int on_return(struct gb_match *mt, const struct gb_key *key, const struct gb_sig *sig, const struct gb_frame *f,
                     const char **why)
{
    struct gb_msg *m = find(&mt->send, key);
    *why = "it returned a message that was not lent";
    if (!m || m->stage != GB_MSG_LENT || m->bytes != f->bytes) return -1;
    if (m->kind == GB_MSG_OWED) {
        struct gb_net_event ev = {.kind = GB_NET_RETURNED, .link = mt->link, .key = *key, .sig = *sig, .data = m->buf};
        mt->hooks->event(mt->arg, &ev);
    } else {
        done(mt, key, sig, m->bytes, m->cookie, 0, m->start_ns);
    }
    drop(mt, &mt->send, m);
    return 0;
}

int gb_match_frame(struct gb_match *mt, const struct gb_frame *f, const void *payload, const char **why)
{
    struct gb_key key;
    struct gb_sig sig;
    key_sig_of(f, &key, &sig);
    *why = "it gave back more eager credit than was spent";
    if (mt->credit + f->credit > GB_CREDIT_UNITS) return -1;
    mt->credit += f->credit;
    switch (f->type) {
    case GB_FRAME_EAGER:
        return on_eager(mt, &key, &sig, f, payload, why);
    case GB_FRAME_RTS:
        return on_rts(mt, &key, &sig, f, why);
    case GB_FRAME_GRANT:
        return on_grant(mt, &key, &sig, f, why);
    case GB_FRAME_NACK:
        on_nack(mt, &key, &sig, f);
        return 0;
    case GB_FRAME_LENT:
        return on_lent(mt, &key, &sig, f, payload, why);
    case GB_FRAME_RETURN:
        return on_return(mt, &key, &sig, f, why);
    case GB_FRAME_CREDIT:
        return 0;
    default:
        *why = "a frame of a type that has no place on the express lane";
        return -1;
    }
}

int gb_match_flush(struct gb_match *mt)
{
    while (mt->asking.head) {
        struct gb_msg *m = mt->asking.head;
        gb_msg_unlink(&mt->asking, m);
        m->asking = 0;
        m->asked = 1;
        struct gb_frame f = frame_for(GB_FRAME_RTS, &m->key, &m->sig, m->bytes);
        GB_TRY(emit(mt, &f, NULL, 0));
    }
    if (mt->owed >= GB_CREDIT_UNITS / 4) {
        struct gb_frame f = {.type = GB_FRAME_CREDIT};
        GB_TRY(emit(mt, &f, NULL, 0));
    }
    return 0;
}

int gb_match_stale(const struct gb_match *mt, uint64_t group, uint32_t before, struct gb_key *key, struct gb_sig *sig)
{
    for (size_t i = 0; mt->recv.count && i < mt->recv.size; i++)
        for (const struct gb_msg *m = mt->recv.bucket[i]; m; m = m->chain) {
            if (m->kind != GB_MSG_EARLY && m->kind != GB_MSG_ASKED) continue;
            if (m->key.group != group || m->key.xid & GB_XID_P2P || (int32_t)(m->key.seq - before) >= 0) continue;
            *key = m->key;
            *sig = m->sig;
            return 1;
        }
    return 0;
}

void gb_match_announce(struct gb_match *mt, uint64_t group)
{
    for (size_t i = 0; mt->recv.count && i < mt->recv.size; i++)
        for (const struct gb_msg *m = mt->recv.bucket[i]; m; m = m->chain)
            if (m->key.group == group && (m->kind == GB_MSG_EARLY || m->kind == GB_MSG_ASKED)) unexpected(mt, m);
}

/* ---- giving up ---- */

/* The peer may be reading the buffer: whoever posted it learns that at once, and when it comes back.  A lost peer does
 * not give anything back. */
static void give_up_lent(struct gb_match *mt, struct gb_msg *m, int status)
{
    if (m->kind == GB_MSG_SEND) {
        struct gb_net_event ev = {.kind = GB_NET_DONE,
                                  .status = status,
                                  .link = mt->link,
                                  .cookie = m->cookie,
                                  .key = m->key,
                                  .sig = m->sig,
                                  .bytes = m->bytes,
                                  .start_ns = m->start_ns,
                                  .is_lent = 1};
        ev.text = status == GPUBRIDGE_ERR_CANCELLED ? "cancelled" : mt->down_text ? mt->down_text : "";
        mt->hooks->event(mt->arg, &ev);
        m->kind = GB_MSG_OWED;
    }
    if (mt->down) drop(mt, &mt->send, m);
}

/* Returns 1 when the message is gone. */
static int give_up(struct gb_match *mt, struct gb_match_table *t, struct gb_msg *m, int status)
{
    if (m->stage == GB_MSG_ACTIVE) {
        atomic_store_explicit(&m->stop, status, memory_order_relaxed);
        mt->hooks->stop(mt->arg, m);
        return 0;
    }
    if (m->stage == GB_MSG_LENT) {
        give_up_lent(mt, m, status);
        return 0;
    }
    if (m->stage == GB_MSG_QUEUED) mt->hooks->unqueue(mt->arg, m);
    if (m->kind == GB_MSG_EARLY) give_back(mt, m->bytes);
    if (m->kind == GB_MSG_SEND || m->kind == GB_MSG_RECV)
        done(mt, &m->key, &m->sig, m->bytes, m->cookie, status, m->start_ns);
    drop(mt, t, m);
    return 1;
}

void gb_match_cancel(struct gb_match *mt, uint64_t group, int64_t seq)
{
    struct gb_match_table *tables[] = {&mt->send, &mt->recv};
    for (int k = 0; k < 2; k++)
        for (size_t i = 0; i < tables[k]->size; i++)
            for (struct gb_msg *m = tables[k]->bucket[i], *next; m; m = next) {
                next = m->chain;
                if (m->key.group == group && (seq < 0 || m->key.seq == (uint32_t)seq))
                    give_up(mt, tables[k], m, GPUBRIDGE_ERR_CANCELLED);
            }
}

void gb_match_fail(struct gb_match *mt, int status, const char *text)
{
    mt->down = status;
    mt->down_text = text;
    struct gb_match_table *tables[] = {&mt->send, &mt->recv};
    for (int k = 0; k < 2; k++)
        for (size_t i = 0; i < tables[k]->size; i++)
            for (struct gb_msg *m = tables[k]->bucket[i], *next; m; m = next) {
                next = m->chain;
                /* What arrived in full can still be received. */
                if (m->kind != GB_MSG_EARLY) give_up(mt, tables[k], m, status);
            }
}

/* ---- movers ---- */

int gb_match_data(struct gb_match *mt, const struct gb_frame *f, struct gb_msg **msg, const char **why)
{
    struct gb_key key;
    struct gb_sig sig;
    key_sig_of(f, &key, &sig);
    struct gb_msg *m = slot_find(mt, f->slot);
    *msg = NULL;
    if (!m) return 0; /* cancelled here while the payload was on its way */
    *why = "a payload does not fit the receive it names";
    if (m->stage != GB_MSG_IDLE || !key_equal(&m->key, &key) || !agree(m, &sig, f->bytes)) return -1;
    m->stage = GB_MSG_ACTIVE;
    m->start_ns = gb_now_ns();
    *msg = m;
    return 0;
}

void gb_match_data_done(struct gb_match *mt, struct gb_msg *m, int status, int frame_flags)
{
    assert(m->stage == GB_MSG_ACTIVE);
    struct gb_match_table *t = m->kind == GB_MSG_SEND ? &mt->send : &mt->recv;
    take_out(t, m);
    slot_give(mt, m);
    if (m->kind == GB_MSG_RECV && (frame_flags & GB_FRAME_ASKED) && !m->asked && !mt->down &&
        !atomic_load_explicit(&m->stop, memory_order_relaxed)) {
        /* The announcement is still on the express lane; without memory it would look like a new message, so be loud.
         */
        struct gb_msg *tomb = msg_new(mt, GB_MSG_TOMB, &m->key, &m->sig, m->bytes);
        if (tomb)
            insert(&mt->recv, tomb);
        else if (status == 0)
            status = GPUBRIDGE_ERR_NO_MEMORY;
    }
    m->note = (struct gb_note){.kind = GB_NOTE_MSG,
                               .event = {.kind = GB_NET_DONE,
                                         .status = status,
                                         .link = mt->link,
                                         .cookie = m->cookie,
                                         .key = m->key,
                                         .sig = m->sig,
                                         .bytes = m->bytes,
                                         .start_ns = m->start_ns}};
    if (status) m->note.event.text = status == GPUBRIDGE_ERR_CANCELLED ? "cancelled" : mt->down_text;
}
