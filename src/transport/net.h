/* SPDX-License-Identifier: Apache-2.0
 *
 * net.h: all that one context (one rank) sends to and receives from other processes.  The face the engine sees; which
 * transport carries a link (inproc, shm, tcp, rdma, or fault around one of them) is hidden behind it (transport.h).
 *
 * A *link* joins two processes and is shared by every group.  Messages are matched, never ordered: a send and the
 * posted receive with an equal key meet, whatever else is in flight.  A message above GB_EAGER_BYTES moves only after
 * the receiver posted its receive (the post travels as a grant); a smaller one may be sent ahead while the peer's
 * credit lasts and waits at the receiver, else it asks for a grant too.  So a message whose receive is not posted yet
 * never holds up another one, and a lane's reader never stops.
 *
 * Threads.  *Engine role* (one thread at a time, changing over time; the caller serialises): gb_link_send,
 * gb_link_recv, gb_link_borrow, gb_link_return, gb_net_poll, gb_net_wait, gb_net_announce, gb_net_cancel.  Any thread:
 * gb_net_wake, gb_net_job, gb_link_ctrl, gb_link_get/put, gb_link_state.  Inside: one control thread (listener,
 * handshakes, heartbeats, control messages) and the I/O workers, which own the bulk lanes and run jobs.  The express
 * lane (eager messages, grants, credit) is read and written by the engine role itself, so a small message costs no
 * thread switch.  Nothing here blocks but gb_net_wait (and open/close, bounded).
 */
#ifndef GB_TRANSPORT_NET_H
#define GB_TRANSPORT_NET_H

#include "base/err.h"

#define GB_EAGER_BYTES 8192u
#define GB_CTRL_BYTES  1024u       /* largest control message */
#define GB_XID_P2P     0x80000000u /* key.xid of a SEND/RECV operation: this bit | tag */

struct gb_net;
struct gb_link;

struct gb_uuid {
    uint8_t byte[16];
};

/* Names one message between two processes, in one direction. */
struct gb_key {
    uint64_t group; /* id of the group: hash of its name, members and birth */
    uint32_t seq;   /* the operation's number in the group; P2P: number of the (pair, direction, tag) */
    uint32_t xid;   /* ordinal of the message from that sender to that receiver in the operation; or GB_XID_P2P | tag */
};

/* What both ends must agree on; travels with every message and every grant. */
struct gb_sig {
    uint8_t op, dtype, reduce_op, root_lo; /* enums of gpubridge.h; root_lo: low byte of root */
    uint32_t plan_hash;
    uint64_t count;
};

struct gb_net_config {
    struct gb_uuid self;     /* random per context */
    int32_t global_rank;     /* label in messages */
    const char *host;        /* label in messages */
    const char *transport;   /* "auto", "tcp", "shm", "inproc" */
    const char *ifname;      /* interface list: "eth", "=eth0", "^lo,docker", comma separated; NULL or "": by route */
    const char *master_addr; /* host name or address whose route picks our address; NULL: none */
    uint16_t port_low, port_high; /* 0, 0: any free port */
    const uint8_t *secret;        /* copied */
    size_t secret_bytes;
    uint32_t lanes;          /* bulk lanes per link; 0: auto */
    uint32_t workers;        /* I/O workers; 0: auto (by cores available to this process) */
    int64_t peer_timeout_ns; /* silence of a peer's control thread that means death */
    int64_t connect_timeout_ns;
    int checksum;      /* payload checksums on bulk lanes: 0 never, 1 always, 2 between hosts */
    const char *fault; /* test only: fault specification (fault.h), or NULL */
};

/* Where a process can be reached; opaque, goes into the hello. */
#define GB_ADDRESS_BYTES 512
struct gb_net_address {
    uint16_t bytes;
    uint8_t blob[GB_ADDRESS_BYTES];
};

struct gb_net_peer {
    struct gb_uuid uuid;
    int32_t global_rank;
    const char *host; /* copied */
    struct gb_net_address address;
};

enum gb_link_state { GB_LINK_CONNECTING, GB_LINK_UP, GB_LINK_LEFT, GB_LINK_DEAD };

enum gb_net_event_kind {
    GB_NET_DONE,       /* a send, receive or job finished: `cookie`, `status`; a mismatch carries the peer's `sig` */
    GB_NET_LINK_UP,    /* the link can be used (sends and receives may be posted before) */
    GB_NET_PEER_LEFT,  /* the peer said goodbye and all its data has been delivered: `status`, `text`: its reason */
    GB_NET_PEER_LOST,  /* closed without goodbye, silent, damaged, unreachable: `status`, `text` says how it was seen */
    GB_NET_CTRL,       /* a control message: `data`, `bytes` (valid until the next poll) */
    GB_NET_REGION,     /* the peer offers memory to read messages in: `cookie`; answer with gb_region_answer */
    GB_NET_RETURNED,   /* a lent buffer, `data`, is the caller's again: its message was given up before */
    GB_NET_UNEXPECTED, /* a P2P message was announced or arrived without a posted receive: `key`, `sig`, `bytes` */
};

struct gb_net_event {
    enum gb_net_event_kind kind;
    int status;           /* enum gpubridge_status */
    struct gb_link *link; /* NULL for jobs */
    void *cookie;
    struct gb_key key;
    struct gb_sig sig;
    uint64_t bytes;
    const void *data; /* CTRL; RETURNED; DONE with a loan: the payload */
    void *loan;  /* DONE of gb_link_borrow: the payload lies at `data` until gb_link_return; NULL: it is in `buf` */
    int is_lent; /* DONE with an error: the peer may still read the buffer, until RETURNED or, when it is lost,
                    for ever */
    const char *text;  /* LEFT, LOST, and DONE with an error; valid until the next poll */
    uint64_t start_ns; /* DONE: when both ends were ready (first byte moved, or both posted); 0 unknown */
};

/* ---- memory whose messages peers of this host read in place ---- */

#define GB_REGIONS_MAX 64u /* that one process offers */
struct gb_region {
    int fd;
    void *base; /* a page boundary */
    uint64_t bytes;
};
/* Any thread.  `bytes`: whole pages.  A region may be freed when the net is not polled any more; peers that took it
 * keep its pages. */
int gb_region_make(uint64_t bytes, struct gb_region *region) GB_NODISCARD;
void gb_region_free(struct gb_region *region);
/* Any thread: peers that can may take it from now on; then messages from inside it cross without a copy. */
int gb_net_offer(struct gb_net *net, const struct gb_region *region) GB_NODISCARD;
/* What GB_NET_REGION brought (its cookie): mapped until gb_net_close.  Any thread; every offer is answered once. */
void *gb_region_address(void *region, uint64_t *bytes);
enum gb_region_use { GB_REGION_UNWANTED, GB_REGION_TAKEN, GB_REGION_FAILED };
void gb_region_answer(void *region, enum gb_region_use use);

int gb_net_open(const struct gb_net_config *config, struct gb_net **net) GB_NODISCARD;
/* `farewell`: reason put into the GOODBYE, "" for a normal exit; status 0 or the first culprit's.  Bounded: 5 s. */
void gb_net_close(struct gb_net *net, int status, const char *farewell);
void gb_net_get_address(struct gb_net *net, struct gb_net_address *address);
/* One-line account of listener, address, lanes, workers. */
size_t gb_net_describe(struct gb_net *net, char *text, size_t capacity);

/* The link to `peer`, made and dialled at the first call (the lower uuid dials, the other accepts); counted. */
int gb_link_get(struct gb_net *net, const struct gb_net_peer *peer, struct gb_link **link) GB_NODISCARD;
void gb_link_put(struct gb_link *link);
enum gb_link_state gb_link_state(const struct gb_link *link);
/* "rank 3 (host-a)" */
const char *gb_link_label(const struct gb_link *link);
/* "tcp 4 lanes 127.0.0.1:4711" */
size_t gb_link_describe(const struct gb_link *link, char *text, size_t capacity);
void gb_link_set_user(struct gb_link *link, void *user); /* engine role; NULL at first */
void *gb_link_user(const struct gb_link *link);
/* Can messages be lent over it?  Known once it is up. */
int gb_link_lends(const struct gb_link *link);
struct gb_link_counters {
    uint64_t sent_bytes, recv_bytes;     /* on the wire, headers included, control lane excluded */
    uint64_t lent_bytes, borrowed_bytes; /* payloads that were read where their sender had them */
};
void gb_link_counters(const struct gb_link *link, struct gb_link_counters *out);

/* Engine role.  `buf` is borrowed until the GB_NET_DONE event with `cookie`.  Zero bytes are a message too.  A length
 * or signature that differs from the peer's completes both ends with GPUBRIDGE_ERR_MISMATCH.  On a link that is down
 * the event comes with the link's error. */
int gb_link_send(struct gb_link *link, const struct gb_key *key, const struct gb_sig *sig, const void *buf,
                 uint64_t bytes, void *cookie) GB_NODISCARD;
int gb_link_recv(struct gb_link *link, const struct gb_key *key, const struct gb_sig *sig, void *buf, uint64_t bytes,
                 void *cookie) GB_NODISCARD;
/* The same, but the payload may stay in the sender's memory (event->loan), which this process has taken: the send is
 * not done before gb_link_return. */
int gb_link_borrow(struct gb_link *link, const struct gb_key *key, const struct gb_sig *sig, void *buf, uint64_t bytes,
                   void *cookie) GB_NODISCARD;
void gb_link_return(struct gb_link *link, void *loan);
/* 1 when a message of a collective of `group` numbered below `before` came and nobody posted a receive for it: with
 * those operations finished, the peer did something else.  Looks at everything the link holds: not for every message.
 */
int gb_link_stale(struct gb_link *link, uint64_t group, uint32_t before, struct gb_key *key, struct gb_sig *sig);
/* A control message of at most GB_CTRL_BYTES: in order, bypasses data, also to a link that is still connecting. */
int gb_link_ctrl(struct gb_link *link, const void *data, size_t bytes) GB_NODISCARD;

/* Makes progress and takes up to `max` events.  Returns their number. */
int gb_net_poll(struct gb_net *net, struct gb_net_event *events, int max);
/* Sleeps until there may be an event, gb_net_wake was called (also before), or `timeout_ns` passed. */
void gb_net_wait(struct gb_net *net, int64_t timeout_ns);
void gb_net_wake(struct gb_net *net);

/* Brings GB_NET_UNEXPECTED for every P2P message of `group` that waits for its receive, once, in no order between
 * messages: for a group whose peers may have sent before this process knew it.  Earlier events of it count no more. */
void gb_net_announce(struct gb_net *net, uint64_t group);

/* Runs fn(arg) on an I/O worker, then delivers GB_NET_DONE with `cookie`.  Any thread. */
void gb_net_job(struct gb_net *net, void (*fn)(void *arg), void *arg, void *cookie);

/* Drops everything of `group` on all links: every posted send and receive gets its GB_NET_DONE (GPUBRIDGE_ERR_CANCELLED
 * unless it had finished), and no buffer is touched after that event; what arrives later for the group is discarded.
 * With `seq` >= 0 only that operation's messages. */
void gb_net_cancel(struct gb_net *net, uint64_t group, int64_t seq);
/* Forgets a cancelled group's id once its comm is gone. */
void gb_net_forget(struct gb_net *net, uint64_t group);

#endif
