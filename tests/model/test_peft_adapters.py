"""Compare the loss of peft's adapters with peft, or test that they are refused."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_config_json import VOCAB, tokens
from test_model import hugging_face

from common.errors import WeightsError
from common.kernels.attention import attention_backends
from common.model.checkpoint_names import ADAPTER_CONFIG
from common.model.merged_adapter import merge
from common.model.peft_adapter import OUTPUT, SPLIT, WEIGHTS
from common.model.shapes import ModelShape
from open_llama.evaluation import add_adapter, load_model

peft = pytest.importorskip("peft")

TARGETS = [*SPLIT, OUTPUT]
LENGTH = 64
TOLERANCE = 2e-5  # of the loss, in fp32
# Keys of adapter_config.json that peft 0.5 did not write.
LATER = """
alora_invocation_tokens alpha_pattern arrow_config corda_config ensure_weight_tying eva_config
exclude_modules kasa_config layer_replication loftq_config lora_bias lora_ga_config megatron_config
megatron_core monteclora_config peft_version qalora_group_size rank_pattern target_parameters
trainable_token_indices use_bdlora use_dora use_qalora use_rslora velora_config
""".split()  # noqa: SIM905
# Options of LoraConfig, then changes of adapter_config.json after saving: None removes a key.
EQUAL = {
    "as peft saves it": ({}, {}),
    "another order": ({}, {"target_modules": TARGETS[::-1]}),
    "for training": ({}, {"inference_mode": False}),
    "without a task": ({}, {"task_type": None}),
    "old peft": ({}, dict.fromkeys(("peft_version", "use_dora", "lora_bias", "use_rslora"))),
    "peft 0.5, another order": ({}, dict.fromkeys(LATER) | {"target_modules": TARGETS[::-1]}),
    "switched off": ({}, {"use_rslora": False, "use_dora": False, "modules_to_save": []}),
    "new peft": ({}, {"use_new_lora": False, "new_config": None, "new_list": []}),
    "drawn otherwise": ({"init_lora_weights": "gaussian"}, {}),
    "dropout": ({"lora_dropout": 0.3}, {}),
    "fraction of alpha": ({"lora_alpha": 3}, {"lora_alpha": 2.5}),
}
REFUSED = {
    "rslora": ({"use_rslora": True}, {}, "use_rslora True"),
    "dora": ({"use_dora": True}, {}, "use_dora True"),
    "rslora and dora": ({"use_rslora": True, "use_dora": True}, {}, "use_dora True, use_rslora"),
    "dora of peft 0.5": ({"use_dora": True}, dict.fromkeys(LATER), "lora_magnitude_vector"),
    "modules to save": ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save"),
    "two targets": ({"target_modules": ["q_proj", "v_proj"]}, {}, "target_modules"),
    "all targets": ({"target_modules": "all-linear"}, {}, "target_modules"),
    "a pattern of targets": ({"target_modules": r".*\.[qkvo]_proj"}, {}, "target_modules"),
    "ranks": ({"rank_pattern": {"q_proj": 2}}, {}, "rank_pattern"),
    "alphas": ({"alpha_pattern": {"q_proj": 2}}, {}, "alpha_pattern"),
    "one layer": ({"layers_to_transform": [0]}, {}, "layers_to_transform"),
    "the first layer": ({"layers_to_transform": 0}, {}, "layers_to_transform 0"),
    "biases": ({"bias": "all"}, {}, "bias all"),
    "bias of B": ({"lora_bias": True, "bias": "none"}, {}, "lora_bias"),
    "base changed at the start": ({"init_lora_weights": "pissa"}, {}, "init_lora_weights pissa"),
    "another rank in the settings": ({}, {"r": 8}, "of rank 8"),
    "another method": ({}, {"peft_type": "IA3"}, "peft_type IA3"),
    "new method": ({}, {"new_lora": True}, "new_lora True"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(1)
    shape = ModelShape(2, 64, 96, 4, 2, VOCAB, 10000.0)
    hugging_face(shape, 256, "Llama", initializer_range=0.2).save_pretrained(folder)
    return folder


def load_base(base):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


def save(base, folder, options, changes):
    """Save an adapter with random numbers as peft does."""
    torch.manual_seed(2)
    settings = {"r": 4, "lora_alpha": 10, "target_modules": TARGETS, "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(load_base(base), peft.LoraConfig(**settings | options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_A" in name or ".lora_B" in name:
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    path = folder / ADAPTER_CONFIG
    config = json.loads(path.read_text()) | changes
    removed = {key for key, value in changes.items() if value is None and not key.startswith("new")}
    path.write_text(json.dumps({k: v for k, v in config.items() if k not in removed}))
    return folder


def their_loss(model) -> float:
    with torch.no_grad():
        logits = model.eval()(tokens()[:, :-1]).logits.flatten(0, 1)
    return float(torch.nn.functional.cross_entropy(logits, tokens()[:, 1:].flatten()))


def our_loss(folder, adapter=None) -> float:
    ids = tokens().int()
    with attention_backends("cpu", torch.float32), torch.no_grad():
        model = load_model(folder, LENGTH, torch.device("cpu"))
        if adapter:
            add_adapter(model, adapter)
        sums, counts = model(ids[:, :-1], ids[:, 1:])
    return float((sums / counts).mean())


@pytest.mark.parametrize("name", EQUAL)
def test_eval_and_merge_compute_what_peft_does(base, tmp_path, name):
    adapter = save(base, tmp_path / "adapter", *EQUAL[name])
    expected = their_loss(peft.PeftModel.from_pretrained(load_base(base), adapter))
    assert abs(our_loss(base, adapter) - expected) < TOLERANCE
    assert abs(our_loss(base) - expected) > 1e-2, "the adapter changes nothing"
    merge(base, adapter, tmp_path / "merged")
    assert abs(our_loss(tmp_path / "merged") - expected) < TOLERANCE


@pytest.mark.parametrize("name", REFUSED)
def test_other_adapters_are_refused_by_eval_and_merge(base, tmp_path, name):
    options, changes, words = REFUSED[name]
    adapter = save(base, tmp_path / "adapter", options, changes)
    for attempt in (
        lambda: our_loss(base, adapter),
        lambda: merge(base, adapter, tmp_path / "merged"),
    ):
        with pytest.raises(WeightsError, match=words):
            attempt()
    assert not (tmp_path / "merged").exists()


FOREIGN = {
    "a module that the settings do not name": ("mlp.up_proj.lora_A.weight", (4, 64)),
    "sizes of DoRA": ("self_attn.q_proj.lora_magnitude_vector", (64,)),
    "the name of the adapter": ("self_attn.q_proj.lora_A.default.weight", (4, 64)),
    "a vector": ("self_attn.q_proj.lora_A.weight", (4,)),
    "another rank": ("self_attn.q_proj.lora_A.weight", (8, 64)),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_tensors_that_are_not_of_plain_lora_are_refused(base, tmp_path, name):
    adapter = save(base, tmp_path / "adapter", {}, {})
    key, size = FOREIGN[name]
    key = f"base_model.model.model.layers.0.{key}"
    save_file(load_file(adapter / WEIGHTS) | {key: torch.ones(size)}, adapter / WEIGHTS)
    with pytest.raises(WeightsError, match="lora_"):
        our_loss(base, adapter)


def test_a_pipe_is_no_adapter(base, tmp_path):
    adapter = save(base, tmp_path / "adapter", {}, {})
    (adapter / WEIGHTS).unlink()
    os.mkfifo(adapter / WEIGHTS)
    with pytest.raises(WeightsError, match=WEIGHTS):
        our_loss(base, adapter)
