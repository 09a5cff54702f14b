#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every static check, each by name; runs them all and exits 1 if one failed.  Needs a configured build/ and .venv in PATH.
set -uo pipefail
cd "$(dirname "$0")/.."
passed=0 failed=0

check() {
    local name=$1 out
    shift
    if out=$("$@" 2>&1); then
        passed=$((passed + 1))
        echo "lint: ok      $name"
    else
        failed=$((failed + 1))
        echo "lint: FAILED  $name"
        printf '%s\n' "$out" | tail -n "${LINT_LINES:-60}"
    fi
}

c_files() { git ls-files '*.c' '*.h'; }

format_c() { c_files | xargs clang-format-19 --dry-run -Werror; }

# The vendors' emulators and the tests are held to the compilers' warnings only; clang-tidy reads the product.
tidy() {
    git ls-files 'src/*.c' | xargs -P 2 -n 4 clang-tidy-19 -p build --quiet 2>/dev/null | grep -E 'warning:|error:' && return 1
    return 0
}

# Counts and offsets are 64-bit all the way: nothing is narrowed without saying so.
narrowing() {
    git ls-files 'src/*.c' | xargs -P 2 -n 8 clang-19 -std=c17 -D_GNU_SOURCE '-DGB_VERSION=""' -Iinclude -Isrc -fsyntax-only \
        -Werror=shorten-64-to-32
}

# The public header is plain C11 and C++11, on its own.
header() {
    local h
    for h in include/gpubridge/*.h; do
        echo "#include \"$h\"" | cc -std=c11 -Wall -Wextra -pedantic -Werror -Iinclude -fsyntax-only -x c - || return 1
        echo "#include \"$h\"" | c++ -std=c++11 -Wall -Wextra -pedantic -Werror -Iinclude -fsyntax-only -x c++ - || return 1
    done
}

# Nothing of a GPU vendor or of libibverbs is linked: it is opened at run time.
needed() {
    local bad
    bad=$(ldd build/src/libgpubridge.so | grep -iE 'cuda|nvidia|nvrtc|nccl|rccl|hip|hsa|roc|ibverbs|rdma|mlx') && { echo "$bad"; return 1; }
    return 0
}

exports() {
    local bad
    bad=$(nm -D --defined-only build/src/libgpubridge.so | awk '$2 != "A" && $3 !~ /^gpubridge_/')
    [ -z "$bad" ] || { echo "$bad"; return 1; }
    nm -D --defined-only build/src/libgpubridge.so | grep ' gpubridge_abi' >/dev/null # not -q: nm would be cut off
}

# What the header declares is what the library exports.
declared() {
    diff <(grep -hoE '\bgpubridge_[a-z0-9_]+\(' include/gpubridge/*.h | tr -d '(' | sort -u) \
        <(nm -D --defined-only build/src/libgpubridge.so | awk '$2 == "T" { sub(/@.*/, "", $3); print $3 }' | sort -u)
}

# Every source says its licence in the first lines, and leaves no note to do something later.
headed() {
    local bad
    bad=$(git ls-files '*.[ch]' '*.inc' '*.py' '*.sh' '*meson.build' Makefile .ci/run | while read -r f; do
        head -n 3 "$f" | grep -q 'SPDX-License-Identifier: Apache-2.0' || echo "$f: no SPDX line"; done
        git ls-files '*.[ch]' '*.inc' '*.py' '*.sh' | grep -v '^tools/lint.sh$' | xargs grep -nE '\b(TODO|FIXME|XXX|HACK)\b')
    [ -z "$bad" ] || { echo "$bad"; return 1; }
}

check "clang-format" format_c
check "clang-tidy" tidy
check "no count is narrowed" narrowing
check "ruff check" ruff check --quiet .
check "ruff format" ruff format --check --quiet .
check "mypy" mypy --no-error-summary $(ls -d python/gpubridge tools examples/python bench tests/python tests/multi 2>/dev/null)
check "licence lines, no leftovers" headed
check "include arrows" tools/check_includes.py
check "file and function sizes" tools/check_sizes.py
check "generated docs" tools/gen_docs.py --check
ctypes() {
    python3 tools/gen_ctypes.py --check &&
        python3 tools/gen_ctypes.py include/gpubridge/fleet.h -o python/gpubridge/_fleet_abi.py --check
}
[ -f tools/gen_ctypes.py ] && check "ctypes match the headers" ctypes
check "manual page matches the header" tools/gen_man.py --check
check "public header alone in C11 and C++11" header
check "links no vendor library" needed
check "exports only gpubridge_*" exports
check "exports what the header declares" declared
echo "lint: $passed passed, $failed failed"
[ "$failed" = 0 ]
