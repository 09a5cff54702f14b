#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Compiles the GPU kernels for AMD architectures, which the run-time compiler is not here to do: kernels_amd.sh KERNELS.INC
# Skipped (77) without a clang that has the targets.
set -eu
source=$1
cc=
for candidate in clang-19 clang-20 clang-21 clang; do
    if command -v "$candidate" >/dev/null && "$candidate" --print-targets 2>/dev/null | grep -q amdgcn; then
        cc=$candidate
        break
    fi
done
if [ -z "$cc" ]; then
    echo "no clang with the amdgcn target"
    exit 77
fi
out=$(mktemp)
trap 'rm -f "$out"' EXIT
for arch in gfx906 gfx908 gfx90a gfx942 gfx1030 gfx1100 gfx1201; do
    # Assembly: linking would need lld, and adds nothing here.
    "$cc" -x hip --cuda-device-only -nogpuinc -nogpulib --no-gpu-bundle-output --offload-arch=$arch -O3 -std=c++17 \
        -ffp-contract=off -Wall -Werror -S "$source" -o "$out"
    for kernel in $(sed -n 's/^GB_KERNEL.* \(gb_[a-z_]*\)(.*/\1/p' "$source"); do
        grep -q "^$kernel:" "$out" || { echo "$arch: $kernel is missing"; exit 1; }
    done
    echo "$arch: $(grep -c '^[[:space:]]*[vs]_' "$out") instructions"
done
