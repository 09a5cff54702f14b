#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# compute-sanitizer over the kernels: the device check runs each for every type and operation, in one process without torch.
#   tests/gpu/sanitize.sh [OUT_FOLDER]
set -uo pipefail
out=${1:-.}
packages=$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
export LD_LIBRARY_PATH="$packages/nvidia/cu13/lib:$packages/nvidia/cuda_nvrtc/lib:$packages/nvidia/nccl/lib:${LD_LIBRARY_PATH:-}"
# The collective library takes minutes under a sanitizer, and its kernels are not ours: that one check fails by intention.
export GPUBRIDGE_NCCL_LIB=/nonexistent/left-out
status=0
for tool in ${TOOLS:-memcheck racecheck initcheck synccheck}; do
    # initcheck also sees what the driver copies for itself: only kernels are of interest.
    compute-sanitizer --tool "$tool" --report-api-errors no --error-exitcode 9 --log-file "$out/sanitizer-$tool.log" \
        python3 -c 'from gpubridge.cli import main; main()' doctor --device --kind cuda --out "$out/sanitizer-$tool.json" >/dev/null
    code=$?
    failed=$(python3 -c 'import json, sys
print(*(c["check"] for c in json.load(open(sys.argv[1]))["checks"] if not c["ok"]))' "$out/sanitizer-$tool.json")
    echo "$tool: exit $code, failed checks: $failed, $(tail -n 1 "$out/sanitizer-$tool.log" | tr -d '=')"
    [ "$code" != 9 ] && [ "$failed" = collectives ] || status=1
done
exit "$status"
