# SPDX-License-Identifier: Apache-2.0
"""The command `gpubridge`: doctor, settings, demo, replay, analyze, simulate."""

from __future__ import annotations

import sys


def main() -> None:
    """Console entry point; expected failures end in one line on stderr and code 1."""
    from gpubridge.cli.app import app
    from gpubridge.errors import GpuBridgeError

    try:
        app()
    except GpuBridgeError as error:
        print(f"gpubridge: {error}", file=sys.stderr)
        sys.exit(1)
