# SPDX-License-Identifier: Apache-2.0
"""What a user may pass as `pg_options`, and the constants of deadlines.

Every setting of the library (`gpubridge settings` prints them) may be given per process by environment or per group
here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

GROUP_SETTINGS = frozenset(
    "GPUBRIDGE_" + name
    for name in (
        "ISLAND_REDUCE",
        "CHUNK_BYTES",
        "FLAT_BYTES",
        "HOST_BYTES",
        "COMPRESSION",
        "COMPRESSION_MIN_BYTES",
        "COMPRESSION_DTYPES",
        "COMPRESSION_GATHER",
        "COMPRESSION_SEED",
        "SELF_TEST",
    )
)
"""Settings that may differ between groups; all others belong to the process, which reads them with its first group."""

UNSET_TIMEOUT = timedelta(milliseconds=-1)
"""What torch puts into the options of an operation when the user gave no timeout."""


@dataclass
class Options:
    """Options of one process group.

    Attributes:
        settings: values by name, e.g. {"lanes": 4} or {"GPUBRIDGE_LANES": "4"}; they override the environment.
        device: ordinal of this process's GPU; None: the current device if the process set one, else LOCAL_RANK.
        global_ranks: filled in by the backend (the group's members as ranks of the job).
    """

    settings: dict[str, Any] = field(default_factory=dict)
    device: int | None = None
    global_ranks: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, given: Any) -> Options:
        """Reads None, an Options, a mapping of settings, or any object whose public attributes are settings."""
        if given is None:
            return cls()
        if isinstance(given, cls):
            return cls(dict(given.settings), given.device)
        if isinstance(given, Mapping):
            values = dict(given)
        else:
            values = (
                {k: v for k, v in vars(given).items() if not k.startswith("_")} if hasattr(given, "__dict__") else {}
            )
        device = values.pop("device", None)
        return cls(values, None if device is None else int(device))

    def lines(self, of_group: bool) -> bytes | None:
        """The settings as the C library reads them: "NAME=value" lines, or None when there are none.

        Args:
            of_group: those that a group may have for itself; False: those of the whole process.
        """
        rows = [(setting_name(key), value) for key, value in sorted(self.settings.items())]
        text = "\n".join(f"{name}={value}" for name, value in rows if (name in GROUP_SETTINGS) == of_group)
        return text.encode() if text else None


def setting_name(key: str) -> str:
    """ "lanes" and "GPUBRIDGE_LANES" are the same setting."""
    name = key.upper()
    return name if name.startswith("GPUBRIDGE_") else "GPUBRIDGE_" + name


def nanoseconds(timeout: timedelta | float | None, default: int) -> int:
    """Deadline in ns; None, zero and negative values (torch's ways to say "not given") give `default`."""
    if timeout is None or timeout == UNSET_TIMEOUT:
        return default
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    return int(seconds * 1e9) if seconds > 0 else default
