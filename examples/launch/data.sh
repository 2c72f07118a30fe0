#!/bin/bash
# FineWeb-Edu prepared by 16 machines, and joined on shared storage:
#   sbatch --array=1-16 examples/launch/data.sh /shared/data/fineweb-edu-100B
#   examples/launch/data.sh /shared/data/fineweb-edu-100B join
# If a part is killed, submit its task again; it continues.
#SBATCH --job-name=grape-data --cpus-per-task=64 --time=24:00:00 --requeue --open-mode=append
set -eu
OUT=$1 PARTS=16
if [ "${2:-}" != join ]; then
    exec grape data prepare fineweb-edu-100B --part "$SLURM_ARRAY_TASK_ID/$PARTS" --workers 64 \
        --out "$OUT.parts/$SLURM_ARRAY_TASK_ID"
fi
mkdir -p "$OUT"
for part in $(seq "$PARTS"); do
    test -f "$OUT.parts/$part/manifest.json" || { echo "part $part is not done" >&2; exit 1; }
done
for part in $(seq "$PARTS"); do
    for shard in "$OUT.parts/$part"/*.bin; do
        ln "$shard" "$OUT/$(printf %02d "$part")_$(basename "$shard")"
    done
done
grape data adopt "$OUT" --tokenizer gpt2
