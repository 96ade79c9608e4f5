"""Results of the probe for GPUs on machines that the tests need not have."""

from common.gpu_kinds import GIB
from common.machine.hardware import Device, Probe

H200X4 = Probe("nvidia", (Device("NVIDIA H200", "sm_90", 143771 * 2**20),) * 4, "580.95.05")
MI300X = Probe("amd", (Device("AMD Instinct MI300X", "gfx942", 192 * GIB, 304),) * 8)
NOTHING = Probe("none")


def make_visible(monkeypatch, gpus: Probe) -> None:
    """Let the driver of this machine, which every command asks through Machine.of, show `gpus`."""
    monkeypatch.setattr("launch.selection.machine.probe", lambda environment: gpus)
