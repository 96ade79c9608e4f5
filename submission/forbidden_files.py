"""What must not be in a submission: dot files, blanks in names, links, big files, caches, secrets. Standard library only.

Names and sizes as the repo checker of mlperf-logging wants them; links it judges against its working directory, so there are none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

SIZE_LIMIT = 50 * 2**20  # bytes; the repo checker's
CACHES = ("__pycache__", "node_modules", "wandb", "core")
CACHE_SUFFIXES = (".pyc", ".pyo", ".so", ".o", ".a", ".egg-info", ".whl", ".deb", ".rpm", ".swp")

# What tokens and keys look like: Hugging Face, AWS, GitHub, OpenAI-like, Slack, Google, PEM; and a password that is given.
SECRETS = {
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{20,}",
    "an AWS key": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "a GitHub token": r"\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_[A-Za-z0-9_]{30,}",
    "an API key": r"\bsk-[A-Za-z0-9_-]{24,}|\bAIza[0-9A-Za-z_-]{35}",
    "a Slack token": r"\bxox[abprs]-[A-Za-z0-9-]{10,}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "a password": r"(?i:\b\w*(?:password|passwd|api_?key|secret_key|auth_token)[\"']?\s*[=:]\s*[\"']?)(?!None\b|str\b|\$|<)[^\s\"',)\]}\[({]{4,}",
    "a password in an address": r"\b[a-z][a-z0-9+.-]*://[^/\s:@\"'{}]+:[^/\s:@\"'{}]+@",
}


def findings(root: Path) -> list[str]:
    """One line per offence below `root`, which itself is looked at by name only."""
    paths = (root, *sorted(root.rglob("*")))
    return [f"{path.relative_to(root.parent)}: {offence}" for path in paths for offence in _offences(path)]


def _offences(path: Path) -> Iterator[str]:
    if path.name.startswith("."):
        yield "its name starts with a dot"
    if any(letter.isspace() for letter in path.name):
        yield "there is a blank in its name"
    if path.name in CACHES or path.name.endswith(CACHE_SUFFIXES):
        yield "is a cache or something built"
    if path.is_symlink():
        yield "is a link"
    elif path.is_file() and (size := path.stat().st_size) > SIZE_LIMIT:
        yield f"is {size / 2**20:.0f} MB, the limit is {SIZE_LIMIT >> 20} MB"
    elif path.is_file():
        yield from secrets_in(path.read_bytes())


def secrets_in(data: bytes) -> Iterator[str]:
    """What looks like a secret, with its line; never the secret itself."""
    text = data.decode("latin-1")
    for kind, pattern in SECRETS.items():
        if match := re.search(pattern, text):
            yield f"line {text.count(chr(10), 0, match.start()) + 1} looks like {kind}"
