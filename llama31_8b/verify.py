"""`prepare verify`: compare token files with a manifest by size, SHA-256, dtype, ids and counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from common.data.indexed_dataset import Index, index_path
from common.data.manifest import FileFacts, Manifest, PairFacts, sha256_of
from common.data.preparation import Bar, say
from common.errors import DataError

SMALL_FILE = 64 << 20  # bytes: hashed even without --full
SAMPLED_BLOCKS = 64  # of SAMPLED_TOKENS each, evenly over the file, from the first token to the last
SAMPLED_TOKENS = 1 << 16
FULL_CHUNK = 1 << 22  # tokens
BOS_ID, EOS_ID = 128000, 128001  # Llama 3.1; the reference's preprocessing adds neither


@dataclass
class Findings:
    bad: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    sha256: dict[str, str] = field(default_factory=dict)  # of files that were hashed
    indexes: dict[str, Index] = field(default_factory=dict)

    def check(self, good: bool, what: str, expected: object, got: object) -> None:
        if not good:
            self.report(f"{what}: expected {expected}, got {got}")

    def report(self, what: str) -> None:
        self.bad.append(what)
        say(f"BAD  {what}")


def verify(data_dir: Path, manifest_path: Path, full: bool, write_manifest: Path | None) -> None:
    """Compare `data_dir` with a manifest. Raises DataError if anything differs; prints what could not be checked.

    Always checked: names, known sizes, the structure of each .idx, .bin sizes, dtype, known counts, ids in sampled blocks, SHA-256 of
    small files. With `full`: every id, and SHA-256 of every file. `write_manifest` records what was found, for later checks: use it
    after a download that you have reason to trust.
    """
    manifest, findings = Manifest.read(manifest_path), Findings()
    for name, facts in manifest.files.items():
        _verify_file(data_dir / name, facts, full or write_manifest is not None, findings)
    for prefix, expected in manifest.pairs.items():
        try:
            _verify_pair(data_dir / prefix, expected, manifest.vocab_size, full, findings)
        except DataError as error:
            findings.report(error.what)
    for note in findings.not_checked:
        say(f"not checked: {note}")
    if findings.bad:
        more = f" (and {len(findings.bad) - 1} more, above)" if len(findings.bad) > 1 else ""
        raise DataError(findings.bad[0] + more, f"it differs from {manifest_path}", "fetch or build that file again")
    if write_manifest is not None:
        files = {name: FileFacts((data_dir / name).stat().st_size, findings.sha256[name]) for name in manifest.files}
        pairs = {name: PairFacts(index.dtype.name, index.num_documents, index.num_tokens) for name, index in findings.indexes.items()}
        Manifest(f"{manifest.source}; facts as found in a downloaded copy", manifest.vocab_size, files, pairs).write(write_manifest)
        say(f"wrote {write_manifest}: sizes, SHA-256 and counts as found here")
    say(f"{data_dir}: nothing wrong found{', except that some facts are not known (above)' if findings.not_checked else ''}")


def _verify_file(path: Path, expected: FileFacts, hash_all: bool, findings: Findings) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        return findings.check(False, str(path), "a file", error.strerror)
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
        findings.not_checked.append(f"SHA-256 of {path.name}: use --full")


def _verify_pair(prefix: Path, expected: PairFacts, vocab_size: int, full: bool, findings: Findings) -> None:
    index, path = Index.read(prefix), index_path(prefix)
    findings.indexes[prefix.name] = index
    findings.check(index.dtype.name == expected.dtype, f"{path}: dtype", expected.dtype, index.dtype.name)
    for what, count, got in (("documents", expected.documents, index.num_documents), ("tokens", expected.tokens, index.num_tokens)):
        if count is None:
            findings.not_checked.append(f"{what} of {prefix.name}: {got:,} found, the right number is not known")
        else:
            findings.check(got == count, f"{path}: {what}", count, got)
    findings.check(index.num_sequences == index.num_documents, f"{path}: sequences", index.num_documents, index.num_sequences)
    _verify_ids(index, vocab_size, full, findings)


def _verify_ids(index: Index, vocab_size: int, full: bool, findings: Findings) -> None:
    """Every id, or those of sampled blocks, must be in [0, vocab_size). Also counts bos and eos, which C4's files should not have."""
    blocks = _blocks(index.num_tokens, full)
    total = sum(count for _, count in blocks)
    bar, done, marks = Bar(f"ids of {index.prefix.name}", total, "tokens"), 0, 0
    with index.open_tokens() as tokens:
        for first, count in blocks:
            ids = tokens.read(first, count)
            wrong = (ids < 0) | (ids >= vocab_size)
            if wrong.any():
                at = int(wrong.argmax())
                return findings.check(False, f"{tokens.path}: token {first + at}", f"an id from 0 to {vocab_size - 1}", int(ids[at]))
            marks += int(np.count_nonzero((ids == BOS_ID) | (ids == EOS_ID)))
            done += count
            bar.at(done)
    bar.finish()
    counted = f", {marks} of them begin or end of text" if vocab_size > BOS_ID else ""
    counts = f"{index.num_documents:,} documents in {index.num_sequences:,} sequences, {index.num_tokens:,} tokens"
    say(f"{index.prefix.name}: {counts} as {index.dtype.name}; {total:,} ids checked{counted}")
    if total < index.num_tokens:
        findings.not_checked.append(f"ids of {index.prefix.name}: {index.num_tokens - total:,} of {index.num_tokens:,}; use --full")


def _blocks(num_tokens: int, full: bool) -> list[tuple[int, int]]:
    """(first token, count): the whole file in chunks, or SAMPLED_BLOCKS blocks spread evenly from the head to the tail."""
    if full or num_tokens <= SAMPLED_BLOCKS * SAMPLED_TOKENS:
        return [(first, min(FULL_CHUNK, num_tokens - first)) for first in range(0, num_tokens, FULL_CHUNK)]
    last = num_tokens - SAMPLED_TOKENS
    return [(last * block // (SAMPLED_BLOCKS - 1), SAMPLED_TOKENS) for block in range(SAMPLED_BLOCKS)]
