"""Adapters for peft, and merged into a checkpoint: both give the logits of our model with LoRA."""

import errno
import json
import math
import os
import re
import resource
import shutil
from signal import SIGTERM
from unittest import mock

import pytest
import torch
from fused_lora import lora_llama
from killed_writer import leave_behind
from safetensors.torch import load_file, save_file
from test_model import pair

from common.atomic_write import new_folder
from common.errors import ConfigError, StorageError, WeightsError
from common.model import checkpoint_names, merged_adapter
from common.model import peft_adapter as adapter
from common.model.checkpoint_writer import write_checkpoint
from common.model.fused_block import fused_llama
from common.model.initialization import copy_weight, init_weights
from common.model.llama import Llama
from common.model.lora import adapter_parameters
from common.model.merged_adapter import merge
from common.model.shapes import ModelShape
from llama2_70b_lora import merge as merge_command
from llama2_70b_lora.rules import MINIATURE
from open_llama import merge as open_merge_command

SHAPE = ModelShape(3, 32, 48, 4, 2, 61, 10000.0)
RANK, ALPHA, LENGTH = 4, 10, 17
TOLERANCE = 1e-5  # of logits, in fp32: L2 norm of the difference to that of the logits


def random_adapters(shape: ModelShape = SHAPE, rank: int = RANK) -> dict[str, torch.Tensor]:
    """Return adapters as large as the base weights, so that a wrong row or factor shows."""
    generator = torch.Generator().manual_seed(1)
    sizes = {
        "qkv": (shape.hidden_size, shape.qkv_size),
        "o": (shape.attention_size, shape.hidden_size),
    }
    tensors = {}
    for layer in range(shape.num_layers):
        for part, (inputs, outputs) in sizes.items():
            tensors[f"blocks.{layer}.{part}.lora_a"] = 0.2 * torch.randn(
                rank, inputs, generator=generator
            )
            tensors[f"blocks.{layer}.{part}.lora_b"] = 0.2 * torch.randn(
                outputs, rank, generator=generator
            )
    return tensors


def with_adapters(model: Llama, tensors: dict[str, torch.Tensor]) -> Llama:
    """Return the model with adapters, without dropout, as in an evaluation."""
    model = lora_llama(model, RANK, ALPHA, dropout=0.1)
    with torch.no_grad():
        for name, parameter in adapter_parameters(model).items():
            parameter.copy_(tensors[name])
    return model.eval()


def save(folder, tensors):
    base = folder.with_name("ordinary")
    adapter.save_peft_adapter(folder, tensors, SHAPE, RANK, ALPHA, 0.1, base)
    return folder


def save_fused(folder, state: dict[str, torch.Tensor]) -> None:
    """Save in the layout of MLCommons: query, key and value stacked, two shards and an index."""
    folder.mkdir()
    fused = {}
    for name, tensor in state.items():
        if ".q_proj." in name:
            fused[name.replace("q_proj", "qkv_proj")] = torch.cat(
                [state[name.replace("q_proj", part)] for part in adapter.SPLIT]
            )
        elif ".k_proj." not in name and ".v_proj." not in name:
            fused[name] = tensor.clone()
    shards = {
        f"model-0000{number + 1}-of-00002.safetensors": list(fused)[number::2]
        for number in range(2)
    }
    for shard, names in shards.items():
        save_file({name: fused[name] for name in names}, folder / shard, metadata={"format": "pt"})
    index = {
        "metadata": {},
        "weight_map": {name: shard for shard, names in shards.items() for name in names},
    }
    (folder / checkpoint_names.INDEX).write_text(json.dumps(index))


def test_a_full_disk_is_a_storage_error_and_leaves_no_partial_adapter(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))  # python ignores SIGXFSZ
    try:
        with pytest.raises(StorageError, match="File too large") as failure:
            save(tmp_path / "adapter", random_adapters())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (
        failure.value.exit_code == 17 and "MB" in failure.value.why and not list(tmp_path.iterdir())
    )
    leave_behind("new_folder", tmp_path / "adapter")
    save(tmp_path / "adapter", random_adapters())
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
    with pytest.raises(FileExistsError):
        save(tmp_path / "adapter", random_adapters())


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Both layouts of a small base, adapters for peft, tokens, and our model's logits."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("adapter")
    ours, theirs = pair(SHAPE, LENGTH)
    theirs.save_pretrained(folder / "ordinary", max_shard_size="20KB")
    (folder / "ordinary" / "tokenizer.model").write_bytes(b"words")
    (folder / "ordinary" / "pytorch_model.bin").write_bytes(b"the same weights as a pickle")
    save_fused(folder / "fused", theirs.state_dict())
    config = json.loads((folder / "ordinary" / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"}
    (folder / "fused" / "config.json").write_text(json.dumps(config))
    for name in ("modeling_llama.py", "manifest.json", ".manifest.json.lock"):
        (folder / "fused" / name).write_text("of the base")
    tensors = random_adapters()
    save(folder / "adapter", tensors)
    tokens = torch.randint(
        SHAPE.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(2)
    )
    with torch.no_grad():
        logits = with_adapters(ours, tensors)(tokens)
    return folder, theirs, tensors, tokens, logits


def execute(base, adapter, out, command=merge_command) -> int:
    """Return the exit code of `merge`, by default that of llama2_70b_lora."""
    arguments = {"--base": base, "--adapter": adapter, "--out": out}
    return command.main([str(word) for pair in arguments.items() for word in pair])


@pytest.fixture(scope="module")
def merged(made):
    for layout in ("ordinary", "fused"):
        assert execute(made[0] / layout, made[0] / "adapter", made[0] / f"merged_{layout}") == 0
    return made[0]


def test_merge_finds_the_base_in_the_adapter_of_a_run(merged, tmp_path):
    shutil.copytree(merged / "adapter", tmp_path / "run/adapter")
    path = tmp_path / "run/adapter/adapter_config.json"
    base = str(merged / "ordinary")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": base}))
    words = ["--adapter", str(tmp_path / "run"), "--out", str(tmp_path / "out")]
    assert merge_command.main(words) == 0
    found = all_tensors(tmp_path / "out")
    expected = all_tensors(merged / "merged_ordinary")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def assert_near(logits, expected) -> None:
    assert (logits - expected).norm() <= TOLERANCE * expected.norm()


def all_tensors(folder) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def test_peft_loads_the_adapter_onto_the_base_with_our_logits(made):
    peft = pytest.importorskip("peft")
    from transformers import LlamaForCausalLM

    folder, _, _, tokens, logits = made
    base = LlamaForCausalLM.from_pretrained(folder / "ordinary", attn_implementation="eager")
    with torch.no_grad():
        plain = base(tokens).logits
        loaded = peft.PeftModel.from_pretrained(base, folder / "adapter")
        assert_near(loaded.eval()(tokens).logits, logits)
    assert (plain - logits).norm() > 0.1 * logits.norm(), (
        "the adapters change nothing: the test shows nothing"
    )
    config = loaded.peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout, config.bias) == (
        RANK,
        ALPHA,
        0.1,
        "none",
    )
    assert config.target_modules == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    } and config.base_model_name_or_path == str(folder / "ordinary")
    with torch.no_grad():
        found = peft.AutoPeftModelForCausalLM.from_pretrained(folder / "adapter")
        assert_near(found.eval()(tokens).logits, logits)


@pytest.mark.parametrize("layout", ["ordinary", "fused"])
def test_transformers_loads_the_merged_checkpoint_with_our_logits(made, merged, layout):
    from transformers import AutoModelForCausalLM

    _, _, _, tokens, logits = made
    model, loaded = AutoModelForCausalLM.from_pretrained(
        merged / f"merged_{layout}",
        attn_implementation="eager",
        dtype=torch.float32,
        output_loading_info=True,
    )
    assert not loaded["missing_keys"] and not loaded["unexpected_keys"]
    with torch.no_grad():
        assert_near(model(tokens).logits, logits)


def test_both_layouts_are_merged_to_the_same_bits(merged):
    ordinary, fused = all_tensors(merged / "merged_ordinary"), all_tensors(merged / "merged_fused")
    assert ordinary.keys() == fused.keys()
    for name, tensor in fused.items():
        assert torch.equal(tensor, ordinary[name])
    before = all_tensors(merged / "ordinary")
    changed = {
        name.split(".")[-2]
        for name, tensor in fused.items()
        if not torch.equal(tensor, before[name])
    }
    assert changed == {*adapter.SPLIT, "o_proj"}


def test_the_files_of_a_merged_checkpoint_have_the_mode_of_the_umask(made, tmp_path):
    umask = os.umask(0o027)
    try:
        assert execute(made[0] / "fused", made[0] / "adapter", tmp_path / "out") == 0
    finally:
        os.umask(umask)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o640}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        checkpoint_names.INDEX,
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }


def test_a_base_of_the_benchmark_needs_no_config_json(tmp_path):
    from transformers import AutoModelForCausalLM

    shape = MINIATURE.shape
    model = fused_llama(shape, MINIATURE.sequence_length)
    init_weights(model, shape.num_layers, 1, 0.05, copy_weight)
    write_checkpoint(model, tmp_path / "base", files=1, layout=checkpoint_names.FUSED)
    (tmp_path / "base" / "config.json").unlink()
    tensors = random_adapters(shape)
    base = tmp_path / "base"
    adapter.save_peft_adapter(tmp_path / "adapter", tensors, shape, RANK, ALPHA, 0.1, base)
    assert execute(tmp_path / "base", tmp_path / "adapter", tmp_path / "out") == 0
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", dtype=torch.float32
    )
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH)
    with torch.no_grad():
        assert_near(loaded(tokens).logits, with_adapters(model, tensors)(tokens))


def test_a_merge_keeps_shards_index_and_small_files_and_copies_no_other_weights(merged):
    before, after = (
        {path.name for path in (merged / name).iterdir()}
        for name in ("ordinary", "merged_ordinary")
    )
    assert (
        before - after == {"pytorch_model.bin"}
        and after <= before
        and len(list(merged.glob("ordinary/*.safetensors"))) > 2
    )
    assert (merged / "merged_ordinary" / "tokenizer.model").read_bytes() == b"words"
    for path in (merged / "ordinary").glob("*.safetensors"):
        assert load_file(path).keys() == load_file(merged / "merged_ordinary" / path.name).keys()


def test_a_merge_in_bf16_rounds_once(made, tmp_path, capsys):
    _, theirs, tensors, _, _ = made
    theirs.save_pretrained(tmp_path / "config")
    save_fused(
        tmp_path / "base", {name: tensor.bfloat16() for name, tensor in theirs.state_dict().items()}
    )
    shutil.copy(tmp_path / "config" / "config.json", tmp_path / "base")
    merge(tmp_path / "base", made[0] / "adapter", tmp_path / "out")
    assert f"{tmp_path / 'out'}: complete" in capsys.readouterr().err
    before, after = all_tensors(tmp_path / "base"), all_tensors(tmp_path / "out")
    for layer in range(SHAPE.num_layers):
        name = f"model.layers.{layer}.self_attn.qkv_proj.weight"
        a, b = (tensors[f"blocks.{layer}.qkv.lora_{letter}"].double() for letter in "ab")
        exact = before[name].double() + ALPHA / RANK * b @ a
        rows = torch.cat([after[name.replace("qkv_proj", part)] for part in adapter.SPLIT])
        assert rows.dtype == torch.bfloat16
        # Half a unit in the last place of 8 bits, and a little for the fp32 sum.
        assert ((rows.double() - exact).abs() <= 1.001 * 2**-8 * exact.abs() + 1e-6).all()


def test_nothing_is_overwritten(made, merged, tmp_path):
    with pytest.raises(FileExistsError):
        save(made[0] / "adapter", made[2])
    with pytest.raises(ConfigError, match="exists"):
        merge(merged / "fused", merged / "adapter", merged / "merged_fused")
    with (
        new_folder(tmp_path / "out") as folder,
        pytest.raises(ConfigError, match="is being written") as caught,
    ):
        merge(merged / "fused", merged / "adapter", tmp_path / "out")
    assert folder.name in caught.value.why


def test_a_merge_removes_what_a_killed_one_left(merged, tmp_path):
    leave_behind("new_folder", tmp_path / "out")
    assert execute(merged / "fused", merged / "adapter", tmp_path / "out") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert not (tmp_path / "out/half").exists()


def test_a_merge_that_is_terminated_ends_with_143_and_leaves_no_files(
    merged, tmp_path, monkeypatch
):
    monkeypatch.setattr(merged_adapter, "write_file", lambda *_: os.kill(os.getpid(), SIGTERM))
    assert execute(merged / "ordinary", merged / "adapter", tmp_path / "out") == 128 + SIGTERM
    assert not list(tmp_path.iterdir())


def test_a_failed_merge_leaves_no_files(merged, tmp_path, monkeypatch):
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(OSError, match="No space left"):
        merge(merged / "fused", merged / "adapter", tmp_path / "out", add=full)
    monkeypatch.setattr(merged_adapter, "write_file", full)
    with pytest.raises(OSError, match="No space left"):
        merge(merged / "fused", merged / "adapter", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def _edit_config(**changes):
    def spoil(base, saved):
        config = json.loads((saved / adapter.ADAPTER_CONFIG).read_text())
        (saved / adapter.ADAPTER_CONFIG).write_text(json.dumps(config | changes))

    return spoil


def _edit_tensors(change):
    def spoil(base, saved):
        tensors = load_file(saved / adapter.WEIGHTS)
        change(tensors)
        save_file(tensors, saved / adapter.WEIGHTS)

    return spoil


KEY = "base_model.model.model.layers.1.self_attn.k_proj.lora_B.weight"
FAULTS = [
    ("DoRA", _edit_config(use_dora=True), "cannot merge use_dora True"),
    ("scale by the root of the rank", _edit_config(use_rslora=True), "use_rslora"),
    ("trained biases", _edit_config(bias="all"), "bias all"),
    ("another method", _edit_config(peft_type="LOHA"), "peft_type LOHA"),
    ("another rank", _edit_config(r=8), "A or B of rank 8"),
    ("no rank", _edit_config(r=None), "r is None"),
    (
        "broken configuration",
        lambda base, saved: (saved / adapter.ADAPTER_CONFIG).write_text("{"),
        adapter.ADAPTER_CONFIG,
    ),
    ("no adapter", lambda base, saved: (saved / adapter.WEIGHTS).unlink(), adapter.WEIGHTS),
    (
        "half an adapter",
        _edit_tensors(lambda tensors: tensors.pop(KEY)),
        "k_proj.lora_B",
    ),
    (
        "a layer too many",
        _edit_tensors(lambda t: t.update({KEY.replace("1", "7"): t[KEY].clone()})),
        "layers.7",
    ),
    (
        "other rows",
        _edit_tensors(lambda t: t.update({KEY: t[KEY][:-1].clone()})),
        "the adapter of .*qkv_proj",
    ),
    (
        "another module",
        _edit_tensors(lambda t: t.update({KEY.replace("k_proj", "up_proj"): t[KEY].clone()})),
        "up_proj",
    ),
    (
        "missing shard",
        lambda base, saved: min(base.glob("*.safetensors")).unlink(),
        "model.safetensors.index.json",
    ),
    (
        "truncated shard",
        lambda base, saved: _truncate(min(base.glob("*.safetensors"))),
        "model-00001-of-00002",
    ),
    (
        "no checkpoint",
        lambda base, saved: [path.unlink() for path in base.glob("*.safetensors")],
        "safetensors",
    ),
    (
        "another model without config.json",
        lambda base, saved: (base / "config.json").unlink(),
        "config.json",
    ),
    ("integer weights", lambda base, saved: _integers(base), "the base is I8"),
    ("an integer buffer", lambda base, saved: _add_integers(base), "ids: unsupported dtype I64"),
]


NOT_FINITE = [
    ("NaN in the adapter", _edit_tensors(lambda t: t[KEY][0].fill_(math.nan)), "k_proj.lora_B"),
    (
        "infinity in the adapter",
        _edit_tensors(lambda t: t[KEY][0].fill_(math.inf)),
        "k_proj.lora_B",
    ),
    ("alpha NaN", _edit_config(lora_alpha=math.nan), "lora_alpha nan"),
    ("alpha infinite", _edit_config(lora_alpha=math.inf), "lora_alpha inf"),
    ("alpha beyond fp32", _edit_config(lora_alpha=1e308), r"lora_alpha 1e\+308"),
    ("alpha beyond fp64", _edit_config(lora_alpha=10**400), "lora_alpha 1000"),
    ("alpha true", _edit_config(lora_alpha=True), "lora_alpha True"),
    ("a product beyond fp32", _edit_tensors(lambda t: t[KEY].fill_(3e38)), "k_proj.weight"),
    ("NaN in the base", lambda base, saved: _nan_base(base), "NaN or infinite"),
]


def _nan_base(base):
    path = min(base.glob("*.safetensors"))
    tensors = load_file(path)
    max(tensors.values(), key=torch.Tensor.numel).view(-1)[:1] = math.nan
    save_file(tensors, path)


def _truncate(path):
    path.write_bytes(path.read_bytes()[:-10])


def _integers(base):
    for path in base.glob("*.safetensors"):
        save_file({name: tensor.to(torch.int8) for name, tensor in load_file(path).items()}, path)


def _add_integers(base):
    path = min(base.glob("*.safetensors"))
    save_file(load_file(path) | {"model.ids": torch.arange(4)}, path)


@pytest.mark.parametrize(
    ("spoil", "message"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS]
)
def test_an_adapter_or_base_that_does_not_fit_is_refused_before_anything_is_written(
    made, tmp_path, spoil, message
):
    save_fused(tmp_path / "base", made[1].state_dict())
    shutil.copy(made[0] / "fused" / "config.json", tmp_path / "base")
    save(tmp_path / "adapter", made[2])
    spoil(tmp_path / "base", tmp_path / "adapter")
    with pytest.raises(WeightsError, match=message):
        merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter"}


@pytest.mark.parametrize(
    ("spoil", "message"), [case[1:] for case in NOT_FINITE], ids=[case[0] for case in NOT_FINITE]
)
@pytest.mark.parametrize("command", [merge_command, open_merge_command])
def test_no_weight_that_is_not_finite_is_written(made, tmp_path, capsys, command, spoil, message):
    save_fused(tmp_path / "base", made[1].state_dict())
    shutil.copy(made[0] / "fused" / "config.json", tmp_path / "base")
    save(tmp_path / "adapter", made[2])
    spoil(tmp_path / "base", tmp_path / "adapter")
    code = execute(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", command)
    assert code == WeightsError.exit_code
    assert re.search(message, capsys.readouterr().err)
    assert {path.name for path in tmp_path.iterdir()} == {"base", "adapter"}


def test_adapters_that_are_not_finite_are_not_saved(tmp_path):
    tensors = random_adapters()
    tensors["blocks.1.o.lora_b"][0, 0] = math.nan
    with pytest.raises(WeightsError, match=r"blocks\.1\.o\.lora_b"):
        save(tmp_path / "adapter", tensors)
    assert not list(tmp_path.iterdir())


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    assert execute(tmp_path, tmp_path / "nothing", tmp_path / "out") == ConfigError.exit_code
    assert f"{tmp_path / 'nothing'}: no such folder" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert execute(tmp_path, tmp_path / "empty", tmp_path / "out") == WeightsError.exit_code
    assert "adapter_config.json" in capsys.readouterr().err
