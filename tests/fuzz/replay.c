/* SPDX-License-Identifier: Apache-2.0
 * Runs a fuzz target without a fuzzer: over every file of the folders named, over every prefix of each file, and over
 * each file with every byte changed in a few ways.  Fails only by crashing, as the fuzzer's own driver would. */
#include "fuzz.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static size_t runs;

static void run(const uint8_t *data, size_t size)
{
    /* A copy of exactly this size, so that a sanitizer sees the first byte too many. */
    uint8_t *copy = malloc(size ? size : 1);
    if (!copy) exit(1);
    memcpy(copy, data, size);
    LLVMFuzzerTestOneInput(copy, size);
    free(copy);
    runs++;
}

static int replay(const char *path)
{
    static const uint8_t changes[] = {0x01, 0x80, 0xff, 0x10};
    uint8_t data[4096];
    FILE *f = fopen(path, "rb");
    if (!f) return -1;
    size_t size = fread(data, 1, sizeof data, f);
    fclose(f);
    for (size_t n = 0; n <= size; n++) run(data, n);
    for (size_t i = 0; i < size; i++)
        for (size_t k = 0; k < sizeof changes; k++) {
            data[i] ^= changes[k];
            run(data, size);
            data[i] ^= changes[k];
        }
    return 0;
}

int main(int argc, char **argv)
{
    int files = 0;
    for (int i = 1; i < argc; i++) {
        DIR *dir = opendir(argv[i]);
        struct dirent *e;
        while (dir && (e = readdir(dir)) != NULL) {
            char path[1024];
            snprintf(path, sizeof path, "%s/%s", argv[i], e->d_name);
            if (e->d_name[0] != '.' && replay(path) == 0) files++;
        }
        if (dir) closedir(dir);
    }
    printf("%d files, %zu inputs\n", files, runs);
    return files > 0 ? 0 : 1; /* an empty corpus would test nothing */
}
