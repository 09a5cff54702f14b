/* SPDX-License-Identifier: Apache-2.0
 * Build-time program: twingen ID RAW PREPROCESSED OUT writes the CPU twins of one kernel source.  The raw text is only
 * hashed: a later compilation of the same text at run time is then recognised.  */
#include "core/twin.h"

#include <stdio.h>
#include <stdlib.h>

static char *slurp(const char *path, size_t *size)
{
    FILE *f = fopen(path, "rb");
    if (!f) return NULL;
    char *text = NULL;
    size_t n = 0, got;
    do {
        text = realloc(text, n + 65537);
        if (!text) abort();
        got = fread(text + n, 1, 65536, f);
        n += got;
    } while (got);
    fclose(f);
    text[n] = 0;
    *size = n;
    return text;
}

int main(int argc, char **argv)
{
    size_t raw_size, size;
    char why[256];
    if (argc != 5) {
        fprintf(stderr, "usage: twingen ID RAW PREPROCESSED OUT\n");
        return 2;
    }
    char *raw = slurp(argv[2], &raw_size), *text = slurp(argv[3], &size);
    if (!raw || !text) {
        fprintf(stderr, "twingen: cannot read %s\n", raw ? argv[3] : argv[2]);
        return 1;
    }
    char *out = emu_twin_generate(text, argv[1], emu_twin_hash(raw, raw_size), raw_size, why, sizeof why);
    FILE *f = out ? fopen(argv[4], "wb") : NULL;
    if (!f || fputs(out, f) < 0 || fclose(f) != 0) {
        fprintf(stderr, "twingen: %s: %s\n", argv[2], out ? "cannot write the result" : why);
        return 1;
    }
    free(raw);
    free(text);
    free(out);
    return 0;
}
