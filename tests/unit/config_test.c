/* SPDX-License-Identifier: Apache-2.0
 * The settings table: every row parses its own default, every bad value is refused by name, lists pick by local rank.
 */
#include "base/config.h"
#include "base/log.h"
#include "base/status.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
/* cmocka needs the four headers above first */
#include <cmocka.h>

extern char **environ;

static char log_lines[2048];

static void collect(void *arg, int level, const char *line)
{
    (void)arg;
    (void)level;
    size_t n = strlen(log_lines);
    snprintf(log_lines + n, sizeof log_lines - n, "%s\n", line);
}

static int clean_environment(void **state)
{
    (void)state;
    for (char **entry = environ; *entry;) {
        char name[128];
        snprintf(name, sizeof name, "%.*s", (int)strcspn(*entry, "="), *entry);
        if (strncmp(name, "GPUBRIDGE_", 10) == 0 && unsetenv(name) == 0)
            entry = environ; /* unsetenv moves the rest */
        else
            entry++;
    }
    log_lines[0] = 0;
    return 0;
}

static struct gb_settings loaded(const char *overrides, int local_rank)
{
    struct gb_settings settings;
    int status = gb_settings_load(overrides, local_rank, &settings);
    if (status != 0) fail_msg("%s", gb_err_text());
    return settings;
}

static void refused(const char *overrides, int local_rank, int status, const char *words)
{
    struct gb_settings settings = {.lanes = 77};
    assert_int_equal(gb_settings_load(overrides, local_rank, &settings), status);
    if (!strstr(gb_err_text(), words)) fail_msg("\"%s\" does not say \"%s\"", gb_err_text(), words);
    assert_int_equal(settings.lanes, 77); /* outputs are written only on success */
}

static void test_defaults(void **state)
{
    (void)state;
    struct gb_settings s = loaded(NULL, 0);
    assert_int_equal(s.emulate, GB_EMULATE_NONE);
    assert_int_equal(s.transport, GB_TRANSPORT_AUTO);
    assert_int_equal(s.lanes, 0);
    assert_int_equal(s.chunk_bytes, 0);
    assert_true(s.flat_bytes == GB_FLAT_BYTES_AUTO);
    assert_true(s.spin_ns == GB_SPIN_NS_AUTO);
    assert_int_equal(s.mem_bytes, 1024 * 1024 * 1024);
    assert_int_equal(s.peer_timeout_ns, 3000000000);
    assert_int_equal(s.log, GB_LOG_WARN);
    assert_int_equal(s.checksum, GB_CHECKSUM_AUTO);
    assert_int_equal(s.self_test, 1);
    assert_int_equal(s.port_range[1], 0);
    assert_string_equal(s.island, "");
    assert_string_equal(log_lines, "");
}

static void test_rows_are_complete(void **state)
{
    (void)state;
    int count = 0;
    for (const struct gb_setting *row; (row = gb_settings_row(count)); count++) {
        char line[200];
        assert_int_equal(strncmp(row->name, "GPUBRIDGE_", 10), 0);
        assert_true(strlen(row->help) > 20 && row->size > 0);
        snprintf(line, sizeof line, "%s=%s", row->name, row->value);
        (void)loaded(line, 0);
        for (int other = 0; other < count; other++) {
            assert_string_not_equal(row->name, gb_settings_row(other)->name);
            assert_true(row->offset != gb_settings_row(other)->offset);
        }
    }
    assert_true(count >= 30);
    assert_null(gb_settings_row(-1));
}

static void test_environment_then_overrides(void **state)
{
    (void)state;
    setenv("GPUBRIDGE_LANES", "6", 1);
    setenv("GPUBRIDGE_CHUNK_BYTES", "256K", 1);
    setenv("GPUBRIDGE_LOG", "", 1); /* set but empty: the default */
    struct gb_settings s = loaded(NULL, 0);
    assert_int_equal(s.lanes, 6);
    assert_int_equal(s.chunk_bytes, 256 * 1024);
    assert_int_equal(s.log, GB_LOG_WARN);
    s = loaded("GPUBRIDGE_LANES=2\n\n  GPUBRIDGE_IFNAME=^lo,docker \nGPUBRIDGE_CHUNK_BYTES=\n", 0);
    assert_int_equal(s.lanes, 2);
    assert_int_equal(s.chunk_bytes, 0);
    assert_string_equal(s.ifname, "^lo,docker");
}

static void test_numbers(void **state)
{
    (void)state;
    assert_int_equal(loaded("GPUBRIDGE_CHUNK_BYTES=4096", 0).chunk_bytes, 4096);
    assert_int_equal(loaded("GPUBRIDGE_CHUNK_BYTES=1.5M", 0).chunk_bytes, 3 * 512 * 1024);
    assert_int_equal(loaded("GPUBRIDGE_CHUNK_BYTES=2MiB", 0).chunk_bytes, 2 * 1024 * 1024);
    assert_int_equal(loaded("GPUBRIDGE_FLAT_BYTES=0", 0).flat_bytes, 0);
    char agreed[GB_SETTINGS_AGREED_BYTES];
    struct gb_settings seeded = loaded("GPUBRIDGE_COMPRESSION_SEED=7", 0), plain = loaded(NULL, 0);
    gb_settings_agreed_text(&seeded, agreed);
    assert_non_null(strstr(agreed, " compression_seed=7 "));
    gb_settings_agreed_text(&plain, agreed);
    assert_non_null(strstr(agreed, " compression_seed=off "));
    assert_int_equal(loaded("GPUBRIDGE_PEER_TIMEOUT_S=0.5", 0).peer_timeout_ns, 500000000);
    assert_int_equal(loaded("GPUBRIDGE_SPIN_US=30", 0).spin_ns, 30000);
    assert_int_equal(loaded("GPUBRIDGE_PORT_RANGE=29600-29663", 0).port_range[1], 29663);
    refused("GPUBRIDGE_CHUNK_BYTES=1", 0, GPUBRIDGE_ERR_SETTING, "GPUBRIDGE_CHUNK_BYTES=1: out of range 4096 to");
    refused("GPUBRIDGE_CHUNK_BYTES=99999999999999999999999", 0, GPUBRIDGE_ERR_SETTING, "out of range");
    refused("GPUBRIDGE_CHUNK_BYTES=-4096", 0, GPUBRIDGE_ERR_SETTING, "not a number");
    refused("GPUBRIDGE_CHUNK_BYTES=4096x", 0, GPUBRIDGE_ERR_SETTING, "not a number");
    refused("GPUBRIDGE_MEM_BYTES=auto", 0, GPUBRIDGE_ERR_SETTING, "GPUBRIDGE_MEM_BYTES=auto");
    refused("GPUBRIDGE_LANES=0", 0, GPUBRIDGE_ERR_SETTING, "legal: 1 to 64, or auto");
    refused("GPUBRIDGE_PEER_TIMEOUT_S=0", 0, GPUBRIDGE_ERR_SETTING, "out of range 0.1 to 3600");
    assert_true(loaded(NULL, 0).compression_seed == GB_SEED_OFF);
    assert_true(loaded("GPUBRIDGE_COMPRESSION_SEED=0", 0).compression_seed == 0);
    assert_true(loaded("GPUBRIDGE_COMPRESSION_SEED=4294967295", 0).compression_seed == UINT32_MAX);
    assert_true(loaded("GPUBRIDGE_COMPRESSION_SEED=off", 0).compression_seed == GB_SEED_OFF);
    refused("GPUBRIDGE_COMPRESSION_SEED=auto", 0, GPUBRIDGE_ERR_SETTING, "legal: 0 to 4294967295, or off");
    refused("GPUBRIDGE_COMPRESSION_SEED=4294967296", 0, GPUBRIDGE_ERR_SETTING, "out of range");
    refused("GPUBRIDGE_PORT_RANGE=5-4", 0, GPUBRIDGE_ERR_SETTING, "GPUBRIDGE_PORT_RANGE=5-4");
    refused("GPUBRIDGE_PORT_RANGE=29600", 0, GPUBRIDGE_ERR_SETTING, "29600-29663");
    refused("GPUBRIDGE_PORT_RANGE=1-99999", 0, GPUBRIDGE_ERR_SETTING, "1 to 65535");
}

static void test_words(void **state)
{
    (void)state;
    char word[16];
    assert_int_equal(loaded("GPUBRIDGE_GATE=off", 0).gate, GB_GATE_OFF);
    assert_int_equal(loaded("GPUBRIDGE_POLL=event", 0).poll, GB_POLL_EVENT);
    assert_int_equal(loaded("GPUBRIDGE_ISLAND_BY=host", 0).island_by, GB_ISLAND_BY_HOST);
    assert_int_equal(loaded("GPUBRIDGE_LOG=trace", 0).log, GB_LOG_TRACE);
    gb_settings_word("GPUBRIDGE_TRANSPORT", loaded("GPUBRIDGE_TRANSPORT=tcp", 0).transport, word, sizeof word);
    assert_string_equal(word, "tcp");
    refused("GPUBRIDGE_GATE=maybe", 0, GPUBRIDGE_ERR_SETTING, "GPUBRIDGE_GATE=maybe: not a word it knows; legal: auto");
    refused("GPUBRIDGE_GATE=aut", 0, GPUBRIDGE_ERR_SETTING, "GPUBRIDGE_GATE=aut");
    refused("GPUBRIDGE_COMPRESSION=fp9", 0, GPUBRIDGE_ERR_SETTING, "fp8_e5m2");
}

/* What this version lacks is refused, never taken for something else. */
static void test_not_built(void **state)
{
    (void)state;
    for (int i = 0; gb_settings_row(i); i++) {
        const struct gb_setting *row = gb_settings_row(i);
        char line[96], word[16], last[16] = "";
        if (!row->built) continue;
        for (int w = 0;; w++) {
            gb_settings_word(row->name, w, word, sizeof word);
            if (strcmp(word, "?") == 0) break;
            strcpy(last, word);
        }
        snprintf(line, sizeof line, "%s=%s", row->name, last);
        refused(line, 0, GPUBRIDGE_ERR_UNSUPPORTED, "is not part of this version; it has:");
    }
}

static void test_lists(void **state)
{
    (void)state;
    setenv("GPUBRIDGE_EMULATE", "cuda, cuda,hip,hip", 1);
    setenv("GPUBRIDGE_ISLAND", "left,right,left,right", 1);
    assert_int_equal(loaded(NULL, 1).emulate, GB_EMULATE_CUDA);
    assert_int_equal(loaded(NULL, 2).emulate, GB_EMULATE_HIP);
    assert_string_equal(loaded(NULL, 3).island, "right");
    refused(NULL, 4, GPUBRIDGE_ERR_SETTING, "has 4 entries, but this process has local rank 4");
    refused(NULL, -1, GPUBRIDGE_ERR_SETTING, "local rank -1");
    setenv("GPUBRIDGE_EMULATE", "hip", 1);
    setenv("GPUBRIDGE_ISLAND", "one", 1);
    assert_int_equal(loaded(NULL, 12).emulate, GB_EMULATE_HIP);
    refused("GPUBRIDGE_EMULATE=cuda,,hip", 1, GPUBRIDGE_ERR_SETTING, "empty entry");
    refused("GPUBRIDGE_EMULATE=cuda,rocm", 1, GPUBRIDGE_ERR_SETTING, "GPUBRIDGE_EMULATE=rocm");
}

static void test_unknown_names(void **state)
{
    (void)state;
    gb_log_set_sink(collect, NULL);
    setenv("GPUBRIDGE_TRANSPROT", "tcp", 1);
    setenv("GPUBRIDGE_LIBRARY", "/lib/libgpubridge.so", 1);
    (void)loaded(NULL, 0);
    gb_log_set_sink(NULL, NULL);
    unsetenv("GPUBRIDGE_LIBRARY");
    assert_non_null(strstr(log_lines, "GPUBRIDGE_TRANSPROT"));
    assert_non_null(strstr(log_lines, "did you mean GPUBRIDGE_TRANSPORT?"));
    assert_ptr_equal(strchr(log_lines, '\n'), log_lines + strlen(log_lines) - 1); /* one line */
    refused("GPUBRIDGE_LANE=3", 0, GPUBRIDGE_ERR_SETTING, "did you mean GPUBRIDGE_LANES?");
    refused("GPUBRIDGE_LANES", 0, GPUBRIDGE_ERR_SETTING, "not NAME=value");
}

static void test_text_limits(void **state)
{
    (void)state;
    char line[300];
    memset(line, 'x', sizeof line);
    memcpy(line, "GPUBRIDGE_ISLAND=", 17);
    line[17 + 63] = 0;
    assert_int_equal(strlen(loaded(line, 0).island), 63);
    line[17 + 63] = 'x';
    line[17 + 64] = 0;
    refused(line, 0, GPUBRIDGE_ERR_SETTING, "longer than 63 bytes");
}

static void test_comm_scope(void **state)
{
    (void)state;
    struct gb_settings base = loaded("GPUBRIDGE_LANES=3", 0), comm;
    assert_int_equal(gb_settings_load_comm(&base, "GPUBRIDGE_CHUNK_BYTES=64K", &comm), 0);
    assert_int_equal(comm.chunk_bytes, 65536);
    assert_int_equal(comm.lanes, 3);
    assert_int_equal(gb_settings_load_comm(&base, "GPUBRIDGE_LANES=4", &comm), GPUBRIDGE_ERR_SETTING);
    assert_non_null(strstr(gb_err_text(), "belongs to the process"));
    assert_int_equal(gb_settings_load_comm(&base, NULL, &comm), 0);
    assert_int_equal(comm.chunk_bytes, 0);
}

static void test_agreed(void **state)
{
    (void)state;
    char a[GB_SETTINGS_AGREED_BYTES], b[GB_SETTINGS_AGREED_BYTES], words[200];
    struct gb_settings x = loaded("GPUBRIDGE_CHUNK_BYTES=64K", 0), y = loaded("GPUBRIDGE_CHUNK_BYTES=65536", 1);
    struct gb_settings z = loaded("GPUBRIDGE_CHUNK_BYTES=128K", 0), local = loaded("GPUBRIDGE_CHUNK_BYTES=64K\n"
                                                                                   "GPUBRIDGE_WORKERS=9",
                                                                                   0);
    assert_true(gb_settings_agreed_hash(&x) == gb_settings_agreed_hash(&y));
    assert_true(gb_settings_agreed_hash(&x) == gb_settings_agreed_hash(&local));
    assert_true(gb_settings_agreed_hash(&x) != gb_settings_agreed_hash(&z));
    gb_settings_agreed_text(&x, a);
    gb_settings_agreed_text(&z, b);
    gb_settings_agreed_diff(a, b, sizeof b, words, sizeof words);
    assert_non_null(strstr(words, "GPUBRIDGE_CHUNK_BYTES is 65536 here and 131072 there"));
    gb_settings_agreed_diff(a, a, sizeof a, words, sizeof words);
    assert_non_null(strstr(words, "equal"));
    gb_settings_agreed_diff(a, "\xff\x01", 2, words, sizeof words);
    assert_non_null(strstr(words, "versions differ"));
    for (size_t n = 0; n < sizeof b; n++) gb_settings_agreed_diff(a, b, n, words, sizeof words); /* cut anywhere */
}

static void test_longest_agreed_text_fits(void **state)
{
    (void)state;
    char text[GB_SETTINGS_AGREED_BYTES];
    struct gb_settings s = loaded(NULL, 0);
    s.chunk_bytes = s.compression_min_bytes = s.flat_bytes = UINT64_MAX - 1;
    s.lanes = UINT32_MAX;
    s.compression = GB_COMPRESSION_FP8_E5M2;
    s.compression_dtypes = GB_COMPRESSION_HALF;
    s.compression_seed = UINT32_MAX;
    gb_settings_agreed_text(&s, text);
    assert_true(strlen(text) < GB_SETTINGS_AGREED_BYTES - 1);
    assert_non_null(strstr(text, "self_test=on"));
}

static void test_status_words(void **state)
{
    (void)state;
    assert_string_equal(gb_status_text(GPUBRIDGE_OK), "ok");
    assert_string_equal(gb_status_text(GPUBRIDGE_ERR_PEER_LOST), "peer lost");
    assert_string_equal(gb_status_text(12345), "unknown status");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_defaults, clean_environment),
        cmocka_unit_test_setup(test_rows_are_complete, clean_environment),
        cmocka_unit_test_setup(test_environment_then_overrides, clean_environment),
        cmocka_unit_test_setup(test_numbers, clean_environment),
        cmocka_unit_test_setup(test_words, clean_environment),
        cmocka_unit_test_setup(test_not_built, clean_environment),
        cmocka_unit_test_setup(test_lists, clean_environment),
        cmocka_unit_test_setup(test_unknown_names, clean_environment),
        cmocka_unit_test_setup(test_text_limits, clean_environment),
        cmocka_unit_test_setup(test_comm_scope, clean_environment),
        cmocka_unit_test_setup(test_agreed, clean_environment),
        cmocka_unit_test_setup(test_longest_agreed_text_fits, clean_environment),
        cmocka_unit_test(test_status_words),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
