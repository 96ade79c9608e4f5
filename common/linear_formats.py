"""Number formats of the blocks' linear layers: the values of the config key `linear`.

    linear = "bf16"      products in the precision of the run: bf16, and fp32 on a CPU
    linear = "fp8"       products in FP8 with one scale per tensor (common/kernels/fp8.py)
    linear = "mxfp4+stochastic until step 340, then fp8"
                         research: an emulated block format with options, until a step or a loss
                         (common/model/emulated_layers.py)

The config, `plan` and the log read a LinearFormat before torch is imported. Its implementation,
LinearLayers or a subclass (common/model/linear_layers.py), defines how tensors are quantized, how
they are multiplied and which state that needs. Standard library only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache


@dataclass(frozen=True)
class LinearFormat:
    """Properties of a number format: its name in the log, its bytes, its implementation."""

    name: str
    implementation: str  # "module:class": a LinearLayers, which only ranks import
    # Value of `lowest_numerical_precision_in_linear` in the MLPerf log. "": precision of the run.
    log_precision: str = ""
    # Bytes of one element of an operand in one layout. 0: as in the precision of the run.
    bytes_per_element: int = 0
    # Casts of a trained weight that are kept besides the weight, one per layout. They are made once
    # per optimizer step.
    weight_copies: int = 0
    in_fp8: bool = False  # kernels store operands in FP8, and so does the frozen base of LoRA
    # Products are only emulated. The log says so, and `package` refuses such a run.
    emulated: bool = False
    options: tuple[str, ...] = ()  # options of an emulated format
    # End of an emulated format, "step 340" or "loss 3.6": after this step, or at the first
    # evaluation at or below this loss. "": it never ends.
    until: str = ""
    then: str = ""  # the format after that: "fp8" or "bf16"

    @property
    def stores_fp8(self) -> bool:
        """Whether kernels store operands in FP8, from the first step on or after `until`."""
        return self.in_fp8 or (self.then != "" and FORMATS[self.then].in_fp8)

    def operand_bytes(self, run_bytes: int) -> int:
        """Return the bytes of one element of an operand, in one layout.

        `run_bytes`: bytes of an element in the precision of the run.
        """
        return self.bytes_per_element or run_bytes


LAYERS = "common.model.linear_layers:LinearLayers"
DELAYED_SCALING = "common.model.linear_layers:DelayedScaling"
EMULATED_LAYERS = "common.model.emulated_layers:EmulatedLayers"


def _emulated(name: str, log_precision: str) -> LinearFormat:
    """Return a format of common/kernels/block_formats.py."""
    # Emulated casts have the precision of the run, in both layouts.
    return LinearFormat(name, EMULATED_LAYERS, log_precision, weight_copies=2, emulated=True)


FORMATS = {
    number_format.name: number_format
    for number_format in (
        LinearFormat("bf16", LAYERS),
        LinearFormat(
            "fp8", DELAYED_SCALING, "fp8", bytes_per_element=1, weight_copies=2, in_fp8=True
        ),
        _emulated("mxfp8", "fp8"),
        _emulated("mxfp8_hybrid", "fp8"),
        _emulated("mxfp6_e2m3", "mxfp6"),
        _emulated("mxfp6_e3m2", "mxfp6"),
        _emulated("mxfp4", "mxfp4"),
        _emulated("nvfp4", "nvfp4"),
    )
}
# Syntax of an emulated format: its options in this order, and its end.
EMULATED_SYNTAX = re.compile(
    r"(?P<name>\w+)(?P<options>(\+stochastic)?(\+(random_)?hadamard)?(\+square_weights)?)"
    r"( until (?P<until>step [1-9]\d{0,7}|loss \d{1,3}(\.\d{1,9})?), then (?P<then>fp8|bf16))?",
    re.ASCII,
)


@cache
def linear_format(text: str) -> LinearFormat | None:
    """Return the format that a config calls `text`, or None if it is unknown."""
    if text in FORMATS:
        return FORMATS[text]
    match = EMULATED_SYNTAX.fullmatch(text)
    if match is None or match["name"] not in FORMATS or not FORMATS[match["name"]].emulated:
        return None
    options = tuple(match["options"].split("+")[1:])
    return replace(
        FORMATS[match["name"]],
        options=options,
        until=match["until"] or "",
        then=match["then"] or "",
    )
