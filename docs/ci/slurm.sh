#!/bin/sh
#SBATCH --job-name=attention --array=0-1 --gpus=1 --cpus-per-task=8 --time=01:00:00
# sbatch --parsable slurm.sh                                   one part of the campaign for each task of the array
# sbatch --dependency=afterany:JOB --array=0 slurm.sh merge    then, once: the verdict on the whole
set -eu
KERNEL=${KERNEL:-mykernel:attention}
if [ "${1:-}" = merge ]; then
    exec fa3verify merge shards --out merged --junit merged/junit.xml
fi
exec fa3verify verify "$KERNEL" --quick --shard $((SLURM_ARRAY_TASK_ID + 1))/"$SLURM_ARRAY_TASK_COUNT" --out shards
