#!/bin/sh
# A scheduler, two workers and a campaign on one machine. On many: the same commands, each where it belongs, HOST the
# scheduler's name; with GPUs one worker for each, by CUDA_VISIBLE_DEVICES. Dask carries code: trusted networks only.
set -eu
KERNEL=${KERNEL:-mykernel:attention} ADDRESS=tcp://${HOST:-127.0.0.1}:${PORT:-8786}
dask scheduler --host "${HOST:-127.0.0.1}" --port "${PORT:-8786}" --no-dashboard &
scheduler=$!
dask worker "$ADDRESS" --nthreads 1 --nworkers 2 --no-dashboard &
workers=$!
trap 'kill $workers $scheduler' EXIT
fa3verify verify "$KERNEL" --quick --scheduler "$ADDRESS" --out out
