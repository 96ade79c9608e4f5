"""The machine and the request that select the config of a run."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from common.command_line import overrides_of
from common.errors import ConfigError
from common.gpu_kinds import GIB, GpuKind
from common.hardware import Device, Probe, identify, probe


@dataclass(frozen=True)
class Machine:
    """The visible GPUs of this host, or of an imagined one."""

    probe: Probe
    gpu_kind: str = ""  # GPU_KIND, the kind that the user says they are

    @classmethod
    def of(cls, environment: Mapping[str, str], device: str | None = None) -> Machine:
        """Ask the driver for the GPUs of this host, unless `device`, of --device, is "cpu".

        Raises PreflightError if a driver is installed but does not answer.
        """
        gpus = Probe("none") if device == "cpu" else probe(environment)
        return cls(gpus, environment.get("GPU_KIND", ""))

    @classmethod
    def imagined(cls, kind: GpuKind, gpus: int) -> Machine:
        """Return a machine with `gpus` whole GPUs of a kind of common/gpu_kinds.py."""
        device = Device(kind.name, kind.arch, kind.memory_bytes, kind.compute_units)
        return cls(Probe(kind.vendor, (device,) * gpus))

    @property
    def gpus(self) -> int:
        """Number of visible GPUs."""
        return len(self.probe.devices)

    @cached_property
    def kind(self) -> GpuKind | None:
        """Kind of the GPUs, None without any. Raises the errors of `common.hardware.identify`."""
        return identify(self.probe, self.gpu_kind)

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


NO_GPUS = Machine(Probe("none"))


@dataclass(frozen=True)
class Request:
    """The config that a command line asks for, whatever files and GPUs there are."""

    benchmark: str
    file: str | None = None  # --config
    system: str = ""  # DGXSYSTEM
    gpus: int = 0  # DGXNGPU, 0 if it is not set
    miniature: bool = False
    overrides: Mapping[str, str] = field(default_factory=dict)  # key -> text of --set
    layers: int = 0  # --layers, 0 for all layers of the model
    device: str = ""  # --device, "" for the GPUs if there are any
    # Variables that show that the full benchmark is wanted, or that allow known issues.
    environment: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, benchmark: str, options: argparse.Namespace, environment: Mapping[str, str]
    ) -> Request:
        """Return the request of `options`, which has config and perhaps the other fields.

        Raises ConfigError for a DGXNGPU that is not a number of GPUs, and for a wrong --set.
        """
        return cls(
            benchmark,
            file=options.config,
            system=environment.get("DGXSYSTEM", "").removesuffix(".toml"),
            gpus=_requested_gpus(environment),
            miniature=getattr(options, "miniature", False),
            overrides=overrides_of(getattr(options, "set", ())),
            layers=getattr(options, "layers", None) or 0,
            device=getattr(options, "device", None) or "",
            environment=environment,
        )


def _requested_gpus(environment: Mapping[str, str]) -> int:
    """Return DGXNGPU, 0 if it is not set. Raise ConfigError if it is not a number of GPUs."""
    text = environment.get("DGXNGPU", "")
    if text and (not text.isdecimal() or int(text) < 1):
        raise ConfigError(
            f"DGXNGPU={text} is not a number of GPUs", "it must be 1 or more", "correct or unset it"
        )
    return int(text or 0)
