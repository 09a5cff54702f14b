/* SPDX-License-Identifier: Apache-2.0
 *
 * exchange.h: what a program must bring to bootstrap gpubridge, and no more: every rank's blob at every rank.  Two ways
 * of doing it are beside this file; a program of your own uses whatever it has. */
#ifndef EXCHANGE_H
#define EXCHANGE_H

#include <stddef.h>

#define EXCHANGE_MAX 1024 /* bytes of one blob */

struct job {
    int rank, size;
    int local_rank;           /* among the ranks of this host */
    unsigned char secret[32]; /* the same on all ranks, known to nobody else */
    const char *folder;       /* exchange_file.c */
    int finish_needed;        /* exchange_mpi.c */
};

/* Takes its own arguments from the command line.  0, or -1 with a message on stderr. */
int exchange_start(struct job *job, int *argc, char ***argv);
/* all[i]: the blob of rank i, bytes[i] its length; `round` counts the calls.  0, or -1 with a message on stderr. */
int exchange_all(struct job *job, int round, const void *mine, size_t own_bytes, unsigned char (*all)[EXCHANGE_MAX],
                 size_t *bytes);
void exchange_finish(struct job *job);

#endif
