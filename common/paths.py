"""Root of the repository, which holds the packages, configs/ and the scripts."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
