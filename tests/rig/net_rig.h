/* SPDX-License-Identifier: Apache-2.0
 *
 * net_rig.h: two or more nets in one process, driven by the test's own thread as the engine role of each.  Waits are
 * for conditions with a deadline, never for time.
 */
#ifndef GB_TESTS_NET_RIG_H
#define GB_TESTS_NET_RIG_H

#include "transport/net.h"

#include <sys/types.h>

#define RIG_NETS 4

struct rig_options {
    const char *transport, *fault, *ifname, *master; /* fault: of net 0 */
    uint32_t lanes, workers;
    int checksum;
    int64_t peer_timeout_ms, connect_timeout_ms;
    const char *other_secret; /* of net 1, when it is to differ */
};

struct rig_net {
    struct gb_net *net;
    struct gb_uuid uuid;
    struct gb_link *to[RIG_NETS];
    /* what the last poll brought, by kind */
    struct gb_net_event last[GB_NET_UNEXPECTED + 1];
    int seen[GB_NET_UNEXPECTED + 1];
    char text[512], ctrl[1100];
};

struct rig {
    int nets;
    struct rig_net net[RIG_NETS];
    /* called for every event, after it was noted; may be NULL */
    void (*on_event)(struct rig *rig, int who, const struct gb_net_event *event);
    void *user;
};

/* A posted message of a test: the cookie. */
struct rig_op {
    int done, status;
    struct gb_sig sig;
    uint64_t bytes, start_ns;
    char text[256];
};

struct gb_uuid rig_uuid(int n);
int rig_open_net(struct rig *rig, int who, const struct rig_options *options);
void rig_peer(struct rig *rig, int who, struct gb_net_peer *peer);
/* Nets 0..n-1, all linked and up. */
void rig_open(struct rig *rig, int nets, const struct rig_options *options);
void rig_link(struct rig *rig, int a, int b);
void rig_close(struct rig *rig);
/* Polls all nets once. */
void rig_poll(struct rig *rig);
/* Polls until *flag (a count) reaches `want`, or fails the test after `ms`. */
void rig_until(struct rig *rig, const int *flag, int want, int ms);
int rig_until_quiet(struct rig *rig, const int *flag, int want, int ms); /* 0: reached */

struct gb_key rig_key(uint64_t group, uint32_t seq, uint32_t xid);
struct gb_sig rig_sig(uint64_t count);
/* Bytes that depend on the position and the seed. */
void rig_fill(void *buf, uint64_t bytes, uint64_t seed);
int rig_check(const void *buf, uint64_t bytes, uint64_t seed);
void rig_send(struct rig *rig, int from, int to, struct gb_key key, const void *buf, uint64_t bytes, struct rig_op *op);
void rig_recv(struct rig *rig, int at, int from, struct gb_key key, void *buf, uint64_t bytes, struct rig_op *op);

/* Opens nets 0 and 1, changes the address that net 1 told, and lets net 0 ask for the link. */
struct gb_address_info;
void rig_dial_changed(struct rig *rig, const struct rig_options *options,
                      void (*change)(struct rig *, struct gb_address_info *));

/* A process that is rank 1, with the options' transport, linked to net 0 of this one: it receives 1 MiB messages of
 * group 1, numbered from 0, for ever.  `first` runs in it before anything else; or NULL. */
struct rig_child {
    pid_t pid;
    int fd;
};
struct rig_child rig_start_child(struct rig *rig, const struct rig_options *options, void (*first)(void));
void rig_end_child(struct rig_child *child);
/* Sends such a process a signal while messages move: net 0 must lose it within the time, and say the words. */
void rig_death(const struct rig_options *options, int signal, const char *words, int within_ms);

/* Open descriptors of this process; asserts that those above 2 are close-on-exec if asked to. */
int rig_count_fds(int check_cloexec);

#endif
