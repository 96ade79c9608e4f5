"""`prepare verify`: compare token files with a manifest by size, SHA-256, dtype, counts and ids."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from common.data.gpt_dataset import check_ids
from common.data.indexed_dataset import Index
from common.data.manifest import FileFacts, Manifest, PairFacts, facts_of
from common.data.preparation import say
from common.errors import DataError, disk_reason
from common.terminal import Progress

CHUNK = 1 << 22  # tokens


def verify(data_dir: Path, manifest: Manifest, origin: Path, full: bool) -> Manifest:
    """Compare `data_dir` with a manifest, and print what could not be checked.

    Names, known sizes, the structure of each .idx, .bin sizes, dtype and known counts are always
    checked.

    `origin`: the manifest's file, for the error.
    `full`: also check every id and the SHA-256 of every file.

    Returns the manifest with the facts as found. Raises DataError if anything differs.
    """
    copy = replace(manifest, files={}, pairs={})
    bad: list[str] = []
    unknown: list[str] = [] if full else ["SHA-256 and ids: use --full"]
    for name, expected in manifest.files.items():
        try:
            size = (data_dir / name).stat().st_size
            copy.files[name] = FileFacts(size)
            if size == 0 and not expected.size:
                bad.append(f"{data_dir / name}: the file is empty")
            if full:
                with Progress(f"SHA-256 of {name}", size, "B") as progress:
                    copy.files[name] = facts_of(data_dir / name, progress.advance)
            _compare(str(data_dir / name), expected, copy.files[name], bad, unknown)
        except FileNotFoundError:
            bad.append(f"{data_dir / name}: is missing")
    for prefix, facts in manifest.pairs.items():
        try:
            copy.pairs[prefix] = _read_pair(data_dir / prefix, manifest.vocab_size, full)
            _compare(str(data_dir / prefix), facts, copy.pairs[prefix], bad, unknown)
        except DataError as error:
            if disk_reason(error):
                raise
            bad.append(error.what)
    for what in unknown:
        say(f"not checked: {what}")
    for what in bad:
        say(f"BAD  {what}")
    if bad:
        more = f" (and {len(bad) - 1} more, above)" if len(bad) > 1 else ""
        raise DataError(
            bad[0] + more, f"it differs from {origin}", "fetch or build that file again"
        )
    unchecked = "; some facts were not checked (above)" if unknown else ""
    say(f"{data_dir}: no differences found{unchecked}")
    return copy


def _compare(
    name: str,
    expected: FileFacts | PairFacts,
    actual: FileFacts | PairFacts,
    bad: list[str],
    unknown: list[str],
) -> None:
    """Add a line to `bad` for each difference, and to `unknown` for each fact that is not known."""
    for fact, value in asdict(expected).items():
        got = getattr(actual, fact)
        if value is None and fact in ("sample", "largest_id"):
            continue  # follows from the content, which SHA-256 identifies
        if value is None:
            unknown.append(f"{fact} of {name}: found {got}, the correct value is unknown")
        elif got is not None and got != value:
            bad.append(f"{name}: {fact}: expected {value}, got {got}")


def _read_pair(prefix: Path, vocab_size: int, full: bool) -> PairFacts:
    """Return the properties of a .bin/.idx pair.

    `full`: first check every id.

    Raises DataError.
    """
    index = Index.read(prefix)
    index.check_token_file_size()
    largest_id = 0 if full else None
    if full:
        title = f"ids of {prefix.name}"
        with (
            index.open_tokens() as tokens,
            Progress(title, index.num_tokens, "tokens") as progress,
        ):
            for first in range(0, index.num_tokens, CHUNK):
                ids = tokens.read(first, min(CHUNK, index.num_tokens - first))
                check_ids(ids, vocab_size, tokens.path, f"tokens {first} to {first + len(ids) - 1}")
                largest_id = max(largest_id or 0, int(ids.max()))
                progress.advance(len(ids))
    say(
        f"{prefix.name}: {index.num_documents:,} documents, {index.num_sequences:,} sequences,"
        f" {index.num_tokens:,} tokens"
    )
    return PairFacts(index.dtype.name, index.num_documents, index.num_tokens, largest_id)
