"""Time attention of one layer if c ranks share a sequence, by engine, on one GPU.

    PYTHONPATH=. python3 tests/gpu/studies/context_parallel_attention.py llama31_8b

The work is that of the first rank: its two chunks of queries against their keys, forward and
backward, without the exchange of keys and values and their copies. The work of a whole sequence is
c times as much, so `share` is 1 if an engine is as fast on chunks as on whole sequences.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from common import engines
from common.benchmarks import divisions
from common.kernels.architecture import gpu_architecture
from common.self_test.attention import attention_work
from common.self_test.kernel_cases import Draw, Sizes
from launch.preflight.measure import median_s

SECONDS = 0.5  # of each measurement


def main(benchmark: str) -> None:
    device = torch.device("cuda")
    rules = divisions(benchmark)["closed"]
    whole = Sizes(
        rules.shape, rules.sequence_length, 1, True, rules.lora_rank, "triton", torch.bfloat16
    )
    usable = engines.choose(engines.ATTENTION, gpu_architecture(device), {}).usable
    for engine in usable:
        engines.use(engines.ATTENTION, engine.name)
        alone = 0.0
        for size in (1, 2, 4, 8):
            sizes = replace(
                whole, context_parallel=size, sequence_length=rules.sequence_length // size
            )
            seconds = median_s(attention_work(sizes, Draw(device)), device, SECONDS)
            alone = alone or seconds
            share = alone / (size * seconds)
            print(f"{engine.name:20} c={size}: {1e6 * seconds:8.0f} us, share {share:.2f}")


if __name__ == "__main__":
    main(sys.argv[1])
