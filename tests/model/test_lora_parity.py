"""Compare the Llama with adapters to transformers with peft: logits, loss, gradients, 20 steps.

peft adapts query, key and value separately. With one A for all three and the rows of our B, it
computes the same function.
"""

import itertools

import pytest
import torch
from fused_lora import lora_llama
from test_lora_adapter import random_adapters
from test_model import assert_near, pair

from common.kernels.cross_entropy import IGNORE_INDEX
from common.model import peft_adapter as adapter
from common.model.linear_layers import LinearLayers
from common.model.llama import Llama
from common.model.lora import init_adapters
from common.model.shapes import ModelShape
from common.sharding.optimizer import UPDATE_RULES
from common.sharding.replicated import ReplicatedOptimizer
from common.training.assembly import Assembly, Batching
from common.training.loop import train_step
from common.training.schedules import cosine_to_zero
from llama2_70b_lora.rules import CLOSED

SHAPES = {  # shape, rank, alpha
    "groups of 2": (ModelShape(3, 32, 48, 4, 2, 61, 10000.0), 4, 10),
    "one kv head, odd sizes": (ModelShape(2, 30, 35, 3, 1, 53, 10000.0), 3, 3),
    "qwen3, wide heads, tied": (
        ModelShape(
            2, 40, 48, 4, 2, 61, 10000.0, explicit_head_dim=16, qk_norm=True, tied_embedding=True
        ),
        *(4, 10),
    ),
    "no groups, rank and alpha of the rules": (
        ModelShape(2, 64, 40, 4, 4, 67, 10000.0),
        CLOSED.lora_rank,
        CLOSED.lora_alpha,
    ),
}
LENGTH, SEQUENCES = 19, 4
STEPS, LEARNING_RATE, CURVE_TOLERANCE = 20, 3e-3, 1e-4


def adapted_pair(name: str, fresh: bool = False, tied: bool = True):
    """Ours and peft's model with equal weights and adapters, without dropout.

    `fresh`: adapters as a run begins with them, B zero. Otherwise random ones, so that every
    gradient is there. `tied`: the three A of peft are one parameter, so that training keeps them
    equal and their gradient is the sum that ours is.
    """
    peft = pytest.importorskip("peft")  # here: not every worker of pytest needs it
    shape, rank, alpha = SHAPES[name]
    ours, theirs = pair(shape, LENGTH)
    ours = lora_llama(ours, rank, alpha)
    if fresh:
        init_adapters(ours, seed=5)
    else:
        put(ours, random_adapters(shape, rank))
    targets = [*adapter.SPLIT, adapter.OUTPUT]
    theirs = peft.get_peft_model(
        theirs,
        peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM"),
    )
    for layer in theirs.base_model.model.model.layers if tied else []:
        for module in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            module.lora_A["default"].weight = layer.self_attn.q_proj.lora_A["default"].weight
    peft.set_peft_model_state_dict(theirs, adapter.peft_tensors(trained(ours), shape))
    return ours, theirs


def put(model: Llama, adapters: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in trained(model).items():
            parameter.copy_(adapters[name])


def trained(model: Llama) -> dict[str, torch.nn.Parameter]:
    return {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }


def batch_of(vocab_size: int, seed: int) -> torch.Tensor:
    """Return tokens and labels, [sequences, 2, length], with different numbers of masked labels."""
    windows = torch.randint(
        vocab_size, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(seed)
    )
    batch = torch.stack((windows[:, :-1], windows[:, 1:]), dim=1)
    for number, labels in enumerate(batch[:, 1]):
        labels[: 5 * number] = IGNORE_INDEX
    return batch


def their_loss(model, batch: torch.Tensor) -> torch.Tensor:
    """Mean over the sequences of each one's mean over the labels that count."""
    tokens, labels = batch.unbind(1)
    losses = torch.nn.functional.cross_entropy(
        model(tokens).logits.transpose(1, 2), labels, ignore_index=IGNORE_INDEX, reduction="none"
    )
    return (losses.sum(1) / (labels != IGNORE_INDEX).sum(1)).mean()


def their_adapters(model, shape: ModelShape, gradients: bool) -> dict[str, torch.Tensor]:
    """Return peft's tied adapters, or their gradients, under our names.

    B holds the rows of query, key and value stacked.
    """
    found = {}
    for number, layer in enumerate(model.base_model.model.model.layers):
        attention = layer.self_attn

        def value(parameter):
            return (parameter.grad if gradients else parameter).detach()

        rows = [
            value(module.lora_B["default"].weight)
            for module in (attention.q_proj, attention.k_proj, attention.v_proj)
        ]
        found[f"blocks.{number}.qkv.lora_a"] = value(attention.q_proj.lora_A["default"].weight)
        found[f"blocks.{number}.qkv.lora_b"] = torch.cat(rows)
        found[f"blocks.{number}.o.lora_a"] = value(attention.o_proj.lora_A["default"].weight)
        found[f"blocks.{number}.o.lora_b"] = value(attention.o_proj.lora_B["default"].weight)
    return found


@pytest.mark.parametrize("name", SHAPES)
def test_logits_loss_and_adapter_gradients_agree_with_peft(name):
    shape = SHAPES[name][0]
    ours, theirs = adapted_pair(name)
    batch = batch_of(shape.vocab_size, seed=3)

    loss_sum, count = ours(*batch.unbind(1))
    loss = (loss_sum / count).mean()
    loss.backward()
    expected = their_loss(theirs, batch)
    expected.backward()

    assert_near(ours(batch[:, 0]), theirs(batch[:, 0]).logits, "logits")
    assert_near(loss, expected, "loss")
    gradients = their_adapters(theirs, shape, gradients=True)
    assert trained(ours).keys() == gradients.keys(), "adapters train, and nothing else"
    for parameter_name, parameter in trained(ours).items():
        assert_near(parameter.grad, gradients[parameter_name], parameter_name)
    assert all(
        parameter.grad is None for parameter in ours.parameters() if not parameter.requires_grad
    )


def test_separate_adapters_of_peft_give_the_sum_of_their_gradients_to_our_a():
    """dA is the sum of dA of peft's query, key and value, so the other tests may tie them."""
    ours, theirs = adapted_pair("groups of 2", tied=False)
    batch = batch_of(ours.shape.vocab_size, seed=3)
    loss_sum, count = ours(*batch.unbind(1))
    (loss_sum / count).mean().backward()
    their_loss(theirs, batch).backward()
    for number, layer in enumerate(theirs.base_model.model.model.layers):
        parts = [
            getattr(layer.self_attn, part).lora_A["default"].weight.grad for part in adapter.SPLIT
        ]
        assert_near(ours.blocks[number].qkv.lora_a.grad, sum(parts), f"A of block {number}")


def test_twenty_steps_follow_a_loop_of_peft_and_torch(processes):
    name = "no groups, rank and alpha of the rules"
    shape = SHAPES[name][0]
    ours, theirs = adapted_pair(name, fresh=True)
    # Two in turn: there is something to learn.
    batches = [batch_of(shape.vocab_size, seed=step % 2) for step in range(STEPS)]

    make_rule = UPDATE_RULES["adamw"](CLOSED, "reference", torch.float32)
    assembly = Assembly(
        ours, ReplicatedOptimizer(trained(ours).values(), processes, make_rule), LinearLayers()
    )
    micro_batches = itertools.chain.from_iterable(batch.split(2) for batch in batches)
    lr_at, batching = cosine_to_zero(LEARNING_RATE, 2 * STEPS), Batching(SEQUENCES, SEQUENCES // 2)
    curve = [
        train_step(assembly, micro_batches, batching, lr_at(step), processes)
        for step in range(STEPS)
    ]

    expected = their_curve(theirs, batches)
    for index, what in enumerate(("loss", "gradient norm")):
        assert [float(step[index]) for step in curve] == pytest.approx(
            [step[index] for step in expected], rel=CURVE_TOLERANCE
        ), what
    assert (
        expected[-1][0] < 0.9 * expected[1][0]
        and max(norm for _, norm in expected) > CLOSED.gradient_clip_norm
    )
    for parameter_name, reached in their_adapters(theirs, shape, gradients=False).items():
        error = (trained(ours)[parameter_name] - reached).norm() / reached.norm()
        assert error < 10 * CURVE_TOLERANCE, parameter_name


def their_curve(model, batches: list[torch.Tensor]) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step, with what torch and transformers have."""
    from transformers import get_cosine_schedule_with_warmup

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=LEARNING_RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-4
    )
    schedule = get_cosine_schedule_with_warmup(optimizer, 0, 2 * len(batches))
    curve = []
    for batch in batches:
        loss = their_loss(model, batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.3)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        curve.append((loss.item(), norm.item()))
    return curve
