#!/usr/bin/env bash
set -euo pipefail

usage() {
    cat << 'END'
Compare step times with Megatron-core + Transformer Engine on this machine.

Usage: tests/gpu/studies/against_megatron.sh GPUS [LAYERS]

Arguments:
  GPUS        number of GPUs for llama31_8b
  LAYERS      layers of llama31_8b, without recomputation (default: all 32, on one GPU 16)

Runs this package and Megatron in turn: llama31_8b in FP8 (this package twice), llama31_8b in
bf16, then llama2_70b_lora. Megatron has the fastest of the settings that megatron_peers.py offers. Steps are synthetic; no data is read. Megatron's llama2_70b_lora
always uses one GPU.

Needs H200s or H100s, and a Python with the packages of both. One H200 cannot hold Megatron's
state for 32 layers, nor can two H100s. On H100s, llama2_70b_lora is left out: its base does not
fit on fewer than eight.

Options:
  -h, --help  print this help and exit
END
}

if [ "${1:-}" = -h ] || [ "${1:-}" = --help ]; then
    usage
    exit
fi
gpus=${1:?how many GPUs}
cd "$(dirname "$(readlink -f "$0")")/../../.."

export DGXNGPU=$gpus # selects the config of this package
layers=${2:-}
if [ "$gpus" = 1 ]; then
    layers=${layers:-16}
fi
sequences_per_gpu=4 # per step of the 8B, as in its config for 4 GPUs
depth=()            # options of both: number of layers
memory=()           # options of this package: what fits into memory at that depth
if [ -n "$layers" ]; then
    depth=(--layers "$layers")
    memory=(--set recompute_layers=0 --set moment_precision=fp32)
fi

fastest=(--fuse-wgrad --fuse-mlp --fuse-qkv-rope) # options of Megatron for the 8B

# Print only the result lines of ./run_and_time.sh ARGUMENTS..., and its error if it fails.
bench() {
    ./run_and_time.sh "$@" 2>&1 |
        grep -E '^(BENCH|ENGINES|EVALUATION)|^error|^  (why|do)'
}

# Time llama31_8b in this package. The arguments are passed on to `bench`.
package_8b() {
    bench llama31_8b bench \
        --set "global_batch_size=$((sequences_per_gpu * gpus))" \
        --steps 8 \
        "${depth[@]}" "${memory[@]}" "$@"
}

# Time llama31_8b in Megatron. The arguments are passed on to megatron_peers.py.
megatron_8b() {
    torchrun --nproc-per-node "$gpus" \
        tests/gpu/studies/megatron_peers.py llama31_8b "${depth[@]}" "$@" 2>&1 |
        grep -E '^Megatron|Error'
}

package_lora() {
    bench llama2_70b_lora bench \
        --set "global_batch_size=$((2 * gpus))" \
        --steps 6 \
        --eval-sequences $((8 * gpus))
}

megatron_lora() {
    python3 tests/gpu/studies/megatron_peers.py llama2_70b_lora "$@" 2>&1 |
        grep -E '^Megatron|Error'
}

git log -1 --format='commit %h'
nvidia-smi --query-gpu=name,power.limit,driver_version --format=csv,noheader

# In FP8, this package twice.
package_8b
megatron_8b "${fastest[@]}"
package_8b

# In bf16.
package_8b --set linear=bf16
megatron_8b --bf16 "${fastest[@]}"
megatron_8b --bf16 --fuse-wgrad

if nvidia-smi --query-gpu=name --format=csv,noheader | grep -q H100; then
    exit
fi
package_lora
megatron_lora
megatron_lora --fuse-qkv-rope
