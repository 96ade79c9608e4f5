"""Machine: the GPUs of this host, as a run would see them. Standard library only."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from common import values
from common.config import RunConfig
from common.errors import ConfigError
from common.estimate.links import NETWORK_GB_S
from common.gpu_kinds import GIB, KINDS, GpuKind
from common.machine.hardware import Device, Probe, identify, probe
from common.suggestions import unknown
from common.values import of_variable

# Reason of an error if a GPU is needed and none is visible.
NO_GPU = "no driver answers, or *_VISIBLE_DEVICES hides all GPUs, or this is another machine"


@dataclass(frozen=True)
class Machine:
    """The visible GPUs of this host, or of an imagined one."""

    probe: Probe
    gpu_kind: str = ""  # GPU_KIND or --gpu-kind, the kind that the user says they are
    is_forced: bool = False  # gpu_kind is from --gpu-kind, and precedes the driver's name
    is_imagined: bool = False  # the software of an imagined machine is unknown
    network_gb_s: float = NETWORK_GB_S  # of one GPU between nodes

    @classmethod
    def of(
        cls, environment: Mapping[str, str], device: str | None = None, gpu_kind: str = ""
    ) -> Machine:
        """Ask the driver for the GPUs of this host, unless `device`, of --device, is "cpu".

        `gpu_kind`: value of --gpu-kind.

        Raises PreflightError if a driver is installed but does not answer.
        """
        gpus = Probe("none") if device == "cpu" else probe(environment)
        named = of_variable(environment, "GPU_KIND", values.gpu_kind) or ""
        return cls(gpus, gpu_kind or named, bool(gpu_kind))

    @classmethod
    def imagined(cls, kind: GpuKind, gpus: int, network_gb_s: float = NETWORK_GB_S) -> Machine:
        """Return a machine with `gpus` whole GPUs of a kind of common/gpu_kinds.py."""
        device = Device(kind.name, kind.arch, kind.memory_bytes, kind.compute_units)
        probe = Probe(kind.vendor, (device,) * gpus)
        return cls(probe, is_imagined=True, network_gb_s=network_gb_s)

    @property
    def gpus(self) -> int:
        """Number of visible GPUs."""
        return len(self.probe.devices)

    @cached_property
    def kind(self) -> GpuKind | None:
        """Kind of the GPUs, None without any. Raises the errors of `identify`."""
        return identify(self.probe, self.gpu_kind, self.is_forced)

    def describe(self, kind: GpuKind | None) -> str:
        """Return number, kind, product, memory in GiB and driver of the GPUs, for display.

        `kind`: None for a run on the CPU.
        """
        if kind is None:
            return "not used (running on the CPU)" if self.gpus else "none"
        first = self.probe.devices[0]
        details = [first.name or first.arch, f"{first.memory_bytes / GIB:.0f} GiB each"]
        if self.probe.driver:
            details.append(f"driver {self.probe.driver}")
        return f"{self.gpus} x {kind.name} ({', '.join(details)})"

    def kind_named(self, name: str) -> GpuKind | None:
        """Return the kind of this name: this machine's, or one of KINDS. None for any other."""
        return self.kind if self.kind and self.kind.name == name else KINDS.get(name)

    def kind_of(self, config: RunConfig) -> GpuKind | None:
        """Return the kind of a config's GPUs, None for a CPU. Raises ConfigError if unknown."""
        kind = self.kind_named(config.gpu)
        if kind is None and config.gpu != "CPU":
            raise unknown_kind(config.gpu)
        return kind


NO_GPUS = Machine(Probe("none"))


def add_machine_options(parser: argparse.ArgumentParser) -> None:
    """Add --device, and --gpu-kind, a kind that precedes the driver's name of the GPUs."""
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="device to use (default: the GPUs if there are any; cuda includes ROCm)",
    )
    parser.add_argument(
        "--gpu-kind",
        type=values.gpu_kind,
        choices=list(KINDS),
        metavar="KIND",
        help="treat the GPUs as this kind, whatever the driver names them (not for submission)",
    )


def unknown_kind(name: str) -> ConfigError:
    """Return the error for a config whose `gpu` is not a known kind."""
    return unknown(f"gpu = {name!r} is unknown", name, KINDS)
