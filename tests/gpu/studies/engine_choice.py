"""Show which engines a start chooses, their times, and how long its self-test takes. One GPU.

    PYTHONPATH=. python3 tests/gpu/studies/engine_choice.py [llama31_8b] [--tree DIR]

Each start is a process of its own: one with empty caches, one that lacks only the kept times of
engines, and two that have them. `--tree` runs the code of another checkout, which may be older than
the choice by time: then the second start is like the third.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STARTS = ("empty caches", "without kept times", "kept", "kept")
RANK = """
import sys, time
import torch
from pathlib import Path
from common import config as configs
from common.benchmarks import config_class, rules_of
from common.kernels.attention import attention_backends
from common.self_test.kernel_cases import Sizes
from common.self_test.run import check_engines, require_sound, self_test

benchmark, path = sys.argv[1:]
config = configs.load(Path(path), config_class(benchmark))
rules = rules_of(benchmark, config)
sizes = Sizes.of(config, rules.shape, rules.sequence_length, rules.lora_rank)
device = torch.device("cuda", 0)
torch.cuda.set_device(device)
torch.zeros(1, device=device)
with attention_backends("cuda"):
    result = self_test(sizes, device)
    require_sound(result, device)
print(f"    self-test {result.seconds:.2f} s, {len(result.results)} ops; attention "
      f"{result.attention}, products {result.products}, swiglu {result.swiglu}")
for operation, choice in getattr(result, "engines", {}).items():
    print(f"    {operation} by {choice}")
for note in getattr(result, "notes", []):
    print(f"    NOTE {note}")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("benchmark", nargs="?", default="llama31_8b")
    parser.add_argument("--tree", type=Path, default=Path())
    args = parser.parse_args()
    tree = args.tree.resolve()
    config = tree / "configs" / args.benchmark / "H200_1x1.toml"
    with tempfile.TemporaryDirectory() as caches:
        environment = {
            **os.environ,
            "PYTHONPATH": str(tree),
            "XDG_CACHE_HOME": f"{caches}/xdg",
            "TRITON_CACHE_DIR": f"{caches}/triton",
        }
        for name in STARTS:
            if name == "without kept times":
                shutil.rmtree(Path(caches, "xdg/mlperf-llama-training/engines"), True)
            began = time.monotonic()
            command = [sys.executable, "-c", RANK, args.benchmark, str(config)]
            output = subprocess.run(
                command, env=environment, cwd=tree, check=True, text=True, stdout=subprocess.PIPE
            ).stdout
            print(f"{args.benchmark}, {name}: process {time.monotonic() - began:.1f} s")
            print(output, end="", flush=True)


if __name__ == "__main__":
    main()
