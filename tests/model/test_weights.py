"""Test the loader of base weights: both layouts, any sharding, single reads, invalid files."""

import hashlib
import json
import os
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from damage import flip
from ranks import call_on_ranks
from safetensors.torch import load_file, save_file
from tiny import LORA, lora_config

from common.data.manifest import Manifest, facts_of
from common.errors import StorageError, WeightsError
from common.model import checkpoint_loader, checkpoint_names, checkpoint_reader, initialization
from common.model.checkpoint_loader import load_base
from common.model.checkpoint_names import rope_scaling_of, tensor_shapes
from common.model.checkpoint_reader import open_checkpoint
from common.model.checkpoint_writer import write_checkpoint
from common.model.fused_block import fused_llama
from common.model.initialization import copy_weight, init_weights
from common.model.lora import adapter_parameters
from common.model.shapes import ModelShape, RopeScaling
from common.training.continuation import base_record
from common.training.finetuning import assemble_lora

SHAPE = ModelShape(2, 32, 48, 4, 2, 61, 10000.0)  # 61 rows of vocabulary do not divide by 2 ranks


def model_of(dtype=torch.float32, seed=None):
    model = fused_llama(SHAPE, 16).to(dtype)
    if seed is None:
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, float("nan"))  # whatever is not loaded will show
    else:
        init_weights(model, SHAPE.num_layers, seed, 0.5, copy_weight)
    return model


def values(model):
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, msg=name)


def test_the_largest_tensors_are_drawn_first(monkeypatch):
    monkeypatch.setattr(initialization, "thread_count", lambda: 1)
    sizes = []
    model = fused_llama(SHAPE, 16)
    init_weights(model, 2, 5, 0.5, lambda parameter, full: sizes.append(full.numel()))
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) > 3


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The same model in both layouts, fp32."""
    folder, model = tmp_path_factory.mktemp("weights"), model_of(seed=5)
    for layout in ("fused", "ordinary"):
        write_checkpoint(model, folder / layout, files=3, layout=layout)
    return folder, values(model)


@pytest.fixture
def copy(stored, tmp_path):
    """The fused checkpoint again, to be damaged."""
    return Path(shutil.copytree(stored[0] / "fused", tmp_path / "fused"))


# ---- loading


@pytest.mark.parametrize("layout", ["fused", "ordinary"])
def test_both_layouts_give_the_same_model(stored, layout):
    model = model_of()
    report = load_base(model, stored[0] / layout)
    assert_same(values(model), stored[1])
    assert report.layout == layout and report.bytes == 4 * SHAPE.num_parameters
    assert report.seconds > 0


@pytest.mark.parametrize("stored_as", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32])
def test_dtypes_are_converted_once(stored, tmp_path, stored_as, wanted):
    source = model_of(seed=5)
    write_checkpoint(source, tmp_path, dtype=stored_as)
    model = model_of(wanted)
    load_base(model, tmp_path)
    assert_same(
        values(model), {name: tensor.to(stored_as).to(wanted) for name, tensor in stored[1].items()}
    )


def test_a_single_file_is_loaded_equally_in_pieces_of_any_size(stored, tmp_path, monkeypatch):
    """Pieces smaller than a tensor, than a row, and one file without an index."""
    tensors = {}
    for file in (stored[0] / "ordinary").glob("*.safetensors"):
        tensors.update(load_file(file))
    # Old checkpoints carry it.
    tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, tmp_path / "model.safetensors")
    for chunk in (300, 1):
        monkeypatch.setattr(checkpoint_loader, "CHUNK", chunk)
        model = model_of()
        load_base(model, tmp_path)
        assert_same(values(model), stored[1])


def test_transformers_computes_the_same_from_the_same_files(stored):
    transformers = pytest.importorskip("transformers")
    tokens = torch.randint(SHAPE.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
    theirs = transformers.LlamaForCausalLM.from_pretrained(
        stored[0] / "ordinary", dtype=torch.float32
    )
    model = model_of()
    load_base(model, stored[0] / "fused")
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scaling", [None, RopeScaling(factor=32.0)])
def test_the_scaling_of_the_rotation_must_be_that_of_the_checkpoint(tmp_path, scaling):
    shape = replace(SHAPE, rope_scaling=scaling)
    model = fused_llama(shape, 16)
    init_weights(model, shape.num_layers, 5, 0.5, copy_weight)
    write_checkpoint(model, tmp_path)
    assert open_checkpoint(tmp_path, shape).tensors
    for other in {None, RopeScaling(), RopeScaling(factor=32.0)} - {scaling}:
        with pytest.raises(WeightsError, match="rope_scaling"):
            open_checkpoint(tmp_path, replace(SHAPE, rope_scaling=other))


TIED = replace(SHAPE, tied_embedding=True)


def with_a_head(folder: Path, head: torch.Tensor | None = None) -> torch.Tensor:
    """Write a tied checkpoint that also stores `head`, by default the embedding.

    Return the embedding.
    """
    model = fused_llama(TIED, 16)
    init_weights(model, TIED.num_layers, 5, 0.5, copy_weight)
    write_checkpoint(model, folder)
    embedding = values(model)["embedding.weight"]
    stored = embedding.clone() if head is None else head
    save_file({"lm_head.weight": stored}, folder / "head.safetensors")
    change_index(
        folder, lambda weight_map: weight_map.update({"lm_head.weight": "head.safetensors"})
    )
    return embedding


@pytest.mark.parametrize("compared_bytes", [1000, 1 << 24])
def test_a_tied_checkpoint_may_store_its_head_again(tmp_path, monkeypatch, compared_bytes):
    monkeypatch.setattr(checkpoint_reader, "COMPARED_BYTES", compared_bytes)
    embedding = with_a_head(tmp_path)
    model = fused_llama(TIED, 16)
    load_base(model, tmp_path)
    assert torch.equal(values(model)["embedding.weight"], embedding)
    embedding = embedding.clone()
    embedding[-1, -1] += 1
    for head in (embedding, embedding.bfloat16(), embedding[:-1].clone()):
        with_a_head(tmp_path, head)
        with pytest.raises(WeightsError, match=r"lm_head\.weight differs") as caught:
            load_base(model, tmp_path)
        assert "tied" in caught.value.why and "tie_word_embeddings" in caught.value.do


# ---- sharded


def test_the_base_is_loaded_and_adapters_are_not(stored, processes):
    def load(model, base):
        for parameter in adapter_parameters(model).values():
            torch.nn.init.constant_(parameter, 7.0)
        load_base(model, stored[0] / "fused", None, base)
        assert all((parameter == 7.0).all() for parameter in adapter_parameters(model).values())

    assembly, base = assemble_lora(
        lora_config(gpus_per_node=processes.world_size), LORA, processes, 1, load
    )
    found = {
        name: tensor for name, tensor in values(assembly.model).items() if ".lora_" not in name
    }
    for layer in range(SHAPE.num_layers):
        found |= {
            f"blocks.{layer}.{name}.weight": weight.rowwise
            for name, weight in base.forward_weights(layer).items()
        }
    assert_same(found, stored[1])


def load_damaged(processes, folder):
    """On every rank: load a checkpoint of which one file changes after the manifest was written."""
    load_base(model_of(), folder / "checkpoint", folder / "manifest.json")
    processes.barrier()
    flip(folder / "checkpoint" / LAST, -1) if processes.rank == 0 else None
    processes.barrier()
    with pytest.raises(WeightsError) as refused:
        load_base(model_of(), folder / "checkpoint", folder / "manifest.json")
    return refused.value.what


def test_two_ranks_hash_and_both_report_the_damage(stored, tmp_path):
    shutil.copytree(stored[0] / "ordinary", tmp_path / "checkpoint")
    manifest_for(tmp_path / "checkpoint", tmp_path / "manifest.json")
    for what in call_on_ranks(2, "test_weights:load_damaged", tmp_path):
        assert f"SHA-256 of {LAST} differs" in what


# ---- refused


def manifest_for(folder, path):
    files = {file.name: facts_of(file) for file in folder.glob("*.safetensors")}
    Manifest("test", SHAPE.vocab_size, files).write(path)


def change_tensors(folder, change):
    """Rewrite the first shard with other tensors, and the index to fit."""
    file = folder / "model-00001-of-00003.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    index = json.loads((folder / checkpoint_names.INDEX).read_text())
    index["weight_map"] = {
        name: shard for name, shard in index["weight_map"].items() if shard != file.name
    }
    index["weight_map"] |= dict.fromkeys(tensors, file.name)
    (folder / checkpoint_names.INDEX).write_text(json.dumps(index))


def change_json(path, key, value):
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))


def change_header(folder, change):
    """Rewrite the first shard's header, data as they are."""
    file = folder / "model-00001-of-00003.safetensors"
    raw = file.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


EMBEDDING = "model.embed_tokens.weight"
FIRST, SECOND, LAST = (f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))


def only_pickles(folder):
    for file in folder.iterdir():
        file.unlink()
    (folder / "pytorch_model-00001-of-00002.bin").write_bytes(b"cos\nsystem\n(S'touch marker'\ntR.")


DAMAGE = {
    "missing shard": (
        lambda d: (d / LAST).unlink(),
        "model.safetensors.index.json",
    ),
    "missing shard and index": (
        lambda d: [(d / name).unlink() for name in (LAST, checkpoint_names.INDEX)],
        "of 17 tensors are missing: ",
    ),
    "two checkpoints": (
        lambda d: shutil.copy(d / FIRST, d / checkpoint_names.SINGLE),
        "model.safetensors is beside model.safetensors.index.json",
    ),
    "missing tensor": (
        lambda d: change_tensors(d, lambda t: t.pop(EMBEDDING)),
        f"1 of 17 tensors are missing: {EMBEDDING}",
    ),
    "unknown tensor": (
        lambda d: change_tensors(
            d, lambda t: t.update({"model.layers.0.self_attn.qkv_proj.bias": torch.ones(4)})
        ),
        "unknown tensor model.layers.0.self_attn.qkv_proj.bias",
    ),
    "one layer too many": (
        lambda d: change_tensors(
            d, lambda t: t.update({"model.layers.2.input_layernorm.weight": torch.ones(32)})
        ),
        "unknown tensor model.layers.2.input_layernorm.weight",
    ),
    "wrong shape": (
        lambda d: change_tensors(d, lambda t: t.update({EMBEDDING: torch.ones(62, 32)})),
        f"{EMBEDDING}: expected shape [61, 32], got [62, 32]",
    ),
    "wrong dtype": (
        lambda d: change_tensors(
            d, lambda t: t.update({EMBEDDING: torch.ones(61, 32, dtype=torch.int8)})
        ),
        f"{EMBEDDING}: unsupported dtype I8",
    ),
    "fp8": (
        lambda d: change_tensors(
            d, lambda t: t.update({EMBEDDING: t[EMBEDDING].to(torch.float8_e4m3fn)})
        ),
        "F8_E4M3",
    ),
    "mixed layouts": (
        lambda d: change_tensors(
            d, lambda t: t.update({"model.layers.1.self_attn.q_proj.weight": torch.ones(32, 32)})
        ),
        "unknown tensor model.layers.1.self_attn.q_proj.weight",
    ),
    "no Llama": (
        lambda d: save_json_index(d, {"transformer.h.0.weight": torch.ones(2)}),
        "21 of 21 tensors are missing: ",
    ),
    "a tensor in the index alone": (
        lambda d: change_index(d, lambda m: m.update({"model.more.weight": LAST})),
        "model.more.weight",
    ),
    "a tensor twice": (
        lambda d: shutil.copy(d / FIRST, d / LAST),
        f"{EMBEDDING} is also in {FIRST}",
    ),
    "truncated": (lambda d: truncate(d / FIRST, -1), "safetensors file"),
    "truncated in the header": (lambda d: truncate(d / FIRST, 40), "safetensors file"),
    "empty": (lambda d: truncate(d / FIRST, 0), "safetensors file"),
    "header no JSON": (lambda d: flip(d / FIRST, 8), "safetensors file"),
    "holes": (lambda d: change_header(d, shift_offsets), "safetensors file"),
    "negative shape": (
        lambda d: change_header(d, lambda h: h[EMBEDDING].update(shape=[-61, -32])),
        "safetensors file",
    ),
    "bytes and shape": (
        lambda d: change_header(d, lambda h: h[EMBEDDING].update(shape=[10**9, 32])),
        "safetensors file",
    ),
    "heads": (
        lambda d: change_json(d / "config.json", "num_attention_heads", 2),
        "num_attention_heads is 2",
    ),
    "rotation": (
        lambda d: change_json(d / "config.json", "rope_parameters", {"rope_theta": 500000.0}),
        "rope_theta is 500000.0",
    ),
    "scaled rotation": (
        lambda d: change_json(
            d / "config.json",
            "rope_scaling",
            rope_scaling_of(replace(SHAPE, rope_scaling=RopeScaling())),
        ),
        "rope_scaling is {'rope_type': 'llama3'",
    ),
    "scaled rotation of transformers 5": (
        lambda d: change_json(
            d / "config.json",
            "rope_parameters",
            {"rope_theta": SHAPE.rope_base, "rope_type": "linear", "factor": 2.0},
        ),
        "rope_scaling 'linear'",
    ),
    "scaling that is no object": (
        lambda d: change_json(d / "config.json", "rope_scaling", "llama3"),
        "rope_scaling is 'llama3'",
    ),
    "pickles only": (only_pickles, "safetensors files"),
    "index no JSON": (lambda d: (d / checkpoint_names.INDEX).write_text("{"), "JSON"),
    "index without a map": (
        lambda d: (d / checkpoint_names.INDEX).write_text("{}"),
        checkpoint_names.INDEX,
    ),
}


def truncate(path, size):
    path.write_bytes(path.read_bytes()[:size])


def change_index(folder, change):
    index = json.loads((folder / checkpoint_names.INDEX).read_text())
    change(index["weight_map"])
    (folder / checkpoint_names.INDEX).write_text(json.dumps(index))


def save_json_index(folder, tensors):
    for name in (SECOND, LAST):
        (folder / name).unlink()
    save_file(tensors, folder / FIRST)
    (folder / checkpoint_names.INDEX).write_text(
        json.dumps({"weight_map": dict.fromkeys(tensors, FIRST)})
    )


def shift_offsets(header):
    first = min(
        (name for name in header if name != "__metadata__"),
        key=lambda name: header[name]["data_offsets"][0],
    )
    begin, end = header[first]["data_offsets"]
    header[first] = header[first] | {
        "shape": [end - begin - 1],
        "dtype": "I8",
        "data_offsets": [begin + 1, end],
    }


STRAY = {
    "the publisher's own format": lambda d: save_file(
        {"layers.0.attention.wq.weight": torch.ones(2)}, d / "consolidated.safetensors"
    ),
    "an adapter": lambda d: save_file(
        {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(4, 2)},
        d / "adapter_model.safetensors",
    ),
    "a copy of a shard": lambda d: shutil.copy(d / FIRST, d / "old.safetensors"),
    "a Mac's file": lambda d: (d / f"._{FIRST}").write_bytes(b"Mac OS X"),
    "a state of the optimizer": lambda d: (d / "optimizer.safetensors").write_bytes(b""),
    "a pipe": lambda d: os.mkfifo(d / "pipe.safetensors"),
}


@pytest.mark.parametrize("kind", STRAY)
def test_the_index_says_which_files_are_read(stored, copy, kind):
    STRAY[kind](copy)
    checkpoint = open_checkpoint(copy, SHAPE)
    expected = open_checkpoint(stored[0] / "fused", SHAPE)
    assert [file.name for file in checkpoint.files] == [file.name for file in expected.files]
    assert checkpoint.tensors.keys() == expected.tensors.keys()
    assert base_record(copy).keys() == {FIRST, SECOND, LAST}
    (copy / checkpoint_names.INDEX).unlink()
    if kind != "a Mac's file":
        with pytest.raises(WeightsError):
            open_checkpoint(copy, SHAPE)


@pytest.mark.parametrize("name", [FIRST, checkpoint_names.INDEX, checkpoint_names.SINGLE])
def test_a_pipe_in_place_of_a_file_is_refused(copy, name):
    (copy / name).unlink(missing_ok=True)
    os.mkfifo(copy / name)
    with pytest.raises(WeightsError, match=name):
        open_checkpoint(copy, SHAPE)


@pytest.mark.parametrize("file", ["../a.safetensors", "/etc/passwd", "", None, 7])
def test_an_index_names_files_of_its_folder(copy, file):
    change_index(copy, lambda weight_map: weight_map.update({EMBEDDING: file}))
    with pytest.raises(WeightsError, match=checkpoint_names.INDEX):
        open_checkpoint(copy, SHAPE)


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_before_anything_is_copied(copy, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    damage, message = DAMAGE[kind]
    damage(copy)
    model = model_of()
    with pytest.raises(WeightsError) as caught:
        load_base(model, copy)
    assert message in caught.value.what and caught.value.why and caught.value.do
    assert caught.value.exit_code == 16 and caught.value.kind == "weights"
    assert all(parameter.isnan().all() for parameter in model.parameters())
    assert not (tmp_path / "marker").exists()


def test_the_names_that_the_files_have_instead_are_told(copy):
    def wrap(tensors):
        for name in list(tensors):
            tensors[f"_orig_mod.{name}"] = tensors.pop(name)

    change_tensors(copy, wrap)
    with pytest.raises(WeightsError, match="tensors are missing") as caught:
        load_base(model_of(), copy)
    assert "_orig_mod." in caught.value.why


def test_a_home_directory_is_not_expanded(tmp_path):
    (tmp_path / "~/base").mkdir(parents=True)
    with pytest.raises(WeightsError, match="safetensors files") as caught:
        load_base(model_of(), tmp_path / "~/base")
    assert "~ is not expanded" in caught.value.why


def test_a_flipped_byte_is_found_with_a_manifest(stored, copy, tmp_path):
    manifest_for(copy, tmp_path / "m.json")
    load_base(model_of(), copy, tmp_path / "m.json")
    flip(copy / LAST, -1)
    load_base(model_of(), copy)  # the last byte of a weight: without a manifest nobody can know
    model = model_of()
    with pytest.raises(WeightsError, match=f"SHA-256 of {LAST} differs"):
        load_base(model, copy, tmp_path / "m.json")
    assert all(parameter.isnan().all() for parameter in model.parameters())


def test_a_manifest_of_another_checkpoint_is_refused(stored, copy, tmp_path):
    manifest_for(stored[0] / "ordinary", tmp_path / "m.json")
    with pytest.raises(WeightsError, match=r"expected \d+ bytes by"):
        load_base(model_of(), copy, tmp_path / "m.json")
    Manifest("test", 61).write(tmp_path / "n.json")
    with pytest.raises(WeightsError, match=f"has no SHA-256 of {FIRST}"):
        load_base(model_of(), copy, tmp_path / "n.json")


def test_a_missing_folder_and_a_failing_disk_raise_their_errors(stored, tmp_path, monkeypatch):
    with pytest.raises(WeightsError, match="safetensors"):
        load_base(model_of(), tmp_path / "nowhere")

    def broken(*args):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(checkpoint_loader.os, "preadv", broken)
    with pytest.raises(StorageError, match="Input/output error"):
        load_base(model_of(), stored[0] / "fused")
    monkeypatch.setattr(checkpoint_loader.os, "preadv", lambda *args: 0)
    with pytest.raises(WeightsError, match="ends at byte"):
        load_base(model_of(), stored[0] / "fused")


# ---- written


def test_a_written_checkpoint_has_shards_of_similar_size_and_an_index(stored):
    checkpoint = open_checkpoint(stored[0] / "fused", SHAPE)
    assert checkpoint.layout == "fused" and len(checkpoint.files) == 3
    sizes = [file.stat().st_size for file in checkpoint.files]
    assert max(sizes) < 2 * min(sizes) and all(
        file.stat().st_mode & 0o777 == 0o644 for file in checkpoint.files
    )
    index = json.loads((stored[0] / "fused" / checkpoint_names.INDEX).read_text())
    assert index["metadata"]["total_size"] == 4 * SHAPE.num_parameters
    fused = load_file(checkpoint.tensors["model.layers.0.self_attn.qkv_proj.weight"].file)[
        "model.layers.0.self_attn.qkv_proj.weight"
    ]
    assert (
        hashlib.sha256(fused.numpy().tobytes()).digest()
        == hashlib.sha256(stored[1]["blocks.0.qkv.weight"].numpy().tobytes()).digest()
    )
    assert len(tensor_shapes(SHAPE, "ordinary")) == 3 + 9 * SHAPE.num_layers
