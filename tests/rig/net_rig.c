/* SPDX-License-Identifier: Apache-2.0
 * See net_rig.h. */
#include "net_rig.h"

#include "base/clock.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
/* cmocka needs the standard headers first */
#include <cmocka.h>

static const uint8_t secret[] = "a secret of the test job";

struct gb_uuid rig_uuid(int n)
{
    struct gb_uuid u = {{0}};
    u.byte[0] = (uint8_t)(n + 1); /* orders who dials: the lower number */
    return u;
}

int rig_open_net(struct rig *rig, int who, const struct rig_options *o)
{
    struct rig_net *n = &rig->net[who];
    char host[16];
    snprintf(host, sizeof host, "host-%c", 'a' + who);
    n->uuid = rig_uuid(who);
    const uint8_t *s = who == 1 && o->other_secret ? (const uint8_t *)o->other_secret : secret;
    struct gb_net_config c = {.self = n->uuid,
                              .global_rank = who,
                              .host = host,
                              .transport = o->transport,
                              .ifname = o->ifname,
                              .master_addr = o->master,
                              .secret = s,
                              .secret_bytes = strlen((const char *)s),
                              .lanes = o->lanes,
                              .workers = o->workers,
                              .checksum = o->checksum,
                              .peer_timeout_ns = o->peer_timeout_ms * 1000000,
                              .connect_timeout_ns = (o->connect_timeout_ms ? o->connect_timeout_ms : 20000) * 1000000,
                              .fault = who == 0 ? o->fault : NULL};
    return gb_net_open(&c, &n->net);
}

void rig_peer(struct rig *rig, int who, struct gb_net_peer *peer)
{
    static const char *const hosts[] = {"host-a", "host-b", "host-c", "host-d"};
    *peer = (struct gb_net_peer){.uuid = rig->net[who].uuid, .global_rank = who, .host = hosts[who]};
    gb_net_get_address(rig->net[who].net, &peer->address);
}

void rig_link(struct rig *rig, int a, int b)
{
    struct gb_net_peer pa, pb;
    rig_peer(rig, a, &pa);
    rig_peer(rig, b, &pb);
    assert_int_equal(gb_link_get(rig->net[a].net, &pb, &rig->net[a].to[b]), 0);
    assert_int_equal(gb_link_get(rig->net[b].net, &pa, &rig->net[b].to[a]), 0);
}

void rig_open(struct rig *rig, int nets, const struct rig_options *options)
{
    memset(rig, 0, sizeof *rig);
    rig->nets = nets;
    for (int i = 0; i < nets; i++) {
        int rc = rig_open_net(rig, i, options);
        if (rc) print_error("%s\n", gb_err_text());
        assert_int_equal(rc, 0);
    }
    for (int a = 0; a < nets; a++)
        for (int b = a + 1; b < nets; b++) rig_link(rig, a, b);
    for (int a = 0; a < nets; a++) rig_until(rig, &rig->net[a].seen[GB_NET_LINK_UP], nets - 1, 10000);
}

void rig_close(struct rig *rig)
{
    for (int i = 0; i < rig->nets; i++)
        for (int k = 0; k < RIG_NETS; k++) gb_link_put(rig->net[i].to[k]);
    for (int i = 0; i < rig->nets; i++) gb_net_close(rig->net[i].net, 0, "");
}

void rig_poll(struct rig *rig)
{
    struct gb_net_event ev[32];
    for (int i = 0; i < rig->nets; i++) {
        struct rig_net *me = &rig->net[i];
        int n = me->net ? gb_net_poll(me->net, ev, 32) : 0;
        for (int k = 0; k < n; k++) {
            me->seen[ev[k].kind]++;
            me->last[ev[k].kind] = ev[k];
            if (ev[k].text) snprintf(me->text, sizeof me->text, "%s", ev[k].text);
            if (ev[k].kind == GB_NET_CTRL) memcpy(me->ctrl, ev[k].data, ev[k].bytes);
            struct rig_op *op = ev[k].cookie;
            if (ev[k].kind == GB_NET_DONE && op) {
                op->done++;
                op->status = ev[k].status;
                op->sig = ev[k].sig;
                op->bytes = ev[k].bytes;
                op->start_ns = ev[k].start_ns;
                snprintf(op->text, sizeof op->text, "%s", ev[k].text ? ev[k].text : "");
            }
            if (rig->on_event) rig->on_event(rig, i, &ev[k]);
        }
    }
}

int rig_until_quiet(struct rig *rig, const int *flag, int want, int ms)
{
    uint64_t end = gb_now_ns() + (uint64_t)ms * 1000000u;
    for (int spins = 0; *flag < want; spins++) {
        rig_poll(rig);
        if (*flag >= want) break;
        if (gb_now_ns() > end) return -1;
        /* Several nets, one thread: wait on each in turn, briefly. */
        if (spins > 200 && rig->net[spins % rig->nets].net) gb_net_wait(rig->net[spins % rig->nets].net, 200000);
    }
    return 0;
}

void rig_until(struct rig *rig, const int *flag, int want, int ms)
{
    if (rig_until_quiet(rig, flag, want, ms) == 0) return;
    for (int i = 0; i < rig->nets; i++)
        for (int k = 0; k < rig->nets; k++) {
            char text[200];
            if (!rig->net[i].to[k]) continue;
            gb_link_describe(rig->net[i].to[k], text, sizeof text);
            print_error("net %d to %d: %s; last text: %s\n", i, k, text, rig->net[i].text);
        }
    fail_msg("waited %d ms: count is %d, want %d", ms, *flag, want);
}

struct gb_key rig_key(uint64_t group, uint32_t seq, uint32_t xid)
{
    return (struct gb_key){.group = group, .seq = seq, .xid = xid};
}

struct gb_sig rig_sig(uint64_t count)
{
    return (struct gb_sig){.op = 1, .dtype = 2, .reduce_op = 3, .root_lo = 4, .plan_hash = 0xabcdef01, .count = count};
}

static uint64_t mix(uint64_t x)
{
    x ^= x >> 31;
    x *= 0x9e3779b97f4a7c15u;
    return x ^ x >> 29;
}

void rig_fill(void *buf, uint64_t bytes, uint64_t seed)
{
    uint8_t *p = buf;
    for (uint64_t i = 0; i < bytes; i += 8) {
        uint64_t v = mix(seed * 1000003 + i);
        memcpy(p + i, &v, bytes - i < 8 ? (size_t)(bytes - i) : 8);
    }
}

int rig_check(const void *buf, uint64_t bytes, uint64_t seed)
{
    const uint8_t *p = buf;
    for (uint64_t i = 0; i < bytes; i += 8) {
        uint64_t v = mix(seed * 1000003 + i);
        if (memcmp(p + i, &v, bytes - i < 8 ? (size_t)(bytes - i) : 8) != 0) return 0;
    }
    return 1;
}

void rig_send(struct rig *rig, int from, int to, struct gb_key key, const void *buf, uint64_t bytes, struct rig_op *op)
{
    struct gb_sig sig = rig_sig(bytes);
    assert_int_equal(gb_link_send(rig->net[from].to[to], &key, &sig, buf, bytes, op), 0);
}

void rig_recv(struct rig *rig, int at, int from, struct gb_key key, void *buf, uint64_t bytes, struct rig_op *op)
{
    struct gb_sig sig = rig_sig(bytes);
    assert_int_equal(gb_link_recv(rig->net[at].to[from], &key, &sig, buf, bytes, op), 0);
}
