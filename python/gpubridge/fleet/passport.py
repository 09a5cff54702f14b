# SPDX-License-Identifier: Apache-2.0
"""Device passports: how fast each device was in earlier jobs, relative to its class, kept in the user's cache.

A device that was slow before is a slow part, not a degradation; one that was not slow before and is now, is news.
The file is JSON with a version; a file of another version, or a damaged one, is put aside and begun anew.
"""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

VERSION = 1
MOST_JOBS = 32  # an average over about so many jobs
CHANGED = 0.06  # relative; beyond this a device is not what it was
LOTTERY = 0.04


@dataclass
class Passport:
    """One device: identity, and its time relative to its class (1.0: as the others), averaged over jobs."""

    uuid: str
    model: str
    host: str
    ratio: float
    jobs: int
    updated: str


def default_path() -> Path:
    """$XDG_CACHE_HOME/gpubridge/passports.json, else below ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "gpubridge" / "passports.json"


class Passports:
    """The devices known on this account.  One process writes at a time; the last writer wins as a whole.

    Args:
        path: the file; None: default_path().
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = default_path() if path is None else path
        self.devices: dict[str, Passport] = {}
        self.note = ""
        if self.path.exists():
            self._load()

    def _load(self) -> None:
        try:
            data = json.loads(self.path.read_text())
            if data["version"] != VERSION:
                raise ValueError(f"version {data['version']}, this package knows {VERSION}")
            for entry in data["devices"]:
                device = Passport(**entry)
                if not (math.isfinite(device.ratio) and 0.01 < device.ratio < 100 and device.jobs >= 1):
                    raise ValueError(f"device {device.uuid} has ratio {device.ratio} over {device.jobs} jobs")
                self.devices[device.uuid] = device
        except (ValueError, KeyError, TypeError, json.JSONDecodeError) as error:
            aside = self.path.with_suffix(".old.json")
            os.replace(self.path, aside)
            self.devices = {}
            self.note = f"{self.path} could not be used ({error}); it is kept as {aside}"

    def record(self, uuid: str, model: str, host: str, ratio: float) -> None:
        """One job's ratio of a device to its class; a device that moved to another host keeps its passport.

        Raises:
            ValueError: the ratio is not a positive number.
        """
        if not (math.isfinite(ratio) and ratio > 0):
            raise ValueError(f"device {uuid}: ratio {ratio}")
        today = time.strftime("%Y-%m-%d", time.gmtime())
        known = self.devices.get(uuid)
        if known is None or known.model != model:
            self.devices[uuid] = Passport(uuid, model, host, ratio, 1, today)
            return
        jobs = min(known.jobs + 1, MOST_JOBS)
        mean = math.log(known.ratio) + (math.log(ratio) - math.log(known.ratio)) / jobs
        self.devices[uuid] = Passport(uuid, model, host, math.exp(mean), jobs, today)

    def judge(self, uuid: str, ratio: float) -> str:
        """What a ratio measured now says about a device: "unknown device", "as before", "slow part as before",
        "slower than
        in earlier jobs" or "faster than in earlier jobs"."""
        known = self.devices.get(uuid)
        if known is None:
            return "unknown device"
        change = ratio / known.ratio
        if change > 1 + CHANGED:
            return "slower than in earlier jobs"
        if change < 1 / (1 + CHANGED):
            return "faster than in earlier jobs"
        return "slow part as before" if known.ratio > 1 + 1.5 * LOTTERY else "as before"

    def save(self) -> None:
        """Writes the file as a whole, readable by its owner."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        data = {"version": VERSION, "devices": [asdict(d) for d in self.devices.values()]}
        temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(data, indent=1) + "\n")
        os.chmod(temporary, 0o600)
        os.replace(temporary, self.path)
