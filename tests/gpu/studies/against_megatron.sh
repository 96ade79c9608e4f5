#!/usr/bin/env bash
# Ours and Megatron-core + Transformer Engine after each other on this machine, ours in FP8 twice: tests/gpu/studies/against_megatron.sh GPUS
# Needs H200s and a Python with the packages of both. The two benchmarks' synthetic steps; no data is read. One GPU does not hold Megatron's state of
# the 8B's 32 layers: there both have 16, without recomputation.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/../../.."
gpus=${1:?how many GPUs}
per_gpu=4 # sequences of a step on each: what the 8B's config has on 4 GPUs
depth=() fits=()
if [ "$gpus" = 1 ]; then
    depth=(--layers 16) fits=(--set recompute_layers=0 --set moment_precision=fp32)
fi
bench() { ./run_and_time.sh "$@" 2>&1 | grep -E '^(BENCH|ENGINES|EVALUATION)|^error|^  (why|do)'; }
ours() { bench llama31_8b bench --config "configs/llama31_8b/H200_1x$gpus.toml" --set "global_batch_size=$((per_gpu * gpus))" --steps 8 "${depth[@]}" "${fits[@]}" "$@"; }
megatron() { torchrun --nproc-per-node "$gpus" tests/gpu/studies/megatron_peers.py llama31_8b "${depth[@]}" "$@" 2>&1 | grep -E '^Megatron|Error'; }
git log -1 --format='commit %h'
nvidia-smi --query-gpu=name,power.limit,driver_version --format=csv,noheader
ours
megatron --fuse-wgrad
ours
megatron
ours --set linear=bf16
megatron --bf16 --fuse-wgrad
megatron --bf16
bench llama2_70b_lora bench --config "configs/llama2_70b_lora/H200_1x$gpus.toml" --set "global_batch_size=$((2 * gpus))" --steps 6 --eval-sequences $((8 * gpus))
python3 tests/gpu/studies/megatron_peers.py llama2_70b_lora 2>&1 | grep -E '^Megatron|Error'
