/* SPDX-License-Identifier: Apache-2.0
 * Which addresses this process tells its peers: by interface list, or by the route to the master, the rest behind it.
 * Runs once, in gb_net_open. */
#include "transport/net_impl.h"

#include "base/log.h"

#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#define GB_ADDRESSES (GB_ENDPOINTS_MAX - 1) /* the last place is for shared memory */

static void read_boot(char text[160])
{
    text[0] = 0;
    FILE *f = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (!f) return;
    if (!fgets(text, 64, f)) text[0] = 0;
    fclose(f);
}

void gb_addr_boot_id(uint8_t id[16])
{
    char text[160];
    read_boot(text);
    XXH128_hash_t h = XXH3_128bits(text, strlen(text));
    memcpy(id, &h, 16);
}

void gb_addr_host_id(uint8_t id[16])
{
    char text[160];
    read_boot(text);
    struct stat st = {0};
    if (stat("/proc/self/ns/net", &st) != 0) st.st_ino = 0;
    size_t n = strlen(text);
    snprintf(text + n, sizeof text - n, " %llu", (unsigned long long)st.st_ino);
    XXH128_hash_t h = XXH3_128bits(text, strlen(text));
    memcpy(id, &h, 16);
}

static int from_sockaddr(const struct sockaddr *sa, struct gb_endpoint *e)
{
    memset(e, 0, sizeof *e);
    if (!sa) return 0;
    if (sa->sa_family == AF_INET) {
        const struct sockaddr_in *a = (const struct sockaddr_in *)sa;
        e->family = 4;
        memcpy(e->addr, &a->sin_addr, 4);
        if ((ntohl(a->sin_addr.s_addr) >> 24) == 127) e->flags = GB_ENDPOINT_LOOPBACK;
        return 1;
    }
    if (sa->sa_family != AF_INET6) return 0;
    const struct sockaddr_in6 *a = (const struct sockaddr_in6 *)sa;
    /* A link-local address means nothing without the reader's interface. */
    if (IN6_IS_ADDR_LINKLOCAL(&a->sin6_addr)) return 0;
    e->family = 6;
    memcpy(e->addr, &a->sin6_addr, 16);
    if (IN6_IS_ADDR_LOOPBACK(&a->sin6_addr)) e->flags = GB_ENDPOINT_LOOPBACK;
    return 1;
}

static void add(struct gb_address_info *own, const struct gb_endpoint *e)
{
    for (int i = 0; i < own->count; i++)
        if (own->endpoint[i].family == e->family && memcmp(own->endpoint[i].addr, e->addr, 16) == 0) return;
    if (own->count < GB_ADDRESSES) own->endpoint[own->count++] = *e;
}

/* "eth": names that begin so; "=eth0": exactly; "^lo,docker": all but these; the marks hold for the whole list, and "="
 * may also mark one item. */
int gb_addr_matches(const char *list, const char *name)
{
    int not = list[0] == '^';
    if (not) list++;
    int exact = list[0] == '=';
    if (exact) list++;
    for (const char *item = list; *item;) {
        size_t n = strcspn(item, ",");
        int only = exact;
        const char *word = item;
        size_t len = n;
        if (len && word[0] == '=') {
            only = 1;
            word++;
            len--;
        }
        if (len && strncmp(name, word, len) == 0 && (!only || name[len] == 0)) return !not;
        item += n + (item[n] == ',');
    }
    return not;
}

static void list_interfaces(struct ifaddrs *all, char *text, size_t capacity)
{
    size_t n = 0;
    text[0] = 0;
    for (struct ifaddrs *i = all; i && n < capacity; i = i->ifa_next) {
        struct gb_endpoint e;
        char addr[INET6_ADDRSTRLEN];
        if (!from_sockaddr(i->ifa_addr, &e)) continue;
        inet_ntop(e.family == 6 ? AF_INET6 : AF_INET, e.addr, addr, sizeof addr);
        n += (size_t)snprintf(text + n, capacity - n, "%s%s %s%s", n ? ", " : "", i->ifa_name, addr,
                              i->ifa_flags & IFF_UP ? "" : " (down)");
    }
}

static int by_list(struct gb_address_info *own, struct ifaddrs *all, const char *variable, const char *list)
{
    for (struct ifaddrs *i = all; i; i = i->ifa_next) {
        struct gb_endpoint e;
        if ((i->ifa_flags & IFF_UP) && gb_addr_matches(list, i->ifa_name) && from_sockaddr(i->ifa_addr, &e))
            add(own, &e);
    }
    if (own->count) return 0;
    char text[700];
    list_interfaces(all, text, sizeof text);
    return GB_FAIL(GPUBRIDGE_ERR_SETTING, "%s=%s matches no interface that is up; this host has: %s", variable, list,
                   text);
}

/* The source address the kernel would use towards `master`, for each of its addresses. */
static void by_route(struct gb_address_info *own, const char *master)
{
    struct addrinfo hints = {.ai_socktype = SOCK_DGRAM}, *found = NULL;
    int rc = getaddrinfo(master, "9", &hints, &found);
    if (rc)
        GB_WARN("the master address %s does not resolve (%s); taking this host's first address", master,
                gai_strerror(rc));
    for (struct addrinfo *a = found; a; a = a->ai_next) {
        struct sockaddr_storage ss = {0};
        socklen_t len = sizeof ss;
        struct gb_endpoint e;
        int fd = socket(a->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
        if (fd < 0) continue;
        /* Connecting a datagram socket sends nothing. */
        if (connect(fd, a->ai_addr, a->ai_addrlen) == 0 && getsockname(fd, (struct sockaddr *)&ss, &len) == 0 &&
            from_sockaddr((struct sockaddr *)&ss, &e) && !(e.flags & GB_ENDPOINT_LOOPBACK))
            add(own, &e);
        close(fd);
    }
    if (found) freeaddrinfo(found);
}

static void by_scan(struct gb_address_info *own, struct ifaddrs *all)
{
    for (int loopback = 0; loopback < 2; loopback++)
        for (struct ifaddrs *i = all; i; i = i->ifa_next) {
            struct gb_endpoint e;
            if (!(i->ifa_flags & IFF_UP) || !from_sockaddr(i->ifa_addr, &e)) continue;
            if ((e.flags & GB_ENDPOINT_LOOPBACK) != loopback) continue;
            if (own->count < GB_ADDRESSES - 2 || loopback) add(own, &e); /* keep room for both loopbacks */
        }
}

int gb_addr_choose(struct gb_net *net)
{
    static const char *const names[] = {"GPUBRIDGE_IFNAME", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"};
    struct gb_address_info *own = &net->own;
    struct ifaddrs *all = NULL;
    gb_addr_host_id(own->host_id);
    if (getifaddrs(&all) != 0)
        return GB_FAIL(GPUBRIDGE_ERR_SYSTEM, "cannot list the network interfaces: errno %d", errno);
    const char *list = net->ifname;
    int from = 0, rc = 0;
    while (!list[0] && ++from < 3) {
        const char *value = getenv(names[from]);
        if (value) list = value;
    }
    if (list[0]) {
        rc = by_list(own, all, names[from], list);
    } else {
        if (net->master[0]) by_route(own, net->master);
        by_scan(own, all);
        if (own->count == 0)
            rc = GB_FAIL(GPUBRIDGE_ERR_SYSTEM, "this host has no usable network address, not even loopback");
    }
    freeifaddrs(all);
    return rc;
}
