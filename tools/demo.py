#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`make demo`: the demo of the package with its report in demo-report/.  Arguments as `gpubridge demo --help` says."""

from __future__ import annotations

import sys

from gpubridge.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["demo"]
    main()
