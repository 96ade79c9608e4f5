#!/usr/bin/env bash
# What MATMUL_ENGINE and ATTENTION_ENGINE do to a training step, in turn on one H200: tests/gpu/studies/engines_in_a_step.sh BENCHMARK ROUNDS
# As many layers as need no recomputation; synthetic steps. Needs flash-attn-4 in the Python of `python3`.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/../../.."
benchmark=${1:?which benchmark} rounds=${2:?how many rounds}
case $benchmark in
    llama31_8b) small=(--layers 16 --set recompute_layers=0 --set moment_precision=fp32) ;;
    llama2_70b_lora) small=(--layers 10 --set offload_layers=5 --eval-sequences 8) ;;
    *) echo "no such benchmark: $benchmark" >&2 && exit 2 ;;
esac
step() {
    echo "${*:-no engine}"
    env "$@" ./run_and_time.sh "$benchmark" bench --config "configs/$benchmark/H200_1x1.toml" --set global_batch_size=4 --steps 8 "${small[@]}" 2>&1 |
        grep -E '^(BENCH|EVALUATION)|^error|^  (why|do)'
}
git log -1 --format='commit %h'
nvidia-smi --query-gpu=name,power.limit,driver_version --format=csv,noheader
for ((round = 0; round < rounds; round++)); do
    step
    step MATMUL_ENGINE=cublaslt
    step ATTENTION_ENGINE=flash_attention_4
    step MATMUL_ENGINE=cublaslt ATTENTION_ENGINE=flash_attention_4
done
