/* SPDX-License-Identifier: Apache-2.0
 *
 * match.h: the state machine that brings a link's sends and posted receives together: eager messages, announcements
 * (RTS), grants, credit.  Knows nothing of sockets: frames leave and payloads move through hooks, so every transport
 * shares it.
 *
 * Every call is made with the link's lock held.  gb_match_data* are for whoever moves payloads (an I/O worker); all
 * others belong to the engine role, and so do the hooks, which may not call back.
 */
#ifndef GB_TRANSPORT_MATCH_H
#define GB_TRANSPORT_MATCH_H

#include "transport/net.h"
#include "wire/frame.h"

#include <stdatomic.h>

/* Something that travels to the engine role through the net's queue. */
enum gb_note_kind { GB_NOTE_EVENT, GB_NOTE_MSG, GB_NOTE_ATTACH, GB_NOTE_DOWN };
struct gb_note {
    struct gb_note *next;
    enum gb_note_kind kind;
    struct gb_net_event event;
    char *text; /* EVENT: owned storage behind event.text or event.data, or NULL */
};

enum gb_msg_kind {
    GB_MSG_SEND,    /* posted send that waits for its grant, or moves */
    GB_MSG_GRANTED, /* grant without a posted send */
    GB_MSG_RECV,    /* posted receive */
    GB_MSG_EARLY,   /* eager payload without a posted receive */
    GB_MSG_ASKED,   /* announcement without a posted receive */
    GB_MSG_TOMB,    /* received, but its announcement is still on the way */
    GB_MSG_OWED,    /* lent send that was given up: its buffer is to come back */
    GB_MSG_LOAN,    /* received where the sender has it: in no table, the caller's until it is returned */
};
enum gb_msg_stage { GB_MSG_IDLE, GB_MSG_QUEUED, GB_MSG_ACTIVE, GB_MSG_LENT /* a send that the peer reads in place */ };

struct gb_msg {
    struct gb_note note;            /* must be first; used once the message is done */
    struct gb_msg *chain;           /* hash bucket, or free list */
    struct gb_msg *q_next, *q_prev; /* asking list, or a lane's queue */
    struct gb_link *link;
    enum gb_msg_kind kind;
    enum gb_msg_stage stage;
    int asked;     /* SEND: an RTS went out.  RECV: an RTS came in */
    int asking;    /* SEND: on the list of those to announce */
    int granted;   /* RECV: has a slot */
    int borrows;   /* RECV: may be lent.  SEND, GRANTED: the peer says so */
    uint32_t slot; /* RECV: ours.  SEND, GRANTED: the peer's */
    struct gb_key key;
    struct gb_sig sig;
    void *buf;
    uint64_t bytes;
    void *cookie;
    uint64_t start_ns;
    uint32_t lane;    /* SEND: lane it was queued on */
    _Atomic int stop; /* status with which the mover must give up; relaxed, the kick orders it */
};

struct gb_msg_queue {
    struct gb_msg *head, *tail;
};
void gb_msg_push(struct gb_msg_queue *q, struct gb_msg *m);
void gb_msg_unlink(struct gb_msg_queue *q, struct gb_msg *m);

struct gb_match_hooks {
    /* Puts an express frame out; `urgent`: now, else with the next flush.  EAGER has f->bytes of payload. */
    int (*frame)(void *arg, const struct gb_frame *f, const void *payload, int urgent);
    void (*move)(void *arg, struct gb_msg *m);    /* granted send: move the payload to m->slot */
    void (*unqueue)(void *arg, struct gb_msg *m); /* take back a QUEUED send */
    void (*stop)(void *arg, struct gb_msg *m);    /* m->stop was set on an ACTIVE message: make its mover look */
    void (*event)(void *arg, const struct gb_net_event *event);
    /* Loans: 1 and where m->buf lies when the peer can read it there; the address of a payload of the peer, NULL when
     * it cannot be.  NULL hooks: there are none. */
    int (*find)(void *arg, const struct gb_msg *m, struct gb_place *place);
    void *(*place)(void *arg, const struct gb_place *place, uint64_t bytes);
};

/* Cancelled groups (seq -1) and operations; engine role. */
struct gb_cancel_set {
    struct {
        uint64_t group;
        int64_t seq;
    } *item;
    size_t count, capacity;
};
int gb_cancel_has(const struct gb_cancel_set *set, uint64_t group, uint32_t seq);
int gb_cancel_add(struct gb_cancel_set *set, uint64_t group, int64_t seq) GB_NODISCARD;
void gb_cancel_forget(struct gb_cancel_set *set, uint64_t group);

struct gb_match_table {
    struct gb_msg **bucket;
    size_t count, size; /* size: power of two */
};
struct gb_match_slot {
    struct gb_msg *msg;
    uint32_t gen, next_free;
};
struct gb_match {
    const struct gb_match_hooks *hooks;
    void *arg;
    struct gb_link *link;
    const struct gb_cancel_set *cancelled;
    struct gb_match_table send, recv;
    struct gb_match_slot *slot;
    uint32_t slots, free_slot;
    struct gb_msg *free;
    struct gb_msg_slab *slabs;
    struct gb_msg_queue asking;
    uint32_t credit; /* units we may spend */
    uint32_t owed;   /* units to give back with the next frame */
    uint32_t held;   /* units the peer has spent and not got back: bounds memory */
    int down;        /* status of the dead link; 0: alive */
    const char *down_text;
};

int gb_match_init(struct gb_match *mt, const struct gb_match_hooks *hooks, void *arg, struct gb_link *link,
                  const struct gb_cancel_set *cancelled) GB_NODISCARD;
void gb_match_fini(struct gb_match *mt);

int gb_match_send(struct gb_match *mt, const struct gb_key *key, const struct gb_sig *sig, const void *buf,
                  uint64_t bytes, void *cookie) GB_NODISCARD;
int gb_match_recv(struct gb_match *mt, const struct gb_key *key, const struct gb_sig *sig, void *buf, uint64_t bytes,
                  int borrows, void *cookie) GB_NODISCARD;
/* The loan of a receive's event has been read. */
int gb_match_return(struct gb_match *mt, struct gb_msg *loan) GB_NODISCARD;
/* An express frame came.  Nonzero: the peer broke the protocol, or memory is short; *why says how. */
int gb_match_frame(struct gb_match *mt, const struct gb_frame *f, const void *payload, const char **why) GB_NODISCARD;
/* Announces what still waits and gives back credit. */
int gb_match_flush(struct gb_match *mt) GB_NODISCARD;
/* As gb_link_stale. */
int gb_match_stale(const struct gb_match *mt, uint64_t group, uint32_t before, struct gb_key *key, struct gb_sig *sig);
/* As gb_net_announce, without a look at what the queue of events holds. */
void gb_match_announce(struct gb_match *mt, uint64_t group);
/* group/seq as in gb_net_cancel. */
void gb_match_cancel(struct gb_match *mt, uint64_t group, int64_t seq);
/* The link is down: everything posted completes with `status`; later posts too.  `text` must live as long as the link.
 */
void gb_match_fail(struct gb_match *mt, int status, const char *text);

/* Mover: a payload for f->slot came.  *msg NULL: read and discard it.  Nonzero: protocol broken. */
int gb_match_data(struct gb_match *mt, const struct gb_frame *f, struct gb_msg **msg, const char **why) GB_NODISCARD;
/* Mover: let go of an ACTIVE message; fills its note's event.  The caller queues the note. */
void gb_match_data_done(struct gb_match *mt, struct gb_msg *m, int status, int frame_flags);
void gb_match_recycle(struct gb_match *mt, struct gb_msg *m);

#endif
