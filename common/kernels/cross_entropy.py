"""Cross entropy of next-token logits, summed per sequence: loss = logsumexp(z) - z[label], natural logarithm."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORE_INDEX = -100  # a label that does not count, as in Hugging Face


def cross_entropy_reference(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """logits: [batch, sequence, vocab]; labels: int [batch, sequence].

    Returns (loss_sum, count), both fp32 [batch]: the sum over the sequence's valid tokens and how many there are.
    Log-sum-exp and sums are computed in fp32 whatever the logits' dtype.
    """
    losses = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten().long(), ignore_index=IGNORE_INDEX, reduction="none")
    return losses.view_as(labels).sum(-1), (labels != IGNORE_INDEX).sum(-1, dtype=torch.float32)


cross_entropy = cross_entropy_reference
