#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs a built example with four ranks in two islands: run.sh file|mpi PROGRAM [COUNT].  Exits 1 unless all succeed.
kind=$1 program=$2 count=${3:-1000003}
export GPUBRIDGE_ISLAND=a,a,b,b GPUBRIDGE_EMULATE=
if [ "$kind" = mpi ]; then
    command -v mpirun >/dev/null || { echo "no mpirun here"; exit 77; }
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    exec mpirun --oversubscribe -n 4 "$program" "$count"
fi
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
pids=
for rank in 0 1 2 3; do
    "$program" "$folder/job" $rank 4 "$count" &
    pids="$pids $!"
done
status=0
for pid in $pids; do wait "$pid" || status=1; done
exit $status
