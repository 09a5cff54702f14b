/* SPDX-License-Identifier: Apache-2.0
 *
 * loan.h: payloads that stay where their sender has them (docs/wire-format.md section 10).  A process offers *regions*
 * of its memory to peers of its host; a message whose bytes lie in one that the peer has taken is *lent*: its place
 * crosses instead of its bytes, and the receiver gives it back once it has read them.  Here: the memory, the offers
 * and the places.  The messages are match.c's, who reads them the engine's.
 *
 * The other process is not trusted: its memory is sealed against shrinking, and every place is checked against it.
 */
#ifndef GB_TRANSPORT_LOAN_H
#define GB_TRANSPORT_LOAN_H

#include "transport/net.h"
#include "wire/frame.h"

#define GB_REGION_HEAD 4096u /* bytes before the region itself, which say whose it is */

struct gb_sock;

/* One of ours; constant once net->regions counts it. */
struct gb_own_region {
    int fd;
    const uint8_t *base;
    uint64_t bytes;
};

/* One of the peer's; its place in link->theirs is its number.  Stays mapped until the link is freed. */
struct gb_peer_region {
    struct gb_link *link;
    uint8_t *map;
    uint64_t bytes; /* without the head */
    int is_usable;  /* guarded by link->lock: the engine has taken it */
};

/* Control thread.  offer: announces what the peer does not know of yet.  on_*: a control message came; returns what is
 * wrong with it, or NULL. */
void gb_loan_offer(struct gb_link *link);
const char *gb_loan_on_region(struct gb_link *link, const uint8_t *body, size_t bytes);
const char *gb_loan_on_answer(struct gb_link *link, const uint8_t *body, size_t bytes);

/* link->lock held.  find: where `buf` lies in a region that the peer has taken; -1: in none.  place: the address of a
 * payload of the peer; NULL: not in a region that we have taken. */
int gb_loan_find(const struct gb_link *link, const void *buf, uint64_t bytes, struct gb_place *place);
void *gb_loan_place(const struct gb_link *link, const struct gb_place *place, uint64_t bytes);

void gb_loan_link_fini(struct gb_link *link);
void gb_loan_net_fini(struct gb_net *net);

/* shm.c, control thread: descriptors that go with the next bytes written, and that came with those read.  pass: 0 when
 * there is no room for more.  passed: -1 when none came. */
int gb_sock_pass(struct gb_sock *sock, int fd);
int gb_sock_passed(struct gb_sock *sock);

#endif
