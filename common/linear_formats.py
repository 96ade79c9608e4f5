"""Number formats of the blocks' linear layers: the values of the config key `linear`.

    linear = "bf16"      products in the precision of the run: bf16, and fp32 on a CPU
    linear = "fp8"       products in FP8 with one scale per tensor (common/kernels/fp8.py)

The config, `plan` and the log read a LinearFormat before torch is imported. Its implementation,
LinearLayers or a subclass (common/model/linear_layers.py), defines how tensors are quantized, how
they are multiplied and which state that needs. Another format is one more entry of FORMATS, which
a study can also add from outside (tests/gpu/studies/emulated_layers.py). Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass


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

    def operand_bytes(self, run_bytes: int) -> int:
        """Return the bytes of one element of an operand, in one layout.

        `run_bytes`: bytes of an element in the precision of the run.
        """
        return self.bytes_per_element or run_bytes


LAYERS = "common.model.linear_layers:LinearLayers"
DELAYED_SCALING = "common.model.linear_layers:DelayedScaling"
FORMATS = {
    "bf16": LinearFormat("bf16", LAYERS),
    "fp8": LinearFormat(
        "fp8", DELAYED_SCALING, "fp8", bytes_per_element=1, weight_copies=2, in_fp8=True
    ),
}
