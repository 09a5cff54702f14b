/* SPDX-License-Identifier: Apache-2.0
 * A link that delivers wrong bytes is found while the comm is made, and named.  The wrong byte is made by the fault
 * transport below the frames; checksums are off, or they would find it first (which the second case shows). */
#include "ranks.h"

#include <string.h>

/* The receiver of the wrong byte says `words`; the other end may only see that it hangs up. */
static void expect_refusal(struct rank *rank, const char *words)
{
    rank_open(rank);
    gpubridge_comm *comm = NULL;
    int rc = rank_try_comm(rank, "world", NULL, 0, &comm);
    EXPECT(rc != 0 && !comm, "the comm was made over a link that corrupts bytes");
    if (strstr(gpubridge_last_error(), words)) rank_words(rank)[rank->rank] = 1;
    EXPECT(strstr(gpubridge_last_error(), rank->rank ? "rank 0" : "rank 1"), "the error does not name the other rank");
    gpubridge_context_destroy(rank->context);
    rank_meet(rank);
    EXPECT(rank_words(rank)[0] || rank_words(rank)[1], "no rank's error says '%s'", words);
}

static void self_test_finds_it(struct rank *rank)
{
    expect_refusal(rank, "self-test: the link from");
}

static void checksum_finds_it(struct rank *rank)
{
    expect_refusal(rank, "damaged");
}

int main(void)
{
    static const char *const ab[] = {"a", "b"};
    /* Offset 5,000 of the first bulk lane lies in the payload of the first granted message (64-byte headers). */
    int failed = ranks_run(2, ab, "GPUBRIDGE_CHECKSUM=off\nGPUBRIDGE_LANES=1\nGPUBRIDGE_FAULT=bulk0:corrupt@5000\n", 60,
                           self_test_finds_it, "self-test");
    failed += ranks_run(2, ab, "GPUBRIDGE_CHECKSUM=on\nGPUBRIDGE_LANES=1\nGPUBRIDGE_FAULT=bulk0:corrupt@5000\n", 60,
                        checksum_finds_it, "checksum");
    printf("%s\n", failed ? "FAILED" : "ok");
    return failed != 0;
}
