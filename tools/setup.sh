#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Brings a fresh machine to where the library can be built and run: system packages, .venv, Meson build.  Each step has a
# stamp or a probe, so a second call does next to nothing.  Called by the Makefile.
#   tools/setup.sh system | venv | build | all (each includes the ones before it)
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/packages.sh

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# Shows what a command said only when it failed.
quietly() {
    local log status=0
    log=$(mktemp)
    "$@" >"$log" 2>&1 || status=$?
    [ "$status" = 0 ] || tail -n 100 "$log" | cut -c1-400 >&2
    rm -f "$log"
    return "$status"
}

# Quiet when everything is there: the probes are what the build uses, not the names of packages.
have_system() {
    command -v cc >/dev/null && command -v pkg-config >/dev/null &&
        pkg-config --exists libcrypto libxxhash cmocka && python3 -c 'import venv, ensurepip' 2>/dev/null
}

step_system() {
    command -v python3 >/dev/null || [ "$(id -u)" = 0 ] || die "python3 >= 3.10 is needed; install it and call make again"
    if ! have_system; then
        local line="apt-get update && apt-get install -y --no-install-recommends $GB_BUILD_PACKAGES"
        if ! command -v apt-get >/dev/null; then
            die "needs a C17 compiler, pkg-config, and the development files of OpenSSL, xxHash and cmocka (Debian names:" \
                "$GB_BUILD_PACKAGES); install them and call make again"
        fi
        [ "$(id -u)" = 0 ] || die "system packages are missing; run this, then call make again:
    sudo sh -c '$line'"
        say "installing system packages"
        DEBIAN_FRONTEND=noninteractive quietly sh -c "$line" || die "apt-get failed; the command was: $line"
        have_system || die "system packages are still missing after apt-get; needed: $GB_BUILD_PACKAGES"
    fi
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        die "python3 is $(python3 --version 2>&1 | cut -d' ' -f2), at least 3.10 is needed"
}

# The CPU build from wherever pip is set up to look; else from PyTorch's own index; else the plain release.
install_torch() {
    local pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check)
    local log=.venv/torch-install.log plain
    plain=$(sed -n 's/^\(torch==[0-9.]*\).*/\1/p' requirements-torch.txt)
    "${pip[@]}" -r requirements-torch.txt 2>"$log" ||
        "${pip[@]}" --index-url https://download.pytorch.org/whl/cpu -r requirements-torch.txt 2>>"$log" ||
        "${pip[@]}" "$plain" 2>>"$log" || { cat "$log" >&2; die "PyTorch ($plain) could not be installed"; }
}

step_venv() {
    local want base stamp=.venv/stamp
    # python3 may be .venv's own (the Makefile puts it first): a venv is made by the interpreter below it.
    base=$(python3 -c 'import os, sys; print(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))')
    want="$(cat requirements-test.txt requirements-torch.txt | cksum | cut -d' ' -f1) $("$base" -VV | tr '\n' ' ') $base"
    [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && return
    say "making .venv (PyTorch CPU and the test tools; a few minutes the first time)"
    rm -rf .venv
    "$base" -m venv .venv
    install_torch
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-test.txt ||
        die "the test tools of requirements-test.txt could not be installed"
    printf '%s' "$want" >"$stamp"
}

step_build() {
    if [ ! -f build/build.ninja ]; then
        say "configuring build/"
        quietly .venv/bin/meson setup build || die "meson setup failed"
    fi
    .venv/bin/ninja -C build -n | grep -q 'no work to do' || say "building"
    quietly .venv/bin/ninja -C build || die "the build failed"
}

# The package as a user gets it, built by its own build system; again whenever a source file is newer than the install.
step_package() {
    local stamp=.venv/stamp-package
    [ -f "$stamp" ] && [ -z "$(find src emu include python pyproject.toml meson.build meson_options.txt -newer "$stamp" \
        -type f ! -name '*.pyc' -print -quit)" ] && return
    say "installing the gpubridge package into .venv"
    touch .venv/stamp-package.new
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --force-reinstall \
        -Cbuild-dir=build-wheel . || die "the gpubridge package could not be built"
    mv .venv/stamp-package.new "$stamp"
}

export PATH="$PWD/.venv/bin:$PATH"
case "${1:-all}" in
system) step_system ;;
venv) step_system; step_venv ;;
build) step_system; step_venv; step_build ;;
all) step_system; step_venv; step_build; step_package ;;
*) die "unknown step $1" ;;
esac
