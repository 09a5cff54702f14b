/* SPDX-License-Identifier: Apache-2.0
 * Exchange through a folder that all ranks see: rank 0 makes it, each rank writes its blob under another name and
 * renames it, so that a file that is there is whole. */
#include "exchange.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define PATH_MAX_BYTES 512
#define TIMEOUT_S      60

static int fail(const char *what, const char *path)
{
    fprintf(stderr, "all_reduce: cannot %s %s: %s\n", what, path, strerror(errno));
    return -1;
}

static int write_blob(const struct job *job, const char *name, const void *data, size_t bytes)
{
    char part[PATH_MAX_BYTES], path[PATH_MAX_BYTES];
    snprintf(part, sizeof part, "%s/.%s", job->folder, name);
    snprintf(path, sizeof path, "%s/%s", job->folder, name);
    int fd = open(part, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0) return fail("create", part);
    ssize_t n = write(fd, data, bytes);
    if (close(fd) || n != (ssize_t)bytes) return fail("write", part);
    return rename(part, path) ? fail("rename", part) : 0;
}

/* Waits for the file.  Bytes read, or -1. */
static ssize_t read_blob(const struct job *job, const char *name, void *data, size_t capacity)
{
    char path[PATH_MAX_BYTES];
    snprintf(path, sizeof path, "%s/%s", job->folder, name);
    struct timespec nap = {.tv_nsec = 2000000};
    time_t end = time(NULL) + TIMEOUT_S;
    int fd;
    while ((fd = open(path, O_RDONLY | O_CLOEXEC)) < 0) {
        if (errno != ENOENT || time(NULL) > end) return fail("read", path);
        nanosleep(&nap, NULL);
    }
    ssize_t n = read(fd, data, capacity);
    close(fd);
    return n < 0 ? fail("read", path) : n;
}

int exchange_start(struct job *job, int *argc, char ***argv)
{
    if (*argc < 4) {
        fprintf(stderr,
                "usage: %s FOLDER RANK SIZE [COUNT]\n"
                "FOLDER must not exist yet; all ranks must see it\n",
                (*argv)[0]);
        return -1;
    }
    job->folder = (*argv)[1];
    job->rank = job->local_rank = atoi((*argv)[2]);
    job->size = atoi((*argv)[3]);
    *argc -= 3;
    *argv += 3;
    if (job->rank == 0) {
        if (mkdir(job->folder, 0700)) return fail("make the folder", job->folder);
        if (getrandom(job->secret, sizeof job->secret, 0) != (ssize_t)sizeof job->secret)
            return fail("read", "random numbers");
        return write_blob(job, "secret", job->secret, sizeof job->secret);
    }
    return read_blob(job, "secret", job->secret, sizeof job->secret) == (ssize_t)sizeof job->secret ? 0 : -1;
}

int exchange_all(struct job *job, int round, const void *mine, size_t own_bytes, unsigned char (*all)[EXCHANGE_MAX],
                 size_t *bytes)
{
    char name[64];
    snprintf(name, sizeof name, "blob.%d.%d", round, job->rank);
    if (write_blob(job, name, mine, own_bytes)) return -1;
    for (int i = 0; i < job->size; i++) {
        snprintf(name, sizeof name, "blob.%d.%d", round, i);
        ssize_t n = read_blob(job, name, all[i], EXCHANGE_MAX);
        if (n < 0) return -1;
        bytes[i] = (size_t)n;
    }
    return 0;
}

void exchange_finish(struct job *job)
{
    (void)job; /* the folder stays for the user to look at */
}
