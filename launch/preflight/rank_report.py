"""The report of one measuring process, and its file rank_<k>.json. Standard library only."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from common.atomic_write import write_whole

UNITS = {
    "bf16 GEMM": "TFLOP/s",
    "FP8 GEMM": "TFLOP/s",
    "copy": "TB/s",
    "all-reduce": "GB/s",
    "all-gather": "GB/s",
}
COLLECTIVES = ("all-reduce", "all-gather")
# Seconds for imports, the first collective and the compilation of the self-test's kernels.
START_S = 240.0


def limit_s(seconds: float) -> float:
    """Return the seconds after which a rank ends itself, because it hangs.

    A GPU that runs at a quarter of the others' speed still finishes in time.
    """
    return START_S + 4 * seconds * len(UNITS)


@dataclass
class RankReport:
    """Measurements of one rank and its GPU. Sizes are in bytes, speeds in UNITS.

    A speed that is missing from `speeds` was not measured.
    """

    rank: int  # rank, and index of its GPU among the visible GPUs
    phase: str = "start"  # "done" at the end; otherwise the phase in which it stopped
    error: str = ""
    name: str = ""
    arch: str = ""
    memory_bytes: int = 0
    compute_units: int = 0
    uuid: str = ""
    pci: str = ""  # for example 0000:1b:00.0
    # In use before preflight allocates anything: by other processes, and by its own context.
    used_bytes: int = 0
    speeds: dict[str, float] = field(default_factory=dict)
    attention: str = ""  # the backend of attention
    engines: dict[str, str] = field(default_factory=dict)  # operation -> engine, why, times
    engine_notes: list[str] = field(default_factory=list)  # problems of the kept times
    self_test_s: float = 0.0
    # Op, finding, whether it is good (common/self_test/).
    self_test: list[tuple[str, str, bool]] = field(default_factory=list)

    @property
    def label(self) -> str:
        """Visible index and the driver's name of the card: `GPU 3 (GPU-8f2..., 0000:1b:00.0)`."""
        return f"GPU {self.rank} ({', '.join(filter(None, (self.uuid, self.pci))) or 'no address'})"

    def write(self, folder: Path, phase: str = "") -> None:
        """Replace the rank's file atomically.

        `phase`: the phase that begins now, "" to keep the current one.
        """
        self.phase = phase or self.phase
        write_whole(folder / f"rank_{self.rank}.json", json.dumps(asdict(self)).encode())


def read_ranks(folder: Path) -> list[RankReport]:
    """Return the reports of all measuring processes in `folder`, in the order of their ranks."""
    reports = [RankReport(**json.loads(path.read_text())) for path in folder.glob("rank_*.json")]
    return sorted(reports, key=lambda report: report.rank)
