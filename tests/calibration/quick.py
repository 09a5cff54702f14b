#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One per cent of the false-alarm count, for continuous integration.

Runs the counter given as argument over every noise family of quick.json and holds the number of alarms to what a budget
of one per 25 million stream-steps allows: about one alarm a family, so at most 6 in one (probability 1e-4) and 3 to 24
in all eleven.
"""

import json
import subprocess
import sys
from pathlib import Path


def main() -> int:
    """Exit status 1 when the budget does not hold."""
    total, expected, bad = 0, 0.0, []
    for entry in json.loads((Path(__file__).parent / "quick.json").read_text()):
        for seed in entry["seeds"]:
            args = [f"{k}={v}" for k, v in entry["args"].items()] + [f"seed={seed}"]
            done = subprocess.run([sys.argv[1], *args], capture_output=True, text=True, check=True)
            r = json.loads(done.stdout)
            print(f"{r['family']:10} {r['alarms']} alarms, {r['expected']:.2f} budgeted")
            total += r["alarms"]
            expected += r["expected"]
            if r["alarms"] > 6:
                bad.append(r["family"])
    print(f"{total} alarms, {expected:.1f} budgeted")
    return 1 if bad or not 3 <= total <= 24 else 0


if __name__ == "__main__":
    raise SystemExit(main())
