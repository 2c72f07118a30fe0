#!/bin/bash
# The runs of the paper's tables, one array task each, on one node with 8 GPUs:
#   sbatch --array=1-23%4 examples/launch/slurm.sh /shared/runs
# A run of several nodes: sbatch --nodes=4 --array=14 examples/launch/slurm.sh /shared/runs --train.shard 8
# `grape recipes --rows` lists the numbers. A task that is preempted, or stops at its time limit, saves and is queued
# again until its run is done; one that made no progress since the last time is not.
#SBATCH --job-name=grape
#SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=64
#SBATCH --time=12:00:00 --signal=TERM@300 --requeue --open-mode=append
#SBATCH --output=grape-%A_%a.log
set -eu
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else ranks started again find the addresses of those that died
RUNS=$1
shift
read -r NAME ARGUMENTS < <(grape recipes --rows | awk -v n="$SLURM_ARRAY_TASK_ID" \
    '$1 == n { name = $2; $1 = $2 = $3 = $4 = ""; print name, $0 }') || { echo "grape recipes --rows has no run $SLURM_ARRAY_TASK_ID" >&2; exit 2; }
OUT=$RUNS/$NAME
mkdir -p "$OUT.state"
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# shellcheck disable=SC2086
srun torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc_per_node=8 --max-restarts=3 --rdzv_backend=c10d \
    --rdzv_endpoint="$HEAD:29500" --rdzv_id="$SLURM_JOB_ID" \
    -m grape_pe.cli train $ARGUMENTS "$@" --out "$OUT" --resume || true
NOW=$(find "$OUT/checkpoints" -maxdepth 1 -name 'step-*' 2>/dev/null | sort | tail -n 1)
BEFORE=$(cat "$OUT.state/last" 2>/dev/null || true)
echo "$NOW" > "$OUT.state/last"
if [ ! -d "$OUT/final" ] && [ "$NOW" != "$BEFORE" ]; then
    scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
fi
