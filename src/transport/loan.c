/* SPDX-License-Identifier: Apache-2.0
 * See loan.h.  Regions are made by whoever needs them, offered and taken by the control thread, looked up under the
 * link's lock. */
#include "transport/net_impl.h"

#include "base/log.h"
#include "wire/le.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#define GB_SEALS      (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
#define GB_REGION_MAX ((uint64_t)1 << 42)

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008u
#endif

static const uint8_t magic[8] = {'G', 'B', 'R', 'E', 'G', 'I', 'O', 'N'};

/* ---- making ---- */

static int make(uint64_t all, int *fd)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < all) /* else a signal */
        return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "the limit of file sizes (ulimit -f) forbids it");
    unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
    *fd = memfd_create("gpubridge-staging", flags | MFD_NOEXEC_SEAL);
    if (*fd < 0 && errno == EINVAL) *fd = memfd_create("gpubridge-staging", flags); /* before Linux 6.3 */
    if (*fd < 0) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "memfd_create: %s", strerror(errno));
    /* Taken now: memory that is missing later would be a SIGBUS, here or at the peer. */
    if (fallocate(*fd, 0, 0, (off_t)all) == 0 && fcntl(*fd, F_ADD_SEALS, GB_SEALS) == 0) return 0;
    int rc = GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "%s", strerror(errno));
    close(*fd);
    return rc;
}

int gb_region_make(uint64_t bytes, struct gb_region *region)
{
    int fd = -1;
    uint64_t all = bytes + GB_REGION_HEAD;
    if (bytes == 0 || bytes > GB_REGION_MAX || bytes % GB_REGION_HEAD)
        return GB_FAIL(GPUBRIDGE_ERR_INVALID, "a region of %llu bytes; it has whole pages", (unsigned long long)bytes);
    GB_TRY(make(all, &fd));
    void *map = mmap(NULL, (size_t)all, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED) {
        int rc = GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "cannot map it: %s", strerror(errno));
        close(fd);
        return rc;
    }
    *region = (struct gb_region){.fd = fd, .base = (uint8_t *)map + GB_REGION_HEAD, .bytes = bytes};
    return 0;
}

void gb_region_free(struct gb_region *region)
{
    if (!region->base) return;
    munmap((uint8_t *)region->base - GB_REGION_HEAD, (size_t)(region->bytes + GB_REGION_HEAD));
    close(region->fd);
    *region = (struct gb_region){.fd = -1};
}

/* ---- offering ---- */

static void fill_head(const struct gb_uuid *owner, uint32_t number, uint64_t bytes, uint8_t head[40])
{
    memcpy(head, magic, 8);
    memcpy(head + 8, owner->byte, 16);
    gb_put32(head + 24, number);
    gb_put32(head + 28, 0);
    gb_put64(head + 32, bytes);
}

int gb_net_offer(struct gb_net *net, const struct gb_region *region)
{
    int fd = fcntl(region->fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) return GB_FAIL(GPUBRIDGE_ERR_SYSTEM, "no descriptor for shared staging: %s", strerror(errno));
    pthread_mutex_lock(&net->lock);
    uint32_t n = atomic_load(&net->regions);
    if (n < GB_REGIONS_MAX) {
        fill_head(&net->self, n, region->bytes, (uint8_t *)region->base - GB_REGION_HEAD);
        net->region[n] = (struct gb_own_region){fd, region->base, region->bytes};
        atomic_store(&net->regions, n + 1);
    }
    pthread_mutex_unlock(&net->lock);
    if (n == GB_REGIONS_MAX) {
        close(fd);
        return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "%u regions are shared already", n);
    }
    gb_control_wake(net);
    return 0;
}

void gb_loan_offer(struct gb_link *link)
{
    struct gb_net *net = link->net;
    while (link->lends && link->offered < atomic_load(&net->regions)) {
        const struct gb_own_region *region = &net->region[link->offered];
        uint8_t body[16];
        gb_put32(body, link->offered);
        gb_put32(body + 4, 0);
        gb_put64(body + 8, region->bytes);
        if (!gb_sock_pass(&link->control, region->fd)) return; /* the next round has room */
        gb_control_queue(link, GB_CTL_REGION, body, sizeof body);
        link->offered++;
    }
}

const char *gb_loan_on_answer(struct gb_link *link, const uint8_t *body, size_t bytes)
{
    if (bytes != 8) return "an answer about shared staging has the wrong length";
    uint32_t number = gb_get32(body), taken = gb_get32(body + 4);
    if (number >= link->offered || taken > GB_REGION_FAILED)
        return "an answer about shared staging that was not offered";
    pthread_mutex_lock(&link->lock);
    link->taken[number] = taken == GB_REGION_TAKEN;
    int tell = taken == GB_REGION_FAILED && !link->told_refusal;
    link->told_refusal |= tell;
    pthread_mutex_unlock(&link->lock);
    if (tell)
        GB_WARN("%s cannot read our staging memory in place (its own log says why): messages to it are copied",
                link->label);
    return NULL;
}

/* ---- taking ---- */

/* Maps what came, once it is sure that it is such memory, complete, sealed, and the peer's region of that number. */
static int map_region(struct gb_link *link, int fd, uint32_t number, uint64_t bytes, uint8_t **out)
{
    struct stat st;
    struct statfs fs;
    uint8_t head[40], want[40];
    uint64_t all = bytes + GB_REGION_HEAD;
    if (fd < 0) return GB_FAIL(GPUBRIDGE_ERR_REFUSED, "no descriptor came (too many open files?)");
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & GB_SEALS) != GB_SEALS || fstat(fd, &st) != 0 || fstatfs(fd, &fs) != 0 ||
        fs.f_type != TMPFS_MAGIC || (uint64_t)st.st_size != all || (uint64_t)st.st_blocks * 512 < all)
        return GB_FAIL(GPUBRIDGE_ERR_REFUSED, "what came is not sealed shared memory of %llu bytes",
                       (unsigned long long)all);
    void *map = mmap(NULL, (size_t)all, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED) return GB_FAIL(GPUBRIDGE_ERR_NO_MEMORY, "cannot map it: %s", strerror(errno));
    memcpy(head, map, sizeof head);
    fill_head(&link->uuid, number, bytes, want);
    if (memcmp(head, want, sizeof head) != 0) {
        munmap(map, (size_t)all);
        return GB_FAIL(GPUBRIDGE_ERR_REFUSED, "what came is other memory than was announced");
    }
    *out = map;
    return 0;
}

static void answer(struct gb_link *link, uint32_t number, enum gb_region_use use)
{
    uint8_t body[8];
    gb_put32(body, number);
    gb_put32(body + 4, (uint32_t)use);
    gb_control_queue(link, GB_CTL_TAKEN, body, sizeof body);
}

const char *gb_loan_on_region(struct gb_link *link, const uint8_t *body, size_t bytes)
{
    if (!link->lends || bytes != 16) return "an offer of shared staging where none was agreed";
    uint32_t number = gb_get32(body);
    uint64_t size = gb_get64(body + 8);
    if (number != link->ntheirs || number >= GB_REGIONS_MAX || size == 0 || size > GB_REGION_MAX ||
        size % GB_REGION_HEAD)
        return "an offer of shared staging that cannot be";
    int fd = gb_sock_passed(&link->control);
    uint8_t *map = NULL;
    int rc = map_region(link, fd, number, size, &map);
    if (fd >= 0) close(fd);
    pthread_mutex_lock(&link->lock);
    struct gb_peer_region *region = &link->theirs[link->ntheirs++];
    *region = (struct gb_peer_region){.link = link, .map = map, .bytes = size};
    pthread_mutex_unlock(&link->lock);
    if (rc) {
        GB_WARN("%s: no shared staging: %s; messages from it are copied", link->label, gb_err_text());
        answer(link, number, GB_REGION_FAILED);
        return NULL;
    }
    struct gb_net_event ev = {.kind = GB_NET_REGION, .cookie = region, .bytes = size};
    gb_net_event_note(link->net, link, &ev, NULL, 0);
    return NULL;
}

void *gb_region_address(void *region, uint64_t *bytes)
{
    const struct gb_peer_region *r = region;
    *bytes = r->bytes;
    return r->map + GB_REGION_HEAD;
}

void gb_region_answer(void *region, enum gb_region_use use)
{
    struct gb_peer_region *r = region;
    struct gb_link *link = r->link;
    pthread_mutex_lock(&link->lock);
    r->is_usable = use == GB_REGION_TAKEN;
    pthread_mutex_unlock(&link->lock);
    answer(link, (uint32_t)(r - link->theirs), use);
    gb_control_wake(link->net);
}

/* ---- places ---- */

int gb_loan_find(const struct gb_link *link, const void *buf, uint64_t bytes, struct gb_place *place)
{
    uint32_t n = link->lends ? atomic_load_explicit(&link->net->regions, memory_order_acquire) : 0;
    for (uint32_t i = 0; i < n; i++) {
        const struct gb_own_region *r = &link->net->region[i];
        uintptr_t at = (uintptr_t)buf, base = (uintptr_t)r->base;
        if (!link->taken[i] || at < base || at - base > r->bytes || bytes > r->bytes - (at - base)) continue;
        *place = (struct gb_place){.region = i, .offset = at - base};
        return 0;
    }
    return -1;
}

void *gb_loan_place(const struct gb_link *link, const struct gb_place *place, uint64_t bytes)
{
    if (place->region >= link->ntheirs) return NULL;
    const struct gb_peer_region *r = &link->theirs[place->region];
    if (!r->is_usable || place->offset > r->bytes || bytes > r->bytes - place->offset) return NULL;
    return r->map + GB_REGION_HEAD + place->offset;
}

void gb_loan_link_fini(struct gb_link *link)
{
    for (uint32_t i = 0; i < link->ntheirs; i++)
        if (link->theirs[i].map) munmap(link->theirs[i].map, (size_t)(link->theirs[i].bytes + GB_REGION_HEAD));
    link->ntheirs = 0;
}

void gb_loan_net_fini(struct gb_net *net)
{
    for (uint32_t i = 0; i < atomic_load(&net->regions); i++) close(net->region[i].fd);
    atomic_store(&net->regions, 0);
}
