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
import gzip
import json
import platform
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from common import corpus
from common.errors import ConfigError, DataError, StorageError
from common.indexed_dataset import Index, Writer, index_path, tokens_path
from common.preparation import (
    Bar,
    FileFacts,
    Manifest,
    PairFacts,
    Recipe,
    build_once,
    locked,
    manifest_of,
    require_free_space,
    run_to_exit_code,
    say,
    sha256_of,
)
from llama31_8b.rules import CLOSED, MINIATURE

MINIATURE_RECIPE = 1  # raise when the corpus, the vocabulary or the format changes: existing data is then built again
MINIATURE_MANIFEST = "miniature.json"
MINIATURE_LOCK = ".miniature.lock"
TOKENIZER = "tokenizer.model"
SHIPPED_MANIFEST = Path(__file__).with_name("manifest.json")

BATCH_DOCUMENTS = 512  # encoded in one call, on all cores
CHECKPOINT_SECONDS = 10.0

SMALL_FILE = 64 << 20  # bytes: hashed by verify even without --full
SAMPLED_BLOCKS = 64  # of SAMPLED_TOKENS each, evenly over the file, head and tail included
SAMPLED_TOKENS = 1 << 16
FULL_CHUNK = 1 << 22  # tokens
BOS_ID, EOS_ID = 128000, 128001  # Llama 3.1; the reference's preprocessing adds neither

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


# ---- convert


@dataclass
class Checkpoint:
    """How far a conversion is: everything before `position` of input `file` is in the partial output, and nothing after it."""

    job: dict[str, Any]  # inputs with sizes, tokenizer, key: a conversion goes on only with the same
    file: int = 0  # number of the current input
    position: int = 0  # its next byte, after decompression
    documents: int = 0
    tokens: int = 0
    empty: int = 0  # documents without a token, left out as Megatron's preprocessor does

    @classmethod
    def load(cls, path: Path, job: dict[str, Any]) -> Checkpoint:
        """The checkpoint at `path`, or a fresh one. Raises DataError if it is of another conversion."""
        if not path.exists():
            return cls(job)
        try:
            found = cls(**json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise DataError(
                f"{path}: not a checkpoint: {error}", "the file is damaged", "delete it and the .partial files, and start anew"
            ) from error
        if found.job != job:
            raise DataError(
                f"{path}: belongs to another conversion",
                "its inputs, their sizes, the tokenizer or the key differ from what was asked now",
                "give the same arguments, choose another --output-prefix, or delete it with the .partial files beside it",
            )
        return found

    def save(self, path: Path) -> None:
        temporary = path.with_name(path.name + ".partial")
        temporary.write_text(json.dumps(asdict(self)))
        temporary.replace(path)


def convert(inputs: list[Path], tokenizer_path: Path, prefix: Path, key: str, checkpoint_seconds: float = CHECKPOINT_SECONDS) -> Index:
    """Tokenise `inputs` into `<prefix>.bin/.idx`, one sequence per document, without bos or eos, as the reference's preprocessing.

    `.jsonl`, `.json` (one object per line, as C4 has it) hold a document in `key`; `.txt` one per block between blank lines, so
    that a file of any size streams. Both may be `.gz`. A killed conversion goes on from `<prefix>.checkpoint.json` when started
    again with the same arguments, and ends with the same bytes. Raises ConfigError, DataError, StorageError.
    """
    tokenizer = corpus.load_sentencepiece(tokenizer_path)
    job = {"inputs": [_input_facts(path) for path in inputs], "tokenizer_sha256": sha256_of(tokenizer_path), "key": key}
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with locked(prefix.with_name(f".{prefix.name}.lock")):
        checkpoint_path = prefix.with_name(prefix.name + ".checkpoint.json")
        state = Checkpoint.load(checkpoint_path, job)
        if index_path(prefix).exists() or (tokens_path(prefix).exists() and not checkpoint_path.exists()):
            return _already_there(prefix, checkpoint_path, state)
        if state.documents:
            say(f"going on after {state.documents:,} documents")
        writer = Writer(prefix, tokenizer.vocab_size(), state.documents, state.tokens)
        try:
            _encode_all(inputs, key, tokenizer, writer, state, checkpoint_path, checkpoint_seconds)
            index = writer.finish()
        finally:
            writer.close()
        checkpoint_path.unlink()
    say(
        f"{prefix}: {index.num_documents:,} documents, {index.num_tokens:,} tokens as {index.dtype.name}; {state.empty} empty ones left out"
    )
    return index


def _input_facts(path: Path) -> dict[str, Any]:
    _kind_of(path)
    try:
        return {"path": str(path), "size": path.stat().st_size}
    except OSError as error:
        raise DataError(f"{path}: cannot be opened: {error.strerror}", "it was given as --input", "check the name") from error


def _kind_of(path: Path) -> Callable[[IO[bytes], Path, int, str], Iterator[tuple[int, str]]]:
    name = path.name.removesuffix(".gz")
    if name.endswith((".jsonl", ".json")):
        return _json_documents
    if name.endswith(".txt"):
        return _text_documents
    raise ConfigError(f"{path}: unknown kind of input", "its name says neither .jsonl, .json nor .txt (also .gz)", "rename or convert it")


def _already_there(prefix: Path, checkpoint_path: Path, state: Checkpoint) -> Index:
    """The output exists: whole but for its checkpoint, if a kill came after the last rename; otherwise not ours to overwrite."""
    if checkpoint_path.exists():
        index = Index.read(prefix)
        if (index.num_documents, index.num_tokens) == (state.documents, state.tokens):
            index.check_token_file_size()
            prefix.with_name(prefix.name + ".lengths.partial").unlink(missing_ok=True)
            checkpoint_path.unlink()
            say(f"{prefix}: was complete already")
            return index
    raise StorageError(
        f"{prefix}.bin/.idx: exists already", "nothing is overwritten", "remove it yourself, or choose another --output-prefix"
    )


def _encode_all(
    inputs: list[Path], key: str, tokenizer: Any, writer: Writer, state: Checkpoint, checkpoint_path: Path, checkpoint_seconds: float
) -> None:
    """Encode from `state` to the end of the last input, with a checkpoint every so many seconds and one at the end."""
    sizes = [path.stat().st_size for path in inputs]
    bar = Bar("converting", sum(sizes))
    saved = time.monotonic()

    def save() -> None:
        state.documents, state.tokens = writer.flush()  # the data first: a checkpoint never promises what is not on the disk
        state.save(checkpoint_path)

    while state.file < len(inputs):
        for position, texts, raw_position in _batches(inputs[state.file], state.position, key):
            for ids in tokenizer.encode(texts):
                if ids:
                    writer.add(ids)
                else:
                    state.empty += 1
            state.position = position
            bar.at(sum(sizes[: state.file]) + raw_position)
            if time.monotonic() - saved >= checkpoint_seconds:
                save()
                saved = time.monotonic()
        state.file, state.position = state.file + 1, 0
    save()
    bar.finish()


def _batches(path: Path, position: int, key: str) -> Iterator[tuple[int, list[str], int]]:
    """(next byte after decompression, up to BATCH_DOCUMENTS texts, byte in the file as stored) from `position` on."""
    with path.open("rb") as raw:
        file: Any = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
        texts: list[str] = []
        try:
            file.seek(position)
            for after, text in _kind_of(path)(file, path, position, key):
                position = after
                texts.append(text)
                if len(texts) == BATCH_DOCUMENTS:
                    yield position, texts, raw.tell()
                    texts = []
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(
                f"{path}: broken gzip after byte {position}: {error}", "the file is cut off or damaged", "fetch it again"
            ) from error
        if texts:
            yield position, texts, raw.tell()


def _json_documents(file: IO[bytes], path: Path, position: int, key: str) -> Iterator[tuple[int, str]]:
    for line in file:
        start, position = position, position + len(line)
        if not line.strip():
            continue
        try:
            text = json.loads(line)[key]
        except (ValueError, KeyError, TypeError) as error:
            do = "repair the line, or name the right key with --jsonl-key"
            raise DataError(
                f"{path}: byte {start}: no document: {error!r}", f"each line must be a JSON object with the key {key}", do
            ) from error
        if not isinstance(text, str):
            raise DataError(
                f"{path}: byte {start}: {key} is no text but {type(text).__name__}", "a document must be a string", "repair the line"
            )
        yield position, text


def _text_documents(file: IO[bytes], path: Path, position: int, key: str) -> Iterator[tuple[int, str]]:
    block: list[bytes] = []
    start = position
    for line in file:
        position += len(line)
        if line.strip():
            block.append(line)
        elif block:
            yield position, _decoded(block, path, start)
            block, start = [], position
        else:
            start = position
    if block:
        yield position, _decoded(block, path, start)


def _decoded(block: list[bytes], path: Path, start: int) -> str:
    try:
        return b"".join(block).decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: byte {start + error.start}: not UTF-8", "the text has another encoding", "convert it to UTF-8 first"
        ) from error


# ---- verify


@dataclass
class Findings:
    bad: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    sha256: dict[str, str] = field(default_factory=dict)  # of files that were hashed
    indexes: dict[str, Index] = field(default_factory=dict)

    def check(self, good: bool, what: str, expected: object, got: object) -> None:
        if not good:
            self.bad.append(f"{what}: expected {expected}, got {got}")
            say(f"BAD  {self.bad[-1]}")


def verify(data_dir: Path, manifest_path: Path, full: bool, write_manifest: Path | None) -> None:
    """Compare `data_dir` with a manifest and with itself. Raises DataError if anything differs; says what it could not check.

    Always: names, known sizes, the structure of each .idx, .bin sizes, dtype, known counts, ids in sampled blocks, SHA-256 of
    small files. With `full`: every id, and SHA-256 of every file. `write_manifest` records what was found, for later checks:
    after a download that you have reason to trust.
    """
    manifest = Manifest.read(manifest_path)
    hash_all = full or write_manifest is not None
    findings = Findings()
    for name, facts in manifest.files.items():
        _verify_file(data_dir / name, facts, hash_all, findings)
    for prefix, expected in manifest.pairs.items():
        _verify_pair(data_dir / prefix, expected, manifest.vocab_size, full, findings)
    for note in findings.not_checked:
        say(f"not checked: {note}")
    if findings.bad:
        more = f" (and {len(findings.bad) - 1} more, above)" if len(findings.bad) > 1 else ""
        raise DataError(findings.bad[0] + more, f"it differs from {manifest_path}", "fetch or build that file again")
    if write_manifest is not None:
        _found(manifest, data_dir, findings).write(write_manifest)
        say(f"wrote {write_manifest}: sizes, SHA-256 and counts as found here")
    say(f"{data_dir}: nothing wrong found{', except that some facts are not known (above)' if findings.not_checked else ''}")


def _verify_file(path: Path, expected: FileFacts, hash_all: bool, findings: Findings) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        findings.check(False, str(path), "a file", error.strerror)
        return
    if expected.size is not None:
        findings.check(size == expected.size, f"{path}: size", f"{expected.size} bytes", f"{size} bytes")
    if hash_all or (expected.sha256 is not None and size <= SMALL_FILE):
        bar = Bar(f"sha256 of {path.name}", size)
        findings.sha256[path.name] = sha256_of(path, bar.at)
        bar.finish()
    if expected.sha256 is None:
        findings.not_checked.append(f"SHA-256 of {path.name}: none is known, so a changed byte that is still a token id would pass")
    elif path.name in findings.sha256:
        findings.check(findings.sha256[path.name] == expected.sha256, f"{path}: SHA-256", expected.sha256, findings.sha256[path.name])
    else:
        findings.not_checked.append(f"SHA-256 of {path.name}: ask with --full")


def _verify_pair(prefix: Path, expected: PairFacts, vocab_size: int, full: bool, findings: Findings) -> None:
    try:
        index = Index.read(prefix)
        findings.indexes[prefix.name] = index
        findings.check(index.dtype.name == expected.dtype, f"{index_path(prefix)}: dtype", expected.dtype, index.dtype.name)
        for what, wanted, got in (("documents", expected.documents, index.num_documents), ("tokens", expected.tokens, index.num_tokens)):
            if wanted is None:
                findings.not_checked.append(f"{what} of {prefix.name}: {got:,} found, the right number is not known")
            else:
                findings.check(got == wanted, f"{index_path(prefix)}: {what}", wanted, got)
        findings.check(
            index.num_sequences == index.num_documents, f"{index_path(prefix)}: sequences", index.num_documents, index.num_sequences
        )
        _verify_ids(index, vocab_size, full, findings)
    except DataError as error:
        findings.bad.append(error.what)
        say(f"BAD  {error.what}")


def _verify_ids(index: Index, vocab_size: int, full: bool, findings: Findings) -> None:
    """Every id, or those of sampled blocks, must be in [0, vocab_size). Also counts bos and eos, which C4's files should not hold."""
    blocks = _blocks(index.num_tokens, full)
    looked_at = sum(count for _, count in blocks)
    bar, done, marks = Bar(f"ids of {index.prefix.name}", looked_at, "tokens"), 0, 0
    with index.open_tokens() as tokens:
        for first, count in blocks:
            ids = tokens.read(first, count)
            wrong = (ids < 0) | (ids >= vocab_size)
            if wrong.any():
                at = int(wrong.argmax())
                findings.check(False, f"{tokens.path}: token {first + at}", f"an id from 0 to {vocab_size - 1}", int(ids[at]))
                return
            marks += int(np.count_nonzero((ids == BOS_ID) | (ids == EOS_ID)))
            done += count
            bar.at(done)
    bar.finish()
    counted = f", {marks} of them begin or end of text" if vocab_size > BOS_ID else ""
    counts = f"{index.num_documents:,} documents in {index.num_sequences:,} sequences, {index.num_tokens:,} tokens"
    say(f"{index.prefix.name}: {counts} as {index.dtype.name}; {looked_at:,} ids looked at{counted}")
    if looked_at < index.num_tokens:
        findings.not_checked.append(
            f"ids of {index.prefix.name}: {index.num_tokens - looked_at:,} of {index.num_tokens:,}; ask with --full"
        )


def _blocks(num_tokens: int, full: bool) -> list[tuple[int, int]]:
    """(first token, count): the whole file in chunks, or SAMPLED_BLOCKS blocks spread evenly from the head to the tail."""
    if full or num_tokens <= SAMPLED_BLOCKS * SAMPLED_TOKENS:
        return [(first, min(FULL_CHUNK, num_tokens - first)) for first in range(0, num_tokens, FULL_CHUNK)]
    last = num_tokens - SAMPLED_TOKENS
    return [(last * block // (SAMPLED_BLOCKS - 1), SAMPLED_TOKENS) for block in range(SAMPLED_BLOCKS)]


def _found(manifest: Manifest, data_dir: Path, findings: Findings) -> Manifest:
    files = {name: FileFacts((data_dir / name).stat().st_size, findings.sha256[name]) for name in manifest.files}
    pairs = {name: PairFacts(index.dtype.name, index.num_documents, index.num_tokens) for name, index in findings.indexes.items()}
    return Manifest(f"{manifest.source}; facts as found in a downloaded copy", manifest.vocab_size, files, pairs)


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
    require_free_space(data_dir, DOWNLOAD_BYTES, "the tokenised C4 of llama31_8b")
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
