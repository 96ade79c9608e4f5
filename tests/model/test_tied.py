"""Test a tied embedding: one weight whose gradient sums both uses, on one and two ranks."""

from dataclasses import replace

import pytest
import torch
from ranks import call_on_ranks
from test_model import assert_near, hugging_face, their_names
from tiny import TINY, run_config, whole

from common.model.shapes import ModelShape
from common.training.pretraining import assemble_random

# 61 rows do not divide by 2.
SHAPE = ModelShape(
    2, 40, 48, 4, 2, 61, 10000.0, explicit_head_dim=16, qk_norm=True, tied_embedding=True
)
RULES = replace(TINY, shape=SHAPE)
SEQUENCES = 8


def windows():
    return torch.randint(
        SHAPE.vocab_size,
        (SEQUENCES, RULES.sequence_length + 1),
        generator=torch.Generator().manual_seed(2),
    )


def one_step(processes, folder=None):
    """Initial weights, this rank's rows of the gradients, and the weights after a step."""
    assembly = assemble_random(
        run_config(gpus_per_node=processes.world_size), RULES, processes, seed=7
    )
    model, optimizer = assembly.model, assembly.optimizer
    initial = whole(model)
    mine = windows().chunk(processes.world_size)[processes.rank]
    for micro_batch in mine.chunk(2):
        loss_sum, count = model(micro_batch[:, :-1], micro_batch[:, 1:])
        ((loss_sum / count).sum() / SEQUENCES * processes.world_size).backward()
    optimizer.finish_reduction()
    gradients = {
        name: optimizer.shard_of[parameter].gradient.clone()
        for name, parameter in model.named_parameters()
    }
    assembly.step(1e-2)
    tied = model.head.output.weight.data_ptr() == model.embedding.weight.data_ptr()
    return {"initial": initial, "gradients": gradients, "stepped": whole(model), "tied": tied}


def expected_gradients(initial):
    theirs = hugging_face(SHAPE, RULES.sequence_length)
    parameters = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, weight in initial.items():
            for its, rows in zip(
                their_names(name),
                weight.split([len(parameters[its]) for its in their_names(name)]),
                strict=True,
            ):
                parameters[its].copy_(rows)
    tokens = windows()
    logits = theirs(tokens[:, :-1]).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    return {
        name: torch.cat([parameters[its].grad for its in their_names(name)]) for name in initial
    }


@pytest.fixture(scope="module")
def one_rank(processes):
    return one_step(processes)


def test_the_gradient_sums_both_uses_of_the_weight(one_rank):
    assert one_rank["tied"] and "head.output.weight" not in one_rank["initial"]
    for name, expected in expected_gradients(one_rank["initial"]).items():
        assert_near(one_rank["gradients"][name], expected, name)
    assert not torch.equal(
        one_rank["stepped"]["embedding.weight"], one_rank["initial"]["embedding.weight"]
    )


def test_two_ranks_agree_with_one(one_rank, tmp_path):
    ranks = call_on_ranks(2, "test_tied:one_step", tmp_path)
    for name, expected in one_rank["gradients"].items():
        rows = torch.cat([rank["gradients"][name] for rank in ranks])[: len(expected)]
        assert_near(rows, expected, name)
        assert torch.equal(ranks[0]["stepped"][name], ranks[1]["stepped"][name]), name
    assert all(rank["tied"] for rank in ranks)
