/* SPDX-License-Identifier: Apache-2.0
 *
 * hello.h: the handshake that opens every lane, and the address blob (docs/wire-format.md is normative).  Pure: no I/O,
 * no state, any thread.  Not the group hello of comm: this one proves the job's secret on one connection.
 *
 *   dialler                              acceptor
 *   HELLO  who, whom, lane, nonce   ->
 *                                   <-   CHALLENGE  status, who, nonce, MAC("accept", HELLO, CHALLENGE)
 *   PROOF  MAC("dial", HELLO, CHALLENGE) ->
 *                                   <-   ACCEPT     status, lanes, MAC("open", HELLO, CHALLENGE, ACCEPT)
 */
#ifndef GB_WIRE_HELLO_H
#define GB_WIRE_HELLO_H

#include <stddef.h>
#include <stdint.h>

#define GB_PROTOCOL_VERSION 1u
#define GB_PREFIX_BYTES     16u /* of every handshake message, in every version */
#define GB_MAC_BYTES        32u
#define GB_HELLO_BYTES      192u
#define GB_CHALLENGE_BYTES  (GB_HELLO_BYTES + GB_MAC_BYTES)
#define GB_PROOF_BYTES      (GB_PREFIX_BYTES + GB_MAC_BYTES)
#define GB_ACCEPT_BYTES     (GB_PREFIX_BYTES + 8 + GB_MAC_BYTES)
#define GB_HELLO_TEXT       32u
#define GB_HELLO_HOST       64u

enum gb_hs_kind { GB_HS_HELLO = 1, GB_HS_CHALLENGE, GB_HS_PROOF, GB_HS_ACCEPT };
enum gb_lane_kind { GB_LANE_CONTROL, GB_LANE_EXPRESS, GB_LANE_BULK, GB_LANE_KIND_END };
enum gb_feature { GB_FEATURE_LOANS = 1 }; /* bits: payloads may be lent (frames LENT and RETURN) */
/* Why the acceptor says no. */
enum gb_hs_status {
    GB_HS_OK,
    GB_HS_VERSION,
    GB_HS_WRONG_PEER,
    GB_HS_SECRET,
    GB_HS_BUSY,
    GB_HS_MALFORMED,
    GB_HS_NO_MEMORY, /* ACCEPT: the shared memory that was offered cannot be used */
    GB_HS_STATUS_END
};

struct gb_prefix {
    uint16_t version, kind;
    uint32_t bytes;
};

struct gb_hello { /* HELLO and the body of CHALLENGE */
    uint16_t kind, version;
    uint8_t from[16], to[16], nonce[16];
    int32_t from_rank, to_rank;
    uint8_t lane_kind, lane_index, lanes; /* lanes: bulk lanes wanted */
    uint8_t status;                       /* CHALLENGE: enum gb_hs_status */
    uint8_t features;                     /* enum gb_feature; what the other end does not know is not used */
    char host[GB_HELLO_HOST];             /* label */
    char text[GB_HELLO_TEXT];             /* library version, for people */
};

/* -1: not ours (wrong magic). */
int gb_prefix_parse(const uint8_t in[GB_PREFIX_BYTES], struct gb_prefix *prefix);
void gb_hello_pack(const struct gb_hello *hello, uint8_t out[GB_HELLO_BYTES]);
int gb_hello_parse(const uint8_t *in, size_t bytes, struct gb_hello *hello, const char **why);
void gb_proof_pack(const uint8_t mac[GB_MAC_BYTES], uint8_t out[GB_PROOF_BYTES]);
int gb_proof_parse(const uint8_t *in, size_t bytes, uint8_t mac[GB_MAC_BYTES]);
void gb_accept_pack(uint32_t status, uint32_t lanes, const uint8_t mac[GB_MAC_BYTES], uint8_t out[GB_ACCEPT_BYTES]);
int gb_accept_parse(const uint8_t *in, size_t bytes, uint32_t *status, uint32_t *lanes, uint8_t mac[GB_MAC_BYTES]);

struct gb_part {
    const void *data;
    size_t bytes;
};
/* HMAC-SHA256 over a label and the parts, each preceded by its length. */
void gb_mac(const uint8_t *secret, size_t secret_bytes, const char *label, const struct gb_part *parts, int nparts,
            uint8_t mac[GB_MAC_BYTES]);
int gb_mac_equal(const uint8_t a[GB_MAC_BYTES], const uint8_t b[GB_MAC_BYTES]);

/* ---- address blob ---- */

#define GB_ENDPOINTS_MAX 20
#define GB_FAMILY_LOCAL  1 /* a local socket named after the uuid; addr: identity of the boot */
enum gb_endpoint_flags { GB_ENDPOINT_LOOPBACK = 1 };
struct gb_endpoint {
    uint8_t family; /* 4, 6 or GB_FAMILY_LOCAL */
    uint8_t flags;
    uint8_t addr[16];
};
struct gb_address_info {
    uint8_t host_id[16]; /* same boot, same network namespace: loopback reaches */
    uint16_t port;
    uint8_t inproc; /* 1: reachable inside its process only */
    uint8_t count;
    struct gb_endpoint endpoint[GB_ENDPOINTS_MAX];
};
/* Returns the length; `capacity` must hold 24 + 18 * count. */
size_t gb_address_pack(const struct gb_address_info *info, uint8_t *out, size_t capacity);
int gb_address_parse(const uint8_t *in, size_t bytes, struct gb_address_info *info, const char **why);

#endif
