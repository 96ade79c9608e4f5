"""Prepare data and base weights of `llama2_70b_lora`.

The commands print how to get them, verify them, convert AMD's files, and build the miniature's.

    ./run_and_time.sh llama2_70b_lora prepare miniature --data-dir D
    ./run_and_time.sh llama2_70b_lora prepare convert-npy --npy-dir P --data-dir D
        AMD's packed train.npy and validation.npy to parquet
    ./run_and_time.sh llama2_70b_lora prepare verify --data-dir D [--weights W [--manifest M.json]]
        [--miniature] [--full]
    ./run_and_time.sh llama2_70b_lora prepare write-manifest --weights W --output M.json
        [--miniature]
    ./run_and_time.sh llama2_70b_lora prepare fetch --data-dir D [--weights W] [--download]

No command deletes or overwrites a file that it did not create. Messages go to stderr. The exit code
names the kind of failure (docs/troubleshooting.md).
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from common.command_line import Parser, add_command, program
from common.data.hub import download
from common.data.preparation import lack_of_space, say
from common.errors import RunError
from common.terminal import data_size
from llama2_70b_lora.rules import CLOSED, DATA_FILES, MINIATURE, Rules

DATA_REPOSITORY = "regisss/scrolls_gov_report_preprocessed_mlperf_2"
DATA_REVISION = "21ff1233ee3e87bc780ab719c755170148aba1cb"
WEIGHTS_REPOSITORY = "regisss/llama2-70b-fused-qkv-mlperf"
WEIGHTS_REVISION = "647cb0c8858ddefd10231a20ddfa68e4eb5e850e"
DATA, WEIGHTS = CLOSED.downloads


def miniature(data_dir: Path) -> None:
    """Build the miniature's data in `data_dir` and its base in `data_dir`/base, unless complete."""
    # Must precede the import of torch. Idle OpenMP threads then sleep instead of spinning. The base
    # trains in 75 s instead of 300 s while another process is busy, and in 52 s instead of 40 s on
    # two idle cores. On 32 idle cores, 16 spinning threads would save 18 of 41 s.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from llama2_70b_lora.miniature import build

    build(data_dir)


def fetch(data_dir: Path, weights: Path, download_data: bool) -> None:
    """Print how to get MLCommons' data and base weights.

    `download_data`: download the data first.

    The instructions are printed before an error is raised. Raises the errors of `download`.
    """
    if download_data:
        try:
            download(DATA_REPOSITORY, DATA_REVISION, [*DATA_FILES.values()], data_dir, "dataset")
        except RunError:
            _say_how(data_dir, weights, "Nothing has been downloaded")
            raise
        _say_how(data_dir, weights, "The weights have not been downloaded")
        return
    _say_how(data_dir, weights, "Nothing has been downloaded")


def _say_how(data_dir: Path, weights: Path, not_downloaded: str) -> None:
    """Print how to get the missing parts.

    `not_downloaded`: the beginning of the first sentence.
    """
    present = {
        "data": all((data_dir / name).exists() for name in DATA_FILES.values()),
        "weights": any(weights.glob("*.safetensors")),
    }
    missing = [name for name, there in present.items() if not there]
    prepare = "./run_and_time.sh llama2_70b_lora prepare"
    check = f"{prepare} verify --data-dir {data_dir} --weights {weights}"
    if not missing:
        say(f"Data and weights are present. Check them:\n  {check}")
        return
    say(
        f"""{not_downloaded}: Meta's weights have a license that you must accept.
Missing: {" and ".join(missing)}.

1. License. Llama 2 has the Llama 2 Community License (https://ai.meta.com/llama/license). A
   submission must start from MLCommons' copy with fused query, key and value projections.
   MLCommons gives it to members who agree to a notice. The reference's README explains how:
     https://github.com/mlcommons/training/tree/master/llama2_70b_lora
   The names are `Llama2-70b-fused-qkv-mlperf` (weights) and `scrolls_gov_report_8k` (data). If
   access is refused, ask MLCommons.
2. The author of the reference has the same files on the Hugging Face Hub, which decides whether you
   may download them. `fetch --download` gets the data. The revisions are:
     hf download {DATA_REPOSITORY} --repo-type dataset \\
       --revision {DATA_REVISION} --local-dir {data_dir}
     hf download {WEIGHTS_REPOSITORY} \\
       --revision {WEIGHTS_REVISION} \\
       --include "*.safetensors" "*.json" --local-dir {weights}
   The weights have about {data_size(WEIGHTS.size_bytes)}; the .py files of the repository are not
   needed. Ordinary Llama 2 70B weights (safetensors with q_proj, k_proj and v_proj) work too, but
   cannot be submitted.
3. If {" and ".join(DATA_FILES.values())}
   are in a folder inside {data_dir}, move them up to it. Then check everything:
     {check}
   No SHA-256 of the weights is published. Record your own, and compare later copies with it:
     {prepare} write-manifest --weights {weights} --output llama2_70b.json
     {check} \\
       --manifest llama2_70b.json --full

AMD's packed train.npy and validation.npy have the same sequences. They are pickles, which
convert-npy reads without executing them. Training reads token ids only, without a tokenizer."""
    )
    for name, folder, part in (("data", data_dir, DATA), ("weights", weights, WEIGHTS)):
        lack = lack_of_space(folder, part.size_bytes, part.what)
        if lack and name in missing:
            say(f"warning: {lack}")


def convert(args: argparse.Namespace, rules: Rules) -> None:
    """Run `prepare convert-npy`."""
    # Imports numpy, which parsing the command line does not need. So do the imports below.
    from llama2_70b_lora.packed_npy import convert_npy

    convert_npy(args.npy_dir, args.data_dir, rules)


def write(args: argparse.Namespace, rules: Rules) -> None:
    """Run `prepare write-manifest`."""
    from llama2_70b_lora.verify import write_manifest

    write_manifest(args.weights, args.output, rules)


def verify(args: argparse.Namespace, rules: Rules) -> None:
    """Run `prepare verify`."""
    from llama2_70b_lora.verify import verify_data, verify_weights

    verify_data(args.data_dir, rules)
    if args.weights is not None:
        verify_weights(args.weights, args.manifest, args.full, rules)


def parser(benchmark: str = "llama2_70b_lora") -> Parser:
    """Return the parser. `work(args, rules)` of the parsed arguments executes the command."""
    parser = Parser(f"{benchmark} prepare", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    data = Parser("", add_help=False)
    data.add_argument("--data-dir", type=Path, required=True, help="directory of the data")
    weights = Parser("", add_help=False)
    weights.add_argument("--weights", type=Path, help="directory of the checkpoint")
    small = Parser("", add_help=False)
    small.add_argument("--miniature", action="store_true", help="expect the miniature's sizes")

    add_command(
        commands,
        "miniature",
        "build the base and data of the CPU miniature",
        lambda args, rules: miniature(args.data_dir),
        data,
    )
    packed = add_command(
        commands, "convert-npy", "convert AMD's packed .npy files to parquet", convert, data
    )
    packed.add_argument(
        "--npy-dir", type=Path, required=True, help="directory of train.npy and validation.npy"
    )
    files = add_command(commands, "verify", "check data and weights", verify, data, weights, small)
    files.add_argument("--manifest", type=Path, help="manifest written by `prepare write-manifest`")
    files.add_argument("--full", action="store_true", help="also read every byte of the weights")
    hashes = add_command(
        commands,
        "write-manifest",
        "write sizes and SHA-256 of the weights (reads every byte)",
        write,
        small,
    )
    hashes.add_argument("--weights", type=Path, required=True, help="directory of the checkpoint")
    hashes.add_argument("--output", type=Path, required=True, help="manifest to write")
    how = add_command(
        commands,
        "fetch",
        "print how to get data and weights",
        lambda args, rules: fetch(
            args.data_dir, args.weights or args.data_dir / "base", args.download
        ),
        data,
        weights,
    )
    how.add_argument(
        "--download", action="store_true", help=f"download the data from {DATA_REPOSITORY}"
    )
    return parser


def work(args: argparse.Namespace) -> None:
    """Execute a command with the rules of the closed division, or with --miniature, of the toy."""
    is_miniature = getattr(args, "miniature", False)  # not every command has the option
    args.work(args, MINIATURE if is_miniature else CLOSED)


main = program(parser, work)

if __name__ == "__main__":
    sys.exit(main())
