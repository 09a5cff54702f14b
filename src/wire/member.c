/* SPDX-License-Identifier: Apache-2.0
 * Hello: fixed little-endian head, then length-prefixed strings, then an XXH3 sum.  Pure. */
#include "wire/member.h"

#include <string.h>
#include <xxhash.h>

static const uint8_t magic[4] = {'G', 'B', 'H', 'I'};

struct writer {
    uint8_t *at;
    size_t left;
    int bad;
};

struct reader {
    const uint8_t *at;
    size_t left;
    int bad;
};

static void put(struct writer *w, const void *data, size_t n)
{
    if (w->left < n) {
        w->bad = 1;
        return;
    }
    memcpy(w->at, data, n);
    w->at += n;
    w->left -= n;
}

static void put_int(struct writer *w, uint64_t value, size_t n)
{
    uint8_t b[8];
    for (size_t i = 0; i < n; i++) b[i] = (uint8_t)(value >> (8 * i));
    put(w, b, n);
}

static void put_text(struct writer *w, const char *text)
{
    size_t n = strlen(text);
    put_int(w, n, 2);
    put(w, text, n);
}

static void take(struct reader *r, void *out, size_t n)
{
    if (r->bad || r->left < n) {
        r->bad = 1;
        memset(out, 0, n);
        return;
    }
    memcpy(out, r->at, n);
    r->at += n;
    r->left -= n;
}

static uint64_t take_int(struct reader *r, size_t n)
{
    uint8_t b[8];
    uint64_t value = 0;
    take(r, b, n);
    for (size_t i = 0; i < n; i++) value |= (uint64_t)b[i] << (8 * i);
    return value;
}

static void take_text(struct reader *r, char *out, size_t capacity)
{
    size_t n = (size_t)take_int(r, 2);
    out[0] = 0;
    if (n >= capacity) r->bad = 1;
    if (r->bad) return;
    take(r, out, n);
    out[n] = 0;
    if (strlen(out) != n) r->bad = 1;
}

int gb_member_hello_encode(const struct gb_member_hello *h, uint8_t *bytes, size_t capacity, size_t *length)
{
    struct writer w = {.at = bytes, .left = capacity};
    put(&w, magic, sizeof magic);
    put_int(&w, h->protocol, 2);
    put_int(&w, h->device_kind, 1);
    put_int(&w, h->flags, 1);
    put_int(&w, (uint32_t)h->rank, 4);
    put_int(&w, (uint32_t)h->size, 4);
    put_int(&w, (uint32_t)h->global_rank, 4);
    put_int(&w, h->ccl_epoch, 4);
    put(&w, h->uuid, sizeof h->uuid);
    put(&w, h->leader_uuid, sizeof h->leader_uuid);
    put_int(&w, h->name_hash, 8);
    put_int(&w, h->birth, 8);
    put_int(&w, h->host_id, 8);
    const char *texts[] = {h->host, h->island, h->device, h->library, h->versions, h->ccl, h->agreed};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) put_text(&w, texts[i]);
    put_int(&w, h->address_bytes, 2);
    put(&w, h->address, h->address_bytes);
    put_int(&w, w.bad ? 0 : XXH3_64bits(bytes, (size_t)(w.at - bytes)), 8);
    if (w.bad) return GB_FAIL(GPUBRIDGE_ERR_INVALID, "a hello of this process does not fit into %zu bytes", capacity);
    *length = (size_t)(w.at - bytes);
    return 0;
}

int gb_member_hello_decode(const uint8_t *bytes, size_t length, struct gb_member_hello *out)
{
    struct gb_member_hello h;
    memset(&h, 0, sizeof h);
    struct reader r = {.at = bytes, .left = length};
    uint8_t head[4];
    take(&r, head, sizeof head);
    if (r.bad || memcmp(head, magic, sizeof head) != 0)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "%zu bytes are not a gpubridge hello", length);
    h.protocol = (uint16_t)take_int(&r, 2);
    if (!r.bad && h.protocol != GB_MEMBER_PROTOCOL)
        return GB_FAIL(GPUBRIDGE_ERR_VERSION,
                       "a member speaks protocol %u, this process %u: install one gpubridge version everywhere",
                       h.protocol, GB_MEMBER_PROTOCOL);
    h.device_kind = (uint8_t)take_int(&r, 1);
    h.flags = (uint8_t)take_int(&r, 1);
    h.rank = (int32_t)take_int(&r, 4);
    h.size = (int32_t)take_int(&r, 4);
    h.global_rank = (int32_t)take_int(&r, 4);
    h.ccl_epoch = (uint32_t)take_int(&r, 4);
    take(&r, h.uuid, sizeof h.uuid);
    take(&r, h.leader_uuid, sizeof h.leader_uuid);
    h.name_hash = take_int(&r, 8);
    h.birth = take_int(&r, 8);
    h.host_id = take_int(&r, 8);
    take_text(&r, h.host, sizeof h.host);
    take_text(&r, h.island, sizeof h.island);
    take_text(&r, h.device, sizeof h.device);
    take_text(&r, h.library, sizeof h.library);
    take_text(&r, h.versions, sizeof h.versions);
    take_text(&r, h.ccl, sizeof h.ccl);
    take_text(&r, h.agreed, sizeof h.agreed);
    h.address_bytes = (uint16_t)take_int(&r, 2);
    if (h.address_bytes > sizeof h.address) r.bad = 1;
    if (!r.bad) take(&r, h.address, h.address_bytes);
    size_t body = length - r.left;
    uint64_t sum = take_int(&r, 8);
    if (r.bad || r.left || sum != XXH3_64bits(bytes, body))
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "a hello of %zu bytes is damaged", length);
    *out = h;
    return 0;
}
