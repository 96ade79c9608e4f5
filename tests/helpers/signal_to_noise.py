"""Measure how far a value is from the truth."""

import torch


def sqnr_db(value: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the signal-to-quantization-noise ratio in decibels, over all elements."""
    signal = truth.double().norm()
    noise = (value.double() - truth.double()).norm()
    return float(20 * torch.log10(signal / noise))
