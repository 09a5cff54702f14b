/* SPDX-License-Identifier: Apache-2.0
 * Prints a table of the library for tools/gen_docs.py, fields separated by tabs; not installed.
 *   doc-tables settings    name, type, default, scope, agreed, per_rank, number of words that work (0: all), help
 *   doc-tables operations  head: reduce ops; then dtype, bytes, bytes of the accumulator, 1 or 0 for each op */
#include "base/config.h"
#include "codec/reduce.h"

#include <stdio.h>
#include <string.h>

static void print_settings(void)
{
    const struct gb_setting *row;
    for (int i = 0; (row = gb_settings_row(i)) != NULL; i++)
        printf("%s\t%s\t%s\t%s\t%d\t%d\t%d\t%s\n", row->name, row->type, row->value,
               row->scope == GB_SCOPE_COMM ? "group" : "process", row->agreed, row->per_rank, row->built, row->help);
}

static void print_operations(void)
{
    printf("dtype\tbytes\taccumulator");
    for (int op = 0; op < GPUBRIDGE_REDUCE_OP_COUNT; op++) printf("\t%s", gb_reduce_op_name(op));
    for (int dtype = 0; dtype < GPUBRIDGE_DTYPE_COUNT; dtype++) {
        printf("\n%s\t%zu\t%zu", gb_dtype_name(dtype), gb_dtype_bytes(dtype), gb_acc_bytes(dtype));
        for (int op = 0; op < GPUBRIDGE_REDUCE_OP_COUNT; op++) printf("\t%d", gb_reduce_supported(dtype, op));
    }
    printf("\n");
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "settings") == 0)
        print_settings();
    else if (argc == 2 && strcmp(argv[1], "operations") == 0)
        print_operations();
    else
        return 2;
    return 0;
}
