/* SPDX-License-Identifier: Apache-2.0
 * Words for each enum gpubridge_status.  Any thread; the strings live for ever. */
#ifndef GB_BASE_STATUS_H
#define GB_BASE_STATUS_H

/* Never NULL, also for a number that is no status. */
const char *gb_status_text(int status);

#endif
