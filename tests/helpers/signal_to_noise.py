"""Measure how far a value is from the truth."""

import torch


def sqnr_db(value: torch.Tensor, truth: torch.Tensor) -> float:
    """Signal to quantization noise, in decibels."""
    return float(20 * torch.log10(truth.double().norm() / (value.double() - truth.double()).norm()))
