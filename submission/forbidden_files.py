"""Files that must not be in a submission: caches, build outputs, links, large files and secrets.

Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

SIZE_LIMIT = 50 * 2**20  # bytes per file, as in the repo checker
# Names of caches and core dumps, and endings of build outputs.
CACHES = ("__pycache__", "node_modules", "wandb", "core")
CACHE_SUFFIXES = (".pyc", ".pyo", ".so", ".o", ".a", ".egg-info", ".whl", ".deb", ".rpm", ".swp")

# Kind of secret -> pattern of its text.
SECRETS = {
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{20,}",
    "an AWS key": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "a GitHub token": r"\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_[A-Za-z0-9_]{30,}",
    "an API key": r"\bsk-[A-Za-z0-9_-]{24,}|\bAIza[0-9A-Za-z_-]{35}",
    "a Slack token": r"\bxox[abprs]-[A-Za-z0-9-]{10,}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "a password": (
        r"(?i:\b\w*(?:password|passwd|api_?key|secret_key|auth_token)[\"']?\s*[=:]\s*[\"']?)"
        r"(?!None\b|str\b|\$|<)[^\s\"',)\]}\[({]{4,}"
    ),
    "a password in an address": r"\b[a-z][a-z0-9+.-]*://[^/\s:@\"'{}]+:[^/\s:@\"'{}]+@",
}


def forbidden_files(root: Path) -> list[str]:
    """Return one line for each reason why a path in `root` must not be in a submission.

    The reasons are names and sizes that the repo checker refuses, caches, build outputs, secrets,
    and links, which the repo checker would resolve relative to its own directory.
    """
    lines = []
    for path in (root, *sorted(root.rglob("*"))):
        name = path.relative_to(root.parent)
        lines += [f"{name}: {problem}" for problem in _problems(path)]
    return lines


def _problems(path: Path) -> Iterator[str]:
    """Yield each reason why the file or directory at `path` must not be in a submission."""
    if path.name.startswith("."):
        yield "its name starts with a dot"
    if any(letter.isspace() for letter in path.name):
        yield "its name contains a space"
    if path.name in CACHES or path.name.endswith(CACHE_SUFFIXES):
        yield "is a cache or a build output"
    if path.is_symlink():
        yield "is a link"
    elif path.is_file() and (size := path.stat().st_size) > SIZE_LIMIT:
        yield f"is {size / 2**20:.0f} MB, the limit is {SIZE_LIMIT >> 20} MB"
    elif path.is_file():
        yield from secrets_in(path.read_bytes())


def secrets_in(data: bytes) -> Iterator[str]:
    """Yield the kind and line of each apparent secret in `data`, but never the secret itself."""
    text = data.decode("latin-1")
    for kind, pattern in SECRETS.items():
        if match := re.search(pattern, text):
            line = text.count("\n", 0, match.start()) + 1
            yield f"line {line} looks like {kind}"
