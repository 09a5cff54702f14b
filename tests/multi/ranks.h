/* SPDX-License-Identifier: Apache-2.0
 *
 * ranks.h: runs a test body as N processes (ranks) that share a bootstrap area: hellos are exchanged through shared
 * memory, the way a caller without torch would do it.  A rank that fails an expectation prints why and exits with 1. */
#ifndef GB_TESTS_RANKS_H
#define GB_TESTS_RANKS_H

#include <gpubridge/gpubridge.h>
#include <stdio.h>
#include <stdlib.h>

struct ranks; /* the shared area */

struct rank {
    int rank, size;
    struct ranks *shared;
    gpubridge_context *context;
    const char *settings; /* of the context; may be changed by the body before it opens one */
};

/* `islands`: one label per rank ("a", "b", ...): sets GPUBRIDGE_ISLAND.  `extra`: more "NAME=value\n" settings, or
 * NULL. Returns how many ranks failed (exit status not 0, a signal, or over `limit_s` seconds: then all are killed). */
int ranks_run(int size, const char *const *islands, const char *extra, int limit_s, void (*body)(struct rank *),
              const char *what);
/* The same, and rank `victim` is expected to die by a signal. */
int ranks_run_victim(int size, const char *const *islands, const char *extra, int limit_s, void (*body)(struct rank *),
                     int victim, const char *what);

/* Opens the context with the islands' settings. */
void rank_open(struct rank *rank);
/* Makes a comm of `members` (ranks of the job, ascending or not; NULL: all).  Only members call it. */
gpubridge_comm *rank_comm(struct rank *rank, const char *name, const int *members, int count);
int rank_try_comm(struct rank *rank, const char *name, const int *members, int count, gpubridge_comm **comm);
/* The same, with dawdle(rank, arg) between the exchange of the hellos and the making: the others may have the comm. */
gpubridge_comm *rank_late_comm(struct rank *rank, const char *name, const int *members, int count,
                               void (*dawdle)(struct rank *rank, void *arg), void *arg);
/* All ranks of the job meet here (shared memory, not gpubridge). */
void rank_meet(struct rank *rank);
/* One word of shared memory per rank, for handing results to each other. */
uint64_t *rank_words(struct rank *rank);
double now_s(void);

#define EXPECT(cond, ...)                                                                                              \
    do {                                                                                                               \
        if (!(cond)) {                                                                                                 \
            fprintf(stderr, "%s:%d: expected %s: ", __FILE__, __LINE__, #cond);                                        \
            fprintf(stderr, __VA_ARGS__);                                                                              \
            fprintf(stderr, " [last error: %s]\n", gpubridge_last_error());                                            \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)
#define EXPECT_OK(expr)                                                                                                \
    do {                                                                                                               \
        int expect_rc_ = (expr);                                                                                       \
        EXPECT(expect_rc_ == 0, "%s gave %d", #expr, expect_rc_);                                                      \
    } while (0)

#endif
