/* SPDX-License-Identifier: Apache-2.0
 * The files of the kernel cache: a head with a checksum, then the image.  Written under another name and renamed, so a
 * reader sees a whole file or none; one process of a host compiles an entry while the others wait for its lock. */
#include "device/cache.h"

#include "base/clock.h"
#include "base/log.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <xxhash.h>

#define PATH_BYTES    1200
#define MAX_IMAGE     (64u << 20)
#define LOCK_NS       60000000000u /* a compiler that takes longer is taken for dead */
#define LOCK_PAUSE_NS 5000000

struct head {
    char magic[8];
    uint64_t bytes;
    uint8_t key[16];
    uint8_t sum[16]; /* XXH3-128 of the image */
};

static const char magic[8] = "GBKERN1";

static void path_of(const struct gb_cache_entry *entry, const char *end, char *path)
{
    char name[33];
    for (int i = 0; i < 16; i++) snprintf(name + 2 * i, 3, "%02x", entry->key[i]);
    snprintf(path, PATH_BYTES, "%s/%s%s", entry->dir, name, end);
}

static void checksum(const void *image, size_t bytes, uint8_t sum[16])
{
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits(image, bytes));
    memcpy(sum, canonical.digest, 16);
}

void gb_cache_entry_open(struct gb_cache_entry *entry, const char *dir, const uint8_t key[16])
{
    const char *xdg = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    memset(entry, 0, sizeof *entry);
    memcpy(entry->key, key, sizeof entry->key);
    entry->lock_fd = -1;
    if (dir && strcmp(dir, "off") == 0) return;
    if (dir && *dir)
        snprintf(entry->dir, sizeof entry->dir, "%s", dir);
    else if (xdg && *xdg == '/')
        snprintf(entry->dir, sizeof entry->dir, "%.1000s/gpubridge", xdg);
    else if (home && *home == '/')
        snprintf(entry->dir, sizeof entry->dir, "%.1000s/.cache/gpubridge", home);
}

static void cannot_keep(struct gb_cache_entry *entry, const char *what)
{
    if (!entry->is_quiet)
        GB_WARN(
            "compiled kernels cannot be kept (%s %s: %s), so every process compiles them: set GPUBRIDGE_CACHE_DIR to "
            "a folder that can be written, or to off",
            what, entry->dir, strerror(errno));
    entry->is_quiet = 1;
}

/* mkdir -p */
static int make_dir(const char *dir)
{
    char path[1024];
    snprintf(path, sizeof path, "%s", dir);
    for (char *at = path + 1; *at; at++) {
        if (*at != '/') continue;
        *at = 0;
        if (mkdir(path, 0700) != 0 && errno != EEXIST) return -1;
        *at = '/';
    }
    return mkdir(path, 0700) != 0 && errno != EEXIST ? -1 : 0;
}

static int read_all(int fd, void *data, size_t bytes)
{
    char *at = data;
    while (bytes > 0) {
        ssize_t n = read(fd, at, bytes);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return -1;
        at += n;
        bytes -= (size_t)n;
    }
    return 0;
}

static int write_all(int fd, const void *data, size_t bytes)
{
    const char *at = data;
    while (bytes > 0) {
        ssize_t n = write(fd, at, bytes);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return -1;
        at += n;
        bytes -= (size_t)n;
    }
    return 0;
}

/* An image is code that will run: only a file of this user that nobody else can write is read. */
static int is_trusted(int fd, const struct head *head)
{
    struct stat st;
    return fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_uid == geteuid() &&
           !(st.st_mode & (S_IWGRP | S_IWOTH)) && st.st_size >= 0 && (uint64_t)st.st_size == sizeof *head + head->bytes;
}

static char *read_image(int fd, const struct gb_cache_entry *entry, size_t *bytes)
{
    struct head head;
    uint8_t sum[16];
    if (read_all(fd, &head, sizeof head) || memcmp(head.magic, magic, sizeof magic) != 0 ||
        memcmp(head.key, entry->key, sizeof head.key) != 0 || head.bytes == 0 || head.bytes > MAX_IMAGE ||
        !is_trusted(fd, &head))
        return NULL;
    char *image = malloc(head.bytes + 1);
    if (!image) return NULL;
    int bad = read_all(fd, image, head.bytes);
    if (!bad) {
        checksum(image, head.bytes, sum);
        bad = memcmp(sum, head.sum, sizeof sum) != 0;
    }
    if (bad) {
        free(image);
        return NULL;
    }
    image[head.bytes] = 0;
    *bytes = head.bytes;
    return image;
}

static char *find(const struct gb_cache_entry *entry, size_t *bytes)
{
    char path[PATH_BYTES];
    path_of(entry, ".bin", path);
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0) return NULL;
    char *image = read_image(fd, entry, bytes);
    close(fd);
    if (!image) GB_DEBUG("%s is damaged or not ours: the kernels are compiled again", path);
    return image;
}

/* Waits for a process that compiles the same.  Without a lock this one compiles too, which is only slower. */
static void lock(struct gb_cache_entry *entry)
{
    char path[PATH_BYTES];
    if (make_dir(entry->dir) != 0) {
        cannot_keep(entry, "making");
        return;
    }
    path_of(entry, ".lock", path);
    entry->lock_fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (entry->lock_fd < 0) {
        cannot_keep(entry, "a lock in");
        return;
    }
    const uint64_t start = gb_now_ns();
    while (flock(entry->lock_fd, LOCK_EX | LOCK_NB) != 0) {
        struct timespec pause = {.tv_nsec = LOCK_PAUSE_NS};
        if (errno != EWOULDBLOCK && errno != EINTR) break; /* a file system without locks */
        if (gb_now_ns() - start > LOCK_NS) break;
        nanosleep(&pause, NULL);
    }
}

int gb_cache_load(struct gb_cache_entry *entry, char **image, size_t *bytes)
{
    if (!entry->dir[0]) return GPUBRIDGE_AGAIN;
    *image = find(entry, bytes);
    if (*image) return 0;
    lock(entry);
    if (entry->lock_fd < 0) return GPUBRIDGE_AGAIN;
    *image = find(entry, bytes); /* somebody else may have compiled it meanwhile */
    return *image ? 0 : GPUBRIDGE_AGAIN;
}

static int write_entry(const struct gb_cache_entry *entry, const char *path, const char *image, size_t bytes)
{
    struct head head = {.bytes = bytes};
    memcpy(head.magic, magic, sizeof magic);
    memcpy(head.key, entry->key, sizeof head.key);
    checksum(image, bytes, head.sum);
    (void)unlink(path); /* left behind by a process of this number that died */
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0) return -1;
    int bad = write_all(fd, &head, sizeof head) || write_all(fd, image, bytes);
    return close(fd) || bad ? -1 : 0;
}

void gb_cache_store(struct gb_cache_entry *entry, const char *image, size_t bytes)
{
    char end[32], temporary[PATH_BYTES], path[PATH_BYTES];
    if (!entry->dir[0] || entry->lock_fd < 0) return;
    snprintf(end, sizeof end, ".%d.part", (int)getpid());
    path_of(entry, end, temporary);
    path_of(entry, ".bin", path);
    if (write_entry(entry, temporary, image, bytes) == 0 && rename(temporary, path) == 0) return;
    cannot_keep(entry, "writing in");
    (void)unlink(temporary);
}

void gb_cache_entry_close(struct gb_cache_entry *entry)
{
    if (entry->lock_fd >= 0) close(entry->lock_fd); /* ends the lock */
    entry->lock_fd = -1;
}
