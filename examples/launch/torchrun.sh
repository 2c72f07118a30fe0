#!/bin/bash
# One run on several nodes without a scheduler. On each node, with the name of one of them:
#   NODES=4 HEAD=node-0 examples/launch/torchrun.sh paper-medium --encoding grape-ap --train.shard 8 --out /shared/runs/ap
# When a process dies, the job restarts from its newest checkpoint, up to three times.
set -eu
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else ranks started again find the addresses of those that died
exec torchrun --nnodes="${NODES:-1}" --nproc_per_node="${GPUS:-8}" --max-restarts=3 --rdzv_backend=c10d \
    --rdzv_endpoint="${HEAD:-localhost}:29500" --rdzv_id="${RUN:-grape}" \
    -m grape_pe.cli train "$@" --resume
