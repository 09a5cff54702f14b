/* SPDX-License-Identifier: Apache-2.0
 * Prints the settings table, one row per line, fields separated by tabs: name, type, default, scope, agreed, per_rank,
 * number of words that work (0: all), help.  Input of tools/gen_settings_docs.py; not installed. */
#include "base/config.h"

#include <stdio.h>

int main(void)
{
    const struct gb_setting *row;
    for (int i = 0; (row = gb_settings_row(i)) != NULL; i++)
        printf("%s\t%s\t%s\t%s\t%d\t%d\t%d\t%s\n", row->name, row->type, row->value,
               row->scope == GB_SCOPE_COMM ? "group" : "process", row->agreed, row->per_rank, row->built, row->help);
    return 0;
}
