"""Compare the loss on answers with transformers and peft, in fp32 on a CPU.

Their loss is their own: the mean over the labels of the whole batch that are not -100.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from chat_steps import BATCH, DOCUMENTS, LENGTH, VOCAB, one_step, write_documents
from ranks import call_on_ranks
from test_lora_parity import their_adapters
from test_model import hugging_face

from common.data.indexed_dataset import Index
from common.data.shuffled_epochs import shuffled_epochs
from common.model.peft_adapter import OUTPUT, SPLIT, peft_tensors
from common.model.shapes import ModelShape
from open_llama.exported_weights import adapter_sizes

SHAPE = ModelShape(2, 32, 48, 4, 2, VOCAB, 10000.0)
RTOL = 1e-5
LORA = {"lora_rank": 4, "lora_alpha": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    torch.manual_seed(3)
    hugging_face(SHAPE, LENGTH, kind="Llama").save_pretrained(folder)
    sizes = adapter_sizes(SHAPE, LORA["lora_rank"])
    torch.save(
        {name: 0.3 * torch.randn(size) for name, size in sizes.items()}, folder / "adapters.pt"
    )
    write_documents(folder)
    return folder


def their_batch(folder: Path, split: str, numbers: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and labels of documents, [documents, LENGTH + 1], as transformers takes them."""
    index = Index.read(folder / split)
    ids = torch.zeros(len(numbers), LENGTH + 1, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    with index.open_tokens() as tokens:
        for row, number in enumerate(numbers):
            length, counted = DOCUMENTS[number]
            stored = np.array(tokens.read_sequence(number, 0, min(length, LENGTH + 1)), np.int64)
            ids[row, : len(stored)] = torch.from_numpy(stored)
            kept = [place for place in counted if place <= LENGTH]
            labels[row, kept] = ids[row, kept]
    return ids, labels


@pytest.fixture(scope="module")
def expected(folder) -> dict[bool, dict[str, torch.Tensor]]:
    """The loss and the gradients of transformers (False), and with adapters of peft (True)."""
    peft = pytest.importorskip("peft")
    found = {}
    with_labels = [0, 1, 2, 3]  # the documents that have one
    order = shuffled_epochs(len(with_labels), 1)
    batch = their_batch(folder, "train", [with_labels[next(order)] for _ in range(BATCH)])
    evaluated = their_batch(folder, "validation", [0, 1, 2])
    for lora in (False, True):
        torch.manual_seed(3)
        model = hugging_face(SHAPE, LENGTH, kind="Llama")
        if lora:
            targets = [*SPLIT, OUTPUT]
            settings = peft.LoraConfig(
                r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM"
            )
            model = peft.get_peft_model(model, settings)
            for layer in model.base_model.model.model.layers:
                shared = layer.self_attn.q_proj.lora_A["default"].weight
                for module in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                    module.lora_A["default"].weight = shared
            adapters = torch.load(folder / "adapters.pt")
            peft.set_peft_model_state_dict(model, peft_tensors(adapters, SHAPE))
        loss = model(batch[0], labels=batch[1]).loss
        loss.backward()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        found[lora] = {
            "loss": loss.detach(),
            "norm": torch.sqrt(sum(each.square().sum() for each in gradients)),
            "evaluation": model(evaluated[0], labels=evaluated[1]).loss.detach(),
        }
        if lora:
            found[lora] |= their_adapters(model, SHAPE, gradients=True)
    return found


def require_equal(ours: dict, theirs: dict) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        # The rounding of a sum in fp32 follows its largest addends, also for an element near 0.
        atol = RTOL * float(value.abs().max())
        torch.testing.assert_close(ours[name].to(value.dtype), value, rtol=RTOL, atol=atol)


@pytest.mark.parametrize("micro_batch_size", [4, 2, 1])
@pytest.mark.parametrize("keys", [{}, LORA], ids=["all weights", "LoRA"])
def test_loss_and_gradients_are_those_of_transformers(
    keys, micro_batch_size, folder, expected, processes
):
    """Also accumulated over micro-batches that count 1 to 20 tokens."""
    (folder / "run.json").write_text(json.dumps(keys | {"micro_batch_size": micro_batch_size}))
    require_equal(one_step(processes, folder), expected[bool(keys)])


@pytest.mark.parametrize("more", [{}, {"context_parallel": 2}], ids=["", "shared sequences"])
@pytest.mark.parametrize("keys", [{}, LORA], ids=["all weights", "LoRA"])
def test_two_ranks_have_the_same_loss_and_gradients(keys, more, folder, expected):
    (folder / "run.json").write_text(json.dumps(keys | more | {"gpus_per_node": 2}))
    first, second = call_on_ranks(2, "chat_steps:one_step", folder)
    assert first["loss"] != second["loss"], "parts of the loss"
    for rank in (first, second):
        require_equal(rank | {"loss": first["loss"] + second["loss"]}, expected[bool(keys)])
