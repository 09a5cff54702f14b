/* SPDX-License-Identifier: Apache-2.0
 * Packs and parses handshake messages and address blobs, and computes their MACs.  Pure; bytes from a peer are never
 * trusted: every field is range checked before anyone sees it. */
#include "wire/hello.h"

#include "wire/le.h"

#include <assert.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <string.h>

static const uint8_t magic[8] = {'G', 'P', 'U', 'B', 'R', 'D', 'G', '\n'};

static void put_prefix(uint8_t *out, uint16_t version, uint16_t kind, uint32_t bytes)
{
    memcpy(out, magic, 8);
    gb_put16(out + 8, version);
    gb_put16(out + 10, kind);
    gb_put32(out + 12, bytes);
}

int gb_prefix_parse(const uint8_t in[GB_PREFIX_BYTES], struct gb_prefix *p)
{
    if (memcmp(in, magic, 8) != 0) return -1;
    p->version = gb_get16(in + 8);
    p->kind = gb_get16(in + 10);
    p->bytes = gb_get32(in + 12);
    return 0;
}

void gb_hello_pack(const struct gb_hello *h, uint8_t out[GB_HELLO_BYTES])
{
    memset(out, 0, GB_HELLO_BYTES);
    put_prefix(out, h->version, h->kind, h->kind == GB_HS_CHALLENGE ? GB_CHALLENGE_BYTES : GB_HELLO_BYTES);
    memcpy(out + 16, h->from, 16);
    memcpy(out + 32, h->to, 16);
    memcpy(out + 48, h->nonce, 16);
    gb_put32(out + 64, (uint32_t)h->from_rank);
    gb_put32(out + 68, (uint32_t)h->to_rank);
    out[72] = h->lane_kind;
    out[73] = h->lane_index;
    out[74] = h->lanes;
    out[75] = h->status;
    out[76] = h->features;
    memcpy(out + 80, h->host, GB_HELLO_HOST);
    memcpy(out + 144, h->text, GB_HELLO_TEXT);
}

/* Text from a peer ends inside its field and is printable, so that it can go into a log line. */
static void get_text(char *dst, const uint8_t *src, size_t bytes)
{
    size_t n = 0;
    for (; n + 1 < bytes && src[n]; n++) dst[n] = src[n] >= 0x20 && src[n] < 0x7f ? (char)src[n] : '?';
    memset(dst + n, 0, bytes - n);
}

int gb_hello_parse(const uint8_t *in, size_t bytes, struct gb_hello *h, const char **why)
{
    struct gb_prefix p;
    *why = "not a gpubridge handshake";
    if (bytes < GB_PREFIX_BYTES || gb_prefix_parse(in, &p) != 0) return -1;
    *why = "a handshake of another protocol version";
    if (p.version != GB_PROTOCOL_VERSION) return -1;
    *why = "a handshake message of the wrong kind or length";
    size_t want = p.kind == GB_HS_CHALLENGE ? GB_CHALLENGE_BYTES : GB_HELLO_BYTES;
    if ((p.kind != GB_HS_HELLO && p.kind != GB_HS_CHALLENGE) || p.bytes != want || bytes < GB_HELLO_BYTES) return -1;
    *why = "a handshake with a lane or status that does not exist";
    if (in[72] >= GB_LANE_KIND_END || in[75] >= GB_HS_STATUS_END) return -1;
    if (in[72] != GB_LANE_BULK && in[73] != 0) return -1;
    *h = (struct gb_hello){.kind = p.kind,
                           .version = p.version,
                           .from_rank = (int32_t)gb_get32(in + 64),
                           .to_rank = (int32_t)gb_get32(in + 68),
                           .lane_kind = in[72],
                           .lane_index = in[73],
                           .lanes = in[74],
                           .status = in[75],
                           .features = in[76]};
    memcpy(h->from, in + 16, 16);
    memcpy(h->to, in + 32, 16);
    memcpy(h->nonce, in + 48, 16);
    get_text(h->host, in + 80, GB_HELLO_HOST);
    get_text(h->text, in + 144, GB_HELLO_TEXT);
    *why = NULL;
    return 0;
}

void gb_proof_pack(const uint8_t mac[GB_MAC_BYTES], uint8_t out[GB_PROOF_BYTES])
{
    put_prefix(out, GB_PROTOCOL_VERSION, GB_HS_PROOF, GB_PROOF_BYTES);
    memcpy(out + GB_PREFIX_BYTES, mac, GB_MAC_BYTES);
}

int gb_proof_parse(const uint8_t *in, size_t bytes, uint8_t mac[GB_MAC_BYTES])
{
    struct gb_prefix p;
    if (bytes != GB_PROOF_BYTES || gb_prefix_parse(in, &p) != 0) return -1;
    if (p.version != GB_PROTOCOL_VERSION || p.kind != GB_HS_PROOF || p.bytes != bytes) return -1;
    memcpy(mac, in + GB_PREFIX_BYTES, GB_MAC_BYTES);
    return 0;
}

void gb_accept_pack(uint32_t status, uint32_t lanes, const uint8_t mac[GB_MAC_BYTES], uint8_t out[GB_ACCEPT_BYTES])
{
    put_prefix(out, GB_PROTOCOL_VERSION, GB_HS_ACCEPT, GB_ACCEPT_BYTES);
    gb_put32(out + 16, status);
    gb_put32(out + 20, lanes);
    memcpy(out + 24, mac, GB_MAC_BYTES);
}

int gb_accept_parse(const uint8_t *in, size_t bytes, uint32_t *status, uint32_t *lanes, uint8_t mac[GB_MAC_BYTES])
{
    struct gb_prefix p;
    if (bytes != GB_ACCEPT_BYTES || gb_prefix_parse(in, &p) != 0) return -1;
    if (p.version != GB_PROTOCOL_VERSION || p.kind != GB_HS_ACCEPT || p.bytes != bytes) return -1;
    if (gb_get32(in + 16) >= GB_HS_STATUS_END || gb_get32(in + 20) > 255) return -1;
    *status = gb_get32(in + 16);
    *lanes = gb_get32(in + 20);
    memcpy(mac, in + 24, GB_MAC_BYTES);
    return 0;
}

void gb_mac(const uint8_t *secret, size_t secret_bytes, const char *label, const struct gb_part *parts, int nparts,
            uint8_t mac[GB_MAC_BYTES])
{
    uint8_t text[1024];
    size_t n = strlen(label) + 1;
    memcpy(text, label, n);
    for (int i = 0; i < nparts; i++) {
        assert(n + 4 + parts[i].bytes <= sizeof text);
        gb_put32(text + n, (uint32_t)parts[i].bytes);
        memcpy(text + n + 4, parts[i].data, parts[i].bytes);
        n += 4 + parts[i].bytes;
    }
    unsigned out = GB_MAC_BYTES;
    HMAC(EVP_sha256(), secret, (int)secret_bytes, text, n, mac, &out);
}

int gb_mac_equal(const uint8_t a[GB_MAC_BYTES], const uint8_t b[GB_MAC_BYTES])
{
    return CRYPTO_memcmp(a, b, GB_MAC_BYTES) == 0;
}

/* version, inproc, port, host id, count, 3 zero bytes; then per endpoint family, flags, 16 address bytes */
size_t gb_address_pack(const struct gb_address_info *a, uint8_t *out, size_t capacity)
{
    assert(a->count <= GB_ENDPOINTS_MAX && capacity >= 24 + 18u * a->count);
    memset(out, 0, 24);
    out[0] = 1;
    out[1] = a->inproc;
    gb_put16(out + 2, a->port);
    memcpy(out + 4, a->host_id, 16);
    out[20] = a->count;
    for (int i = 0; i < a->count; i++) {
        uint8_t *p = out + 24 + 18 * i;
        p[0] = a->endpoint[i].family;
        p[1] = a->endpoint[i].flags;
        memcpy(p + 2, a->endpoint[i].addr, 16);
    }
    return 24 + 18u * a->count;
}

int gb_address_parse(const uint8_t *in, size_t bytes, struct gb_address_info *a, const char **why)
{
    *why = "the address is too short or of another version";
    if (bytes < 24 || in[0] != 1 || in[1] > 1) return -1;
    *why = "the address's length does not fit its count";
    if (in[20] > GB_ENDPOINTS_MAX || bytes != 24 + 18u * in[20]) return -1;
    memset(a, 0, sizeof *a);
    a->inproc = in[1];
    a->port = gb_get16(in + 2);
    memcpy(a->host_id, in + 4, 16);
    a->count = in[20];
    *why = "the address has an unknown family";
    for (int i = 0; i < a->count; i++) {
        const uint8_t *p = in + 24 + 18 * i;
        if (p[0] != 4 && p[0] != 6 && p[0] != GB_FAMILY_LOCAL) return -1;
        a->endpoint[i].family = p[0];
        a->endpoint[i].flags = p[1];
        memcpy(a->endpoint[i].addr, p + 2, 16);
    }
    *why = NULL;
    return 0;
}
