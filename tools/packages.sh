# SPDX-License-Identifier: Apache-2.0
# Debian / Ubuntu packages, the one list of them.  Sourced by tools/setup.sh and .ci/run.

# To build the library and run `make demo` and `make test`.
GB_BUILD_PACKAGES="build-essential pkg-config libssl-dev libxxhash-dev libcmocka-dev python3-venv"

# What continuous integration needs beyond that: the second compiler and its sanitizers, format, lint, and another
# architecture (cross compiler and user-mode emulator).
GB_CI_PACKAGES="clang-19 clang-format-19 clang-tidy-19 libclang-rt-19-dev gcc-aarch64-linux-gnu libc6-dev-arm64-cross \
qemu-user iproute2 nftables libopenmpi-dev openmpi-bin"
