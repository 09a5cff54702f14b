/* SPDX-License-Identifier: Apache-2.0
 * Exported names of the emulators' own (gbemu_*): what a test cannot say through the vendor's API.  */
#ifndef EMU_HOOKS_H
#define EMU_HOOKS_H

/* 0 none, 1 active, 2 invalidated: what the capture queries answer. */
int hook_capturing(void);

#endif
