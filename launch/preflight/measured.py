"""What each measuring process reports: one JSON file per rank. Standard library only."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from common.errors import write_whole

UNITS = {
    "bf16 GEMM": "TFLOP/s",
    "FP8 GEMM": "TFLOP/s",
    "copy": "TB/s",
    "all-reduce": "GB/s",
    "all-gather": "GB/s",
}
COLLECTIVES = ("all-reduce", "all-gather")
START_S = 240.0  # imports, the first collective, compilation for the self-test; longer means that something hangs


def limit_s(seconds: float) -> float:
    """Time after which a rank gives up: enough for a GPU at a quarter of its siblings' speed."""
    return START_S + 4 * seconds * len(UNITS)


@dataclass
class Measured:
    """One rank's findings. Sizes in bytes, speeds in UNITS; a name missing from `speeds` was not measured."""

    rank: int  # also the index of its GPU among the visible ones
    phase: str = "start"  # "done" at the end; anything else is where it stopped
    error: str = ""
    name: str = ""
    arch: str = ""
    memory_bytes: int = 0
    compute_units: int = 0
    uuid: str = ""
    pci: str = ""  # 0000:1b:00.0
    used_bytes: int = 0  # on the GPU before we allocate: other processes, and our own context
    speeds: dict[str, float] = field(default_factory=dict)
    attention: str = ""  # the backend that runs it
    self_test_s: float = 0.0
    self_test: list[tuple[str, str, bool]] = field(
        default_factory=list
    )  # op, finding, whether it is good (common/training/self_test.py)

    @property
    def label(self) -> str:
        """`GPU 3 (GPU-8f2..., 0000:1b:00.0)`: the visible index, and how the driver names the card."""
        return f"GPU {self.rank} ({', '.join(filter(None, (self.uuid, self.pci))) or 'no address'})"

    def write(self, folder: Path, phase: str = "") -> None:
        """Replace the rank's file as a whole, so that a reader never sees half of it; with `phase`, that begins now."""
        self.phase = phase or self.phase
        write_whole(folder / f"rank_{self.rank}.json", json.dumps(asdict(self)).encode())


def read_ranks(folder: Path) -> list[Measured]:
    found = [Measured(**json.loads(path.read_text())) for path in folder.glob("rank_*.json")]
    return sorted(found, key=lambda rank: rank.rank)
