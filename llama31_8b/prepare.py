"""Data of `llama31_8b`: build the miniature's, convert your own text, verify MLCommons' files, say how to fetch them.

    python -m llama31_8b.prepare miniature --data-dir D
    python -m llama31_8b.prepare convert --input FILES... --tokenizer tokenizer.model --output-prefix P [--jsonl-key text]
    python -m llama31_8b.prepare verify --data-dir D [--manifest M.json] [--full] [--write-manifest M.json]
    python -m llama31_8b.prepare fetch --data-dir D

Nothing here deletes or overwrites a file that it did not create. Text goes to stderr; the exit code is that of the failure's
family (common/errors.py).
"""

from __future__ import annotations

import argparse
import platform
import sys
from pathlib import Path
from typing import Any

from common.data import corpus
from common.data.indexed_dataset import Writer, index_path, tokens_path
from common.data.preparation import (
    Manifest,
    PairFacts,
    Recipe,
    build_once,
    manifest_of,
    require_free_space,
    run_to_exit_code,
    say,
)
from llama31_8b.convert import convert
from llama31_8b.rules import CLOSED, MINIATURE
from llama31_8b.verify import verify

MINIATURE_RECIPE = 1  # raise when the corpus, the vocabulary or the format changes: existing data is then built again
MINIATURE_MANIFEST = "miniature.json"
MINIATURE_LOCK = ".miniature.lock"
TOKENIZER = "tokenizer.model"
SHIPPED_MANIFEST = Path(__file__).with_name("manifest.json")

DATA_URI = "https://training.mlcommons-storage.org/metadata/llama-3-1-8b-preprocessed-c4-dataset.uri"
DOWNLOADER = "https://github.com/mlcommons/r2-downloader"
DOWNLOAD_BYTES = 80_000_000_000  # about, by AMD's v5.1 README

# ---- miniature


def miniature(data_dir: Path) -> None:
    """Corpus, vocabulary and both .bin/.idx pairs in `data_dir`; the manifest last. Does nothing where they are already whole."""
    build_once(data_dir, _miniature_recipe(), _build_miniature)


def _miniature_recipe() -> Recipe:
    prefixes = (MINIATURE.train_prefix, MINIATURE.validation_prefix)
    pairs = [path(Path(prefix)).name for prefix in prefixes for path in (tokens_path, index_path)]
    source = f"documentation of the standard library of Python {platform.python_version()}, recipe {MINIATURE_RECIPE}"
    return Recipe("miniature data", source, MINIATURE.shape.vocab_size, (TOKENIZER, *pairs), MINIATURE_MANIFEST, MINIATURE_LOCK)


def _build_miniature(data_dir: Path) -> Manifest:
    train, validation = corpus.split(corpus.documents())
    corpus.train_sentencepiece(train, MINIATURE.shape.vocab_size, data_dir / TOKENIZER)
    tokenizer = corpus.load_sentencepiece(data_dir / TOKENIZER)
    pairs = {}
    for prefix, texts in ((MINIATURE.train_prefix, train), (MINIATURE.validation_prefix, validation)):
        pairs[prefix] = _write_pair(data_dir / prefix, texts, tokenizer)
        say(f"{prefix}: {pairs[prefix].documents} documents, {pairs[prefix].tokens} tokens")
    return manifest_of(data_dir, _miniature_recipe(), pairs)


def _write_pair(prefix: Path, texts: list[str], tokenizer: Any) -> PairFacts:
    writer = Writer(prefix, tokenizer.vocab_size())
    for ids in tokenizer.encode(texts):
        writer.add(ids)
    index = writer.finish()
    return PairFacts(index.dtype.name, index.num_documents, index.num_tokens)


# ---- fetch


def fetch(data_dir: Path) -> None:
    """Say how to get MLCommons' files into `data_dir`, after checking the room. Downloads nothing. Raises PreflightError."""
    prefixes = (CLOSED.train_prefix, CLOSED.validation_prefix)
    missing = [
        path.name for prefix in prefixes for path in (tokens_path(data_dir / prefix), index_path(data_dir / prefix)) if not path.exists()
    ]
    check = f"python -m llama31_8b.prepare verify --data-dir {data_dir}"
    if not missing:
        say(f"{data_dir}: all four files are there. Check them:\n  {check} --full")
        return
    require_free_space(data_dir, DOWNLOAD_BYTES, "the tokenized C4 of llama31_8b")
    say(
        f"""Nothing has been downloaded: MLCommons' bucket wants you to log in, in a browser, and this program will not do that for you.
Missing in {data_dir}: {", ".join(missing)}

1. Take MLCommons' downloader and read it before you run it (it may install cloudflared, and checks MD5 sums itself):
     git clone {DOWNLOADER}
     less r2-downloader/mlc-r2-downloader.sh
2. Let it download, about {DOWNLOAD_BYTES / 1e9:.0f} GB. It opens a browser once; without one, MLCommons gives service credentials (option -s):
     bash r2-downloader/mlc-r2-downloader.sh -d {data_dir} {DATA_URI}
3. If it made a folder of its own inside, move the four files up into {data_dir}; other files may stay where they are.
4. Check what came:
     {check} --full
   and keep what you found, so that later copies can be compared with it:
     {check} --write-manifest c4.json

Training reads token ids only: the tokenizer and its licence are not needed.
If access is refused, ask MLCommons (https://training.mlcommons-storage.org): nothing here can get around it."""
    )


# ---- command line


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m llama31_8b.prepare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("miniature", help="build the CPU miniature's data")
    command.add_argument("--data-dir", type=Path, required=True)
    command = commands.add_parser("convert", help="text to .bin/.idx")
    command.add_argument("--input", type=Path, nargs="+", required=True, metavar="FILE", help=".jsonl, .json or .txt, also .gz")
    command.add_argument("--tokenizer", type=Path, required=True, help="a SentencePiece model")
    command.add_argument("--output-prefix", type=Path, required=True)
    command.add_argument("--jsonl-key", default="text")
    command = commands.add_parser("verify", help="check downloaded files")
    command.add_argument("--data-dir", type=Path, required=True)
    command.add_argument("--manifest", type=Path, default=SHIPPED_MANIFEST)
    command.add_argument("--full", action="store_true", help="every token and every byte")
    command.add_argument("--write-manifest", type=Path, metavar="FILE", help="record sizes, SHA-256 and counts (reads every byte)")
    command = commands.add_parser("fetch", help="how to get MLCommons' files")
    command.add_argument("--data-dir", type=Path, required=True)
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    args = parse(argv)
    work = {
        "miniature": lambda: miniature(args.data_dir),
        "convert": lambda: convert(args.input, args.tokenizer, args.output_prefix, args.jsonl_key),
        "verify": lambda: verify(args.data_dir, args.manifest, args.full, args.write_manifest),
        "fetch": lambda: fetch(args.data_dir),
    }
    return run_to_exit_code(work[args.command])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
