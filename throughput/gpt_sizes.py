"""The sizes of the GPTs that `throughput gpt` and `throughput scaling` train."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GptShape:
    """Sizes of a GPT."""

    num_layers: int
    num_heads: int
    hidden_size: int
    ffn_hidden_size: int
    vocab_size: int = 50257  # GPT-2's

    @property
    def matmul_parameters(self) -> int:
        """Number of weights that multiply each token: linear layers, and the embedding as the head.

        Biases are not counted.
        """
        per_layer = self.hidden_size * (4 * self.hidden_size + 2 * self.ffn_hidden_size)
        return self.num_layers * per_layer + self.vocab_size * self.hidden_size

    def num_parameters(self, sequence_length: int) -> int:
        """Return the number of all parameters.

        The position embedding has one row for each token of the sequence.
        """
        per_layer = 9 * self.hidden_size + self.ffn_hidden_size
        biases_and_norms = self.num_layers * per_layer + 2 * self.hidden_size
        positions = sequence_length * self.hidden_size
        return self.matmul_parameters + positions + biases_and_norms

    def training_flops_per_token(self, sequence_length: int) -> int:
        """Return 6*N + 6*L*S*H, in which causal attention counts half of the square.

        N: `matmul_parameters`, L: layers, S: sequence length, H: hidden size.
        common/model/shapes.py counts the FLOPs of Llama in the same way.
        """
        return 6 * self.matmul_parameters + 6 * self.num_layers * sequence_length * self.hidden_size


@dataclass(frozen=True)
class Size:
    """A shape, and the batch and sequence length at which it is measured."""

    shape: GptShape
    batch: int
    sequence_length: int


# The eight sizes of a published benchmark of one MI350X, whose rows are in
# common/measure/published.json. Its models "7b" and "13b" have 5.2 and 10.1 billion parameters.
SIZES = {
    "small": Size(GptShape(6, 6, 384, 1536), 32, 512),
    "medium": Size(GptShape(12, 12, 768, 3072), 16, 512),
    "large": Size(GptShape(24, 16, 1024, 4096), 8, 512),
    "xl": Size(GptShape(36, 20, 1280, 5120), 4, 512),
    "1.5b": Size(GptShape(48, 24, 1536, 6144), 4, 512),
    "3b": Size(GptShape(32, 32, 2560, 10240), 2, 512),
    "7b": Size(GptShape(32, 32, 4096, 11008), 8, 1024),
    "13b": Size(GptShape(40, 40, 5120, 13824), 4, 1024),
}
# Sizes for a CPU. They show that the command works, and say nothing about the machine.
STAND_INS = {
    "tiny": Size(GptShape(2, 2, 64, 256, 2048), 2, 64),
    "mini": Size(GptShape(4, 4, 128, 512, 2048), 2, 64),
}
