/* SPDX-License-Identifier: Apache-2.0
 * Fuzz target: handshake messages and address blobs.  What is accepted must be in range, and packs to the same meaning.
 */
#include "fuzz.h"
#include "wire/hello.h"

#include <stdlib.h>
#include <string.h>

static void require(int condition)
{
    if (!condition) abort();
}

static void hello(const uint8_t *data, size_t size)
{
    const char *why;
    struct gb_hello h, again;
    uint8_t raw[GB_HELLO_BYTES];
    if (gb_hello_parse(data, size, &h, &why) != 0) {
        require(why != NULL);
        return;
    }
    require(h.lane_kind < GB_LANE_KIND_END && h.status < GB_HS_STATUS_END);
    require(memchr(h.host, 0, sizeof h.host) && memchr(h.text, 0, sizeof h.text));
    gb_hello_pack(&h, raw);
    require(gb_hello_parse(raw, sizeof raw, &again, &why) == 0);
    require(memcmp(&h, &again, sizeof h) == 0);
}

static void address(const uint8_t *data, size_t size)
{
    const char *why;
    struct gb_address_info a, again;
    uint8_t raw[512];
    if (gb_address_parse(data, size, &a, &why) != 0) return;
    require(a.count <= GB_ENDPOINTS_MAX);
    size_t n = gb_address_pack(&a, raw, sizeof raw);
    require(n == size && gb_address_parse(raw, n, &again, &why) == 0 && memcmp(&a, &again, sizeof a) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint8_t mac[GB_MAC_BYTES];
    uint32_t status, lanes;
    struct gb_prefix p;
    if (size >= GB_PREFIX_BYTES) (void)gb_prefix_parse(data, &p);
    hello(data, size);
    address(data, size);
    (void)gb_proof_parse(data, size, mac);
    if (gb_accept_parse(data, size, &status, &lanes, mac) == 0) require(status < GB_HS_STATUS_END && lanes <= 255);
    return 0;
}
