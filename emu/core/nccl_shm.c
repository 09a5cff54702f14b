/* SPDX-License-Identifier: Apache-2.0
 * The rendezvous of emulated NCCL: a unique id names a memfd of the process that made it, which the others open through
 * /proc.  So nothing has a name in a file system, and nothing stays behind when processes are killed.  */
#include "nccl.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

struct id_content {
    char magic[8], vendor[8];
    int32_t pid, fd;
    uint64_t nonce;
};

int nccl_id_make(struct nccl_id *out)
{
    struct id_content id = {.magic = "GBEMUNC", .pid = (int32_t)getpid()};
    snprintf(id.vendor, sizeof id.vendor, "%s", emu_vendor.name);
    if (getrandom(&id.nonce, sizeof id.nonce, 0) != sizeof id.nonce)
        return nccl_error(NCCL_SYSTEM_ERROR, "getrandom: %s", strerror(errno));
    id.fd = memfd_create("gbemu-nccl", MFD_CLOEXEC);
    if (id.fd < 0 || ftruncate(id.fd, 4096) != 0) return nccl_error(NCCL_SYSTEM_ERROR, "memfd: %s", strerror(errno));
    if (pwrite(id.fd, &id.nonce, sizeof id.nonce, 0) != sizeof id.nonce) {
        close(id.fd);
        return nccl_error(NCCL_SYSTEM_ERROR, "memfd: %s", strerror(errno));
    }
    memset(out, 0, sizeof *out);
    memcpy(out, &id, sizeof id);
    return NCCL_OK;
}

void nccl_id_close(const struct nccl_id *from)
{
    struct id_content id;
    uint64_t nonce = 0;
    memcpy(&id, from, sizeof id);
    if (id.pid != getpid()) return;
    /* Another thread of this process may have closed it, and the number may be another file's by now: look and close as
     * one. */
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&lock);
    if (pread(id.fd, &nonce, sizeof nonce, 0) == sizeof nonce && nonce == id.nonce) close(id.fd);
    pthread_mutex_unlock(&lock);
}

static size_t pair_stride(void)
{
    return sizeof(struct nccl_pair);
}

struct nccl_pair *nccl_pair(const struct nccl_map *m, int from, int to)
{
    return (struct nccl_pair *)(void *)(m->pairs + (size_t)(from * m->nranks + to) * pair_stride());
}

static int open_id(const struct id_content *id)
{
    char path[64];
    uint64_t nonce = 0;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", id->pid, id->fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return -1;
    if (pread(fd, &nonce, sizeof nonce, 0) == sizeof nonce && nonce == id->nonce) return fd;
    close(fd);
    errno = ESTALE;
    return -1;
}

int nccl_map_open(struct nccl_map *m, const struct nccl_id *from, int nranks)
{
    struct id_content id;
    struct stat st;
    memcpy(&id, from, sizeof id);
    if (memcmp(id.magic, "GBEMUNC", 8) != 0 || strncmp(id.vendor, emu_vendor.name, sizeof id.vendor) != 0)
        return nccl_error(NCCL_INVALID_ARGUMENT, "the unique id was not made by this library");
    int fd = open_id(&id);
    if (fd < 0)
        return nccl_error(NCCL_SYSTEM_ERROR, "cannot reach process %d, which made the unique id: %s", id.pid,
                          strerror(errno));
    size_t slots_at = 4096, pairs_at = (slots_at + sizeof(struct nccl_slot) * (size_t)nranks + 4095) / 4096 * 4096;
    m->nranks = nranks;
    m->size = pairs_at + (size_t)nranks * (size_t)nranks * pair_stride();
    /* Only ever grown, and to the same size by all: the pages are zero and cost nothing until used. */
    int rc = fstat(fd, &st);
    if (!rc && (size_t)st.st_size < m->size) rc = ftruncate(fd, (off_t)m->size);
    char *base = rc ? MAP_FAILED : mmap(NULL, m->size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    int error = errno;
    close(fd);
    if (base == MAP_FAILED) return nccl_error(NCCL_SYSTEM_ERROR, "shared segment: %s", strerror(error));
    m->head = (struct nccl_head *)(void *)base;
    m->slots = (struct nccl_slot *)(void *)(base + slots_at);
    m->pairs = base + pairs_at;
    uint32_t none = 0;
    if (!atomic_compare_exchange_strong(&m->head->nranks, &none, (uint32_t)nranks) && none != (uint32_t)nranks) {
        nccl_map_close(m);
        return nccl_error(NCCL_INVALID_ARGUMENT, "this rank says %d ranks, another one %u", nranks, none);
    }
    return NCCL_OK;
}

void nccl_map_close(struct nccl_map *m)
{
    if (m->head) munmap(m->head, m->size);
    m->head = NULL;
}

void nccl_ring_bell(struct nccl_slot *slot)
{
    atomic_fetch_add(&slot->bell, 1);
    if (atomic_load(&slot->sleeping)) syscall(SYS_futex, &slot->bell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void nccl_await_bell(struct nccl_slot *slot, uint32_t seen, int ms)
{
    struct timespec ts = {.tv_sec = ms / 1000, .tv_nsec = (long)(ms % 1000) * 1000000};
    atomic_fetch_add(&slot->sleeping, 1);
    syscall(SYS_futex, &slot->bell, FUTEX_WAIT, seen, &ts, NULL, 0);
    atomic_fetch_sub(&slot->sleeping, 1);
}
