/* SPDX-License-Identifier: Apache-2.0
 *
 * net_impl.h: the structures behind net.h, shared by the files of this folder only.  Locks are taken in this order:
 * net->lock, link->lock, then the leaves net->queue_lock, net->job_lock and worker->lock.
 */
#ifndef GB_TRANSPORT_NET_IMPL_H
#define GB_TRANSPORT_NET_IMPL_H

#include "transport/loan.h"
#include "transport/match.h"
#include "transport/net.h"
#include "transport/ring.h"
#include "transport/transport.h"
#include "wire/frame.h"
#include "wire/hello.h"

#include <pthread.h>
#include <stdatomic.h>

#define GB_LANES_MAX       16
#define GB_WORKERS_MAX     16
#define GB_TEXT_BYTES      512
#define GB_LIBRARY_VERSION "0.1.0"
#define GB_EXPRESS_IN      (128u << 10)
#define GB_COMPLAINTS      16 /* log lines about strangers */

typedef struct XXH3_state_s XXH3_state_t;

/* Bytes waiting to be written. */
struct gb_outbuf {
    uint8_t *data;
    size_t off, len, capacity;
};
int gb_outbuf_add(struct gb_outbuf *out, const void *data, size_t bytes) GB_NODISCARD;

/* What ended a lane, as its owner tells the control thread. */
enum gb_report { GB_REPORT_NONE, GB_REPORT_EOF, GB_REPORT_BROKEN /* reset or timed out */, GB_REPORT_DAMAGE };

struct gb_lane {
    struct gb_link *link;
    struct gb_worker *worker;
    struct gb_sock sock;       /* opened before `active`, then the worker's; closed under link->lock */
    struct gb_msg_queue queue; /* guarded by link->lock: sends to do */
    uint64_t outstanding;      /* guarded by link->lock: bytes queued and in work */
    _Atomic int kicked;        /* on the worker's kick list */
    struct gb_lane *kick_next; /* guarded by worker->lock */
    /* worker only */
    int attached, read_eof, ready; /* ready: more to do without a new event */
    struct gb_lane *ready_next;
    struct gb_msg *tx;
    uint8_t tx_head[GB_FRAME_BYTES], tx_tail[GB_TRAILER_BYTES];
    uint64_t tx_off, tx_bytes, tx_summed; /* tx_off counts head + payload + tail */
    int tx_busy, tx_filler, tx_blocked;   /* busy: a frame is begun; filler: its sender gave up */
    struct gb_msg *rx;
    struct gb_frame rx_frame;
    int rx_in_payload, rx_flags;
    uint64_t rx_off;
    uint8_t rx_buf[GB_TRAILER_BYTES + GB_FRAME_BYTES]; /* trailer (if in payload), then the next head */
    size_t rx_len;
    XXH3_state_t *tx_sum, *rx_sum;
};

/* Dialling state of a link; control thread only. */
struct gb_dial {
    int wanted, phase;    /* phase 0: nothing going on, 1: control lane, 2: the other lanes */
    int candidate, tried; /* next index; how many this round */
    int no_local;         /* shared memory failed after its control lane: not again */
    int refused;          /* definite refusals this round */
    int refused_status;
    uint64_t next_ns, backoff_ns, attempt_ns;
    struct gb_address_info to;
    char text[GB_TEXT_BYTES]; /* what each candidate said, for the final error */
    char no_shm[256];         /* why there is no shared memory, where it was to be expected */
};

struct gb_link {
    struct gb_net *net;
    struct gb_uuid uuid;
    int32_t global_rank;
    char host[GB_HELLO_HOST];
    char label[GB_HELLO_HOST + 32];
    int refs, claimed;                     /* guarded by net->lock */
    _Atomic int checksum;                  /* of what this end sends; set before the link is dialled, relaxed */
    struct gb_note *held_head, *held_tail; /* guarded by net->lock: events of a link nobody asked for yet */
    void *user;                            /* engine role */
    _Atomic int state;                     /* enum gb_link_state; written under lock */
    _Atomic uint64_t sent, recv;           /* relaxed counters */
    _Atomic uint64_t lent, borrowed;       /* the same: payload bytes that did not cross */

    pthread_mutex_t lock;
    /* guarded by lock */
    struct gb_match match;
    uint32_t lanes, lanes_up; /* bulk lanes agreed; attached */
    int express_up, control_up;
    int local;                     /* its control lane is a local socket: shared memory */
    int lends;                     /* and both ends know loans; constant once it is up */
    uint8_t taken[GB_REGIONS_MAX]; /* of our regions: the peer reads them */
    struct gb_peer_region theirs[GB_REGIONS_MAX];
    uint32_t ntheirs;
    int told_refusal; /* that the peer cannot read one of ours */
    char where[64];   /* address of the peer */
    int down_status;
    char text[GB_TEXT_BYTES];       /* why it is down; constant once state is LEFT or DEAD */
    char doubt[GB_HELLO_HOST + 96]; /* said of messages that fail before it is down; constant */
    struct gb_outbuf ctl_out;
    struct gb_address_info request; /* what gb_link_get asks the control thread to dial */
    int requested;
    uint64_t deadline_ns;  /* of being connected */
    enum gb_report report; /* first trouble told by a lane's owner */
    int report_status;
    char report_text[256];
    uint32_t eofs; /* data lanes that ended cleanly */
    int torn;      /* one of them inside a frame */

    /* engine role */
    struct gb_sock express;                           /* closed under lock */
    int attached, dirty, express_eof, want_out, mute; /* mute: writing failed */
    struct gb_link *dirty_next;
    struct gb_outbuf out;
    uint8_t *in;
    size_t in_len;

    /* control thread */
    struct gb_sock control; /* closed under lock */
    struct gb_dial dial;
    uint64_t heard_ns, beat_ns,
        trouble_ns; /* last sign of life; last heartbeat sent; when a lane ended or said goodbye */
    int control_eof, goodbye, control_out_armed;
    uint32_t offered; /* our regions that the peer was told of */
    int goodbye_status;
    char goodbye_text[256];
    char hint[GB_TEXT_BYTES]; /* last failed attempt of somebody who named this peer */
    uint8_t ctl_in[GB_CTL_HEAD_BYTES + GB_CTL_BODY_MAX];
    size_t ctl_in_len;

    struct gb_lane lane[GB_LANES_MAX];
};

struct gb_job {
    struct gb_note note; /* must be first */
    struct gb_job *next;
    void (*fn)(void *arg);
    void *arg;
};

struct gb_worker {
    struct gb_net *net;
    pthread_t thread;
    int started, epoll, kick_fd;
    pthread_mutex_t lock;
    struct gb_lane *kicks; /* guarded by lock */
    _Atomic int idle;      /* in epoll_wait: needs the eventfd */
    _Atomic uint32_t nlanes;
    struct gb_lane *ready;
};

struct gb_conn;

struct gb_net {
    const struct gb_transport *via, *base; /* base: what the fault wrapper wraps */
    struct gb_uuid self;
    int32_t global_rank;
    char host[GB_HELLO_HOST];
    char ifname[256], master[256];
    uint16_t port_low, port_high;
    uint8_t *secret;
    size_t secret_bytes;
    uint32_t lanes;
    int64_t peer_timeout_ns, connect_timeout_ns;
    int checksum;
    void *fault;
    struct gb_address_info own; /* constant after open */
    struct gb_own_region region[GB_REGIONS_MAX];
    _Atomic uint32_t regions; /* added under lock */
    int listener, local_listener;

    pthread_mutex_t lock;
    struct gb_link **link; /* guarded by lock; the control thread and the engine role read links they know */
    size_t links, link_capacity;

    /* any thread -> engine role */
    pthread_mutex_t queue_lock;
    struct gb_note *queue_head, *queue_tail;
    _Atomic uint32_t queued;
    _Atomic int sleeping, woken;
    int wake_fd;

    /* engine role */
    int epoll;
    struct gb_link **express; /* attached links */
    size_t expresses, express_capacity;
    struct gb_link *dirty;
    struct gb_net_event *ring;
    size_t ring_head, ring_count, ring_capacity;
    int ring_lost;
    struct gb_note *retired; /* notes whose text the last poll handed out */
    struct gb_cancel_set cancelled;

    uint32_t nworkers, next_worker;
    struct gb_worker worker[GB_WORKERS_MAX];
    pthread_mutex_t job_lock;
    struct gb_job *job_head, *job_tail;
    _Atomic uint32_t jobs;
    _Atomic int stopping; /* workers and control thread: finish */

    /* control thread */
    pthread_t control;
    int control_started, control_epoll, control_fd;
    _Atomic int control_asked;
    struct gb_conn *conns;
    uint32_t nconns;
    uint64_t listen_again_ns; /* accepting pauses until then; 0: it does not */
    int complaints;           /* log lines about strangers so far */
    int farewell_status;
    const char *farewell;
};

/* net.c */
void gb_net_note(struct gb_net *net, struct gb_note *note); /* any thread: hands a note to the engine role */
void gb_net_event_note(struct gb_net *net, struct gb_link *link, const struct gb_net_event *event, const void *text,
                       size_t text_bytes); /* copies; held back while the link is unclaimed */
void gb_net_block_signals(void);           /* the process's signals belong to its own threads */
void gb_net_push(struct gb_net *net, const struct gb_net_event *ev); /* engine role: into the ring */

/* link.c */
struct gb_link *gb_link_find(struct gb_net *net, const uint8_t uuid[16]); /* net->lock held */
struct gb_link *gb_link_make(struct gb_net *net, const uint8_t uuid[16], int32_t rank, const char *host); /* same */
void gb_link_free(struct gb_link *link);
void gb_link_release_held(struct gb_link *link); /* net->lock held */

/* express.c, engine role */
extern const struct gb_match_hooks gb_express_hooks;
void gb_express_attach(struct gb_link *link);
void gb_express_down(struct gb_link *link);
void gb_express_flush(struct gb_link *link);
void gb_express_room(struct gb_link *link); /* the socket takes bytes again */
void gb_express_read(struct gb_link *link);
void gb_express_mark(struct gb_link *link); /* has something for the next flush */

/* control.c */
void *gb_control_main(void *net);
void gb_control_wake(struct gb_net *net);
void gb_control_queue(struct gb_link *link, uint8_t type, const void *body, size_t bytes); /* any thread */
/* Any lane owner, link->lock not held: this lane ended. */
void gb_control_report(struct gb_link *link, enum gb_report report, int torn, const char *text);
void gb_control_down(struct gb_link *link, enum gb_link_state state, int status, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
void gb_control_lane_up(struct gb_link *link, uint8_t kind, uint8_t index, struct gb_sock *sock, uint32_t lanes,
                        const char *where);
void gb_control_reset(struct gb_link *link); /* closes the lanes of a half-made link */
enum gb_watch { GB_WATCH_CONN, GB_WATCH_LINK, GB_WATCH_LISTENER, GB_WATCH_WAKE };
void gb_control_listen(struct gb_net *net, int op, uint32_t events); /* the listeners */
void gb_control_watch(struct gb_net *net, int op, int fd, uint32_t events, void *what, enum gb_watch kind);

/* handshake.c, control thread */
void gb_handshake_accept(struct gb_net *net);
int gb_handshake_dial(struct gb_link *link, const struct gb_endpoint *to, uint8_t kind, uint8_t index);
void gb_handshake_event(struct gb_conn *conn, uint32_t events);
uint64_t gb_handshake_timeouts(struct gb_net *net, uint64_t now); /* earliest deadline */
void gb_handshake_drop_link(struct gb_link *link);
void gb_handshake_drop_all(struct gb_net *net);

/* dial.c, control thread */
uint64_t gb_dial_step(struct gb_link *link, uint64_t now); /* when to come again */
void gb_dial_failed(struct gb_link *link, int definite, int status, const char *where, const char *what);
void gb_dial_lane_up(struct gb_link *link, uint8_t kind, const struct gb_endpoint *to);
void gb_dial_told(struct gb_link *link); /* the link is up: says so when shared memory was to be had and is not */
void gb_endpoint_text(const struct gb_endpoint *e, uint16_t port, char *text, size_t capacity);

/* worker.c */
int gb_workers_start(struct gb_net *net);
void gb_workers_stop(struct gb_net *net);
void gb_worker_kick(struct gb_lane *lane);

/* lane.c, worker */
enum { GB_LANE_IN = 1, GB_LANE_OUT = 2, GB_LANE_KICK = 4 };
void gb_lane_run(struct gb_lane *lane, int what); /* as far as it goes without blocking */

/* addr.c */
int gb_addr_matches(const char *list, const char *name);
void gb_addr_boot_id(uint8_t id[16]);
void gb_addr_host_id(uint8_t id[16]); /* boot and network namespace: there loopback and local sockets reach the peer */
int gb_addr_choose(struct gb_net *net) GB_NODISCARD; /* fills net->own but the port */

#endif
