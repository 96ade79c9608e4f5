"""`./run_and_time.sh llama2_70b_lora merge ...`: write a checkpoint with the trained adapters merged into it."""

import argparse
import sys
from pathlib import Path

from common.data.preparation import run_to_exit_code
from common.model.peft_adapter import merge


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="./run_and_time.sh llama2_70b_lora merge", description=__doc__)
    parser.add_argument("--base", type=Path, required=True, help="Hugging Face safetensors checkpoint, fused qkv_proj or ordinary")
    parser.add_argument("--adapter", type=Path, required=True, help="directory of the adapter, as training or peft saves it")
    parser.add_argument("--out", type=Path, required=True, help="new directory")
    args = parser.parse_args(argv)
    return run_to_exit_code(lambda: merge(args.base, args.adapter, args.out))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
