/* SPDX-License-Identifier: Apache-2.0
 * Finds the kernels in preprocessed source text and writes the calling code around them.  Not a C parser: it relies on
 * "__gbemu_kernel__ ... name(parameters) {" with a named parameter each, which every GPU compiler wants too.  */
#include "twin.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_PARAMS 24
#define MAX_TWINS  256

struct out {
    char *text;
    size_t size, room;
};
struct kernel {
    char name[128];
    int count;
    char decl[MAX_PARAMS][160]; /* the parameter as written */
    char param[MAX_PARAMS][64]; /* its name */
};

static const char prelude[] =
    "typedef void emu_twin_fn(void *const *args, const unsigned *dims, void *(*alias)(const void *));\n"
    "struct emu_twin { const char *name; unsigned count; const unsigned *sizes; emu_twin_fn *run; };\n"
    "struct emu_twin_source { unsigned long long hash; __SIZE_TYPE__ length; const struct emu_twin *twins; };\n"
    "struct gbemu_dim { unsigned x, y, z; };\n"
    "static __thread struct gbemu_dim threadIdx, blockIdx, gridDim, blockDim;\n"
    /* Classes 5 and 12 are pointers and structs: their words may be device addresses. */
    "static void gbemu_take(void *to, const void *from, unsigned n, int type, void *(*alias)(const void *))\n"
    "{\n"
    "    unsigned i;\n"
    "    __builtin_memcpy(to, from, n);\n"
    "    if (type != 5 && type != 12) return;\n"
    "    for (i = 0; i + sizeof(void *) <= n; i += sizeof(void *)) {\n"
    "        void *p;\n"
    "        __builtin_memcpy(&p, (char *)to + i, sizeof p);\n"
    "        p = alias(p);\n"
    "        __builtin_memcpy((char *)to + i, &p, sizeof p);\n"
    "    }\n"
    "}\n"
    "static void gbemu_block(const unsigned *d)\n"
    "{\n"
    "    blockIdx.x = d[0], blockIdx.y = d[1], blockIdx.z = d[2];\n"
    "    gridDim.x = d[3], gridDim.y = d[4], gridDim.z = d[5];\n"
    "    blockDim.x = d[6], blockDim.y = d[7], blockDim.z = d[8];\n"
    "    (void)threadIdx;\n"
    "}\n"
    "#define __gbemu_kernel__ __attribute__((unused, visibility(\"hidden\")))\n";

static void put(struct out *o, const char *fmt, ...)
{
    for (;;) {
        va_list ap;
        va_start(ap, fmt);
        size_t left = o->room - o->size;
        int n = vsnprintf(o->text ? o->text + o->size : NULL, left, fmt, ap);
        va_end(ap);
        if (n >= 0 && (size_t)n < left) {
            o->size += (size_t)n;
            return;
        }
        o->room = o->room * 2 + (size_t)(n > 0 ? n : 0) + 4096;
        o->text = realloc(o->text, o->room);
        if (!o->text) abort();
    }
}

unsigned long long emu_twin_hash(const char *text, size_t length)
{
    unsigned long long h = 14695981039346656037u;
    for (size_t i = 0; i < length; i++) h = (h ^ (unsigned char)text[i]) * 1099511628211u;
    return h;
}

static bool is_word(char c)
{
    return isalnum((unsigned char)c) || c == '_';
}

/* End of the identifier-like run before `end` (exclusive), after white space; sets where it begins. */
static const char *last_word(const char *begin, const char *end, const char **word)
{
    while (end > begin && isspace((unsigned char)end[-1])) end--;
    const char *w = end;
    while (w > begin && is_word(w[-1])) w--;
    *word = w;
    return end;
}

static const char *closing(const char *p)
{
    int depth = 0;
    for (; *p; p++) {
        if (*p == '(') depth++;
        if (*p == ')' && --depth == 0) return p;
    }
    return NULL;
}

static bool take_param(struct kernel *k, const char *begin, const char *end)
{
    const char *word;
    const char *stop = last_word(begin, end, &word);
    if (word == stop || isdigit((unsigned char)*word) || k->count == MAX_PARAMS) return false;
    while (begin < end && isspace((unsigned char)*begin)) begin++;
    snprintf(k->decl[k->count], sizeof k->decl[0], "%.*s", (int)(stop - begin), begin);
    snprintf(k->param[k->count], sizeof k->param[0], "%.*s", (int)(stop - word), word);
    k->count++;
    return true;
}

/* `open` and `close` are the parameter list's parentheses. */
static bool take_params(struct kernel *k, const char *open, const char *close)
{
    const char *p = open + 1;
    while (p < close && isspace((unsigned char)*p)) p++;
    if (p == close || (!strncmp(p, "void", 4) && strspn(p + 4, " \t\n") == (size_t)(close - p - 4))) return true;
    for (const char *q = p; q <= close; q++)
        if (q == close || *q == ',') {
            if (!take_param(k, p, q)) return false;
            p = q + 1;
        }
    return true;
}

/* Reads one kernel after the marker at `p`.  1: a definition, 0: only a declaration, -1: not readable. */
static int read_kernel(const char *p, struct kernel *k)
{
    for (;;) {
        const char *open = strchr(p, '(');
        const char *close = open ? closing(open) : NULL;
        const char *word;
        if (!close) return -1;
        const char *stop = last_word(p, open, &word);
        size_t n = (size_t)(stop - word);
        /* __launch_bounds__(256), __attribute__((...)), and GB_KERNEL's own are not the name. */
        if (n >= 2 && !strncmp(word, "__", 2)) {
            p = close + 1;
            continue;
        }
        if (n == 0 || n >= sizeof k->name) return -1;
        memset(k, 0, sizeof *k);
        memcpy(k->name, word, n);
        if (!take_params(k, open, close)) return -1;
        return close[1 + strspn(close + 1, " \t\r\n")] == '{';
    }
}

static void put_kernel(struct out *o, const struct kernel *k)
{
    put(o, "struct gbemu_args_%s {\n", k->name);
    for (int i = 0; i < k->count; i++) put(o, "    %s;\n", k->decl[i]);
    put(o, "    char gbemu_end;\n};\nstatic const unsigned gbemu_sizes_%s[] = {\n", k->name);
    for (int i = 0; i < k->count; i++) put(o, "    sizeof(((struct gbemu_args_%s *)0)->%s),\n", k->name, k->param[i]);
    put(o,
        "    0};\nstatic void gbemu_run_%s(void *const *args, const unsigned *dims, void *(*alias)(const void *))\n{\n",
        k->name);
    /* Bytes first: a const member would forbid the struct itself in C++. */
    put(o,
        "    __attribute__((aligned(16))) char room[sizeof(struct gbemu_args_%s)];\n"
        "    struct gbemu_args_%s *a = (struct gbemu_args_%s *)(void *)room;\n"
        "    (void)args, (void)alias, (void)gbemu_take;\n    gbemu_block(dims);\n",
        k->name, k->name, k->name);
    for (int i = 0; i < k->count; i++)
        put(o, "    gbemu_take((void *)&a->%s, args[%d], sizeof a->%s, __builtin_classify_type(a->%s), alias);\n",
            k->param[i], i, k->param[i], k->param[i]);
    put(o,
        "    for (threadIdx.z = 0; threadIdx.z < blockDim.z; threadIdx.z++)\n"
        "        for (threadIdx.y = 0; threadIdx.y < blockDim.y; threadIdx.y++)\n"
        "            for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++)\n"
        "                %s(",
        k->name);
    for (int i = 0; i < k->count; i++) put(o, "%sa->%s", i ? ", " : "", k->param[i]);
    put(o, ");\n}\n");
}

static void put_table(struct out *o, const struct kernel *k, int count, const char *id, unsigned long long hash,
                      size_t length)
{
    if (id)
        put(o, "static const struct emu_twin gbemu_twins[] = {\n");
    else
        put(o, "#ifdef __cplusplus\nextern \"C\"\n#endif\n__attribute__((visibility(\"default\")))\n"
               "const struct emu_twin gbemu_twins[] = {\n");
    for (int i = 0; i < count; i++)
        put(o, "    {\"%s\", %d, gbemu_sizes_%s, gbemu_run_%s},\n", k[i].name, k[i].count, k[i].name, k[i].name);
    put(o, "    {0, 0, 0, 0}};\n");
    if (id)
        put(o,
            "extern const struct emu_twin_source emu_twin_source_%s;\n"
            "const struct emu_twin_source emu_twin_source_%s = {%lluu, %zuu, gbemu_twins};\n",
            id, id, hash, length);
}

char *emu_twin_generate(const char *source, const char *id, unsigned long long hash, size_t length, char *why,
                        size_t why_size)
{
    static const char marker[] = "__gbemu_kernel__";
    struct kernel *k = calloc(MAX_TWINS, sizeof *k);
    struct out o = {0};
    int count = 0;
    if (!k) abort();
    put(&o, "%s%s\n", prelude, source);
    for (const char *p = source; (p = strstr(p, marker)) != NULL;) {
        p += sizeof marker - 1;
        int got = count < MAX_TWINS ? read_kernel(p, &k[count]) : -1;
        if (got < 0) {
            snprintf(why, why_size, "cannot read the kernel at \"%.40s\"", p);
            free(o.text);
            free(k);
            return NULL;
        }
        if (got) put_kernel(&o, &k[count++]);
    }
    put_table(&o, k, count, id, hash, length);
    free(k);
    return o.text;
}
