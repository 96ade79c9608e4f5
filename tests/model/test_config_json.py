"""Compare the loss of many forms of config.json with transformers, which may be refused instead."""

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from test_model import hugging_face

from common.data.indexed_dataset_writer import IndexedDatasetWriter
from common.errors import ConfigError, StorageError, WeightsError
from common.kernels.attention import attention_backends
from common.model.families import family_of
from common.model.shapes import ModelShape
from open_llama import eval as evaluation_command
from open_llama.evaluation import load_model

VOCAB, LENGTH = 61, 64
TOLERANCE = 2e-5  # of the loss, in fp32
TYPES = ("Llama", "Mistral", "Qwen3")
THETA = 50000.0
SCALINGS = {
    "default": {},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
OLD, NEW = "rope_scaling", "rope_parameters"
LLAMA3 = SCALINGS["llama3"] | {"rope_type": "llama3"}
# Other values that transformers computes, or that it refuses: entries of config.json, None removes
# a key. The last word of a name is the type of the model.
EQUAL = {
    "original context at the top, Llama": {OLD: LLAMA3, "original_max_position_embeddings": 32},
    "original context at the top, new name, Qwen3": {
        NEW: LLAMA3 | {"rope_theta": THETA},
        "original_max_position_embeddings": 32,
    },
    "two names of the type, Llama": {NEW: {"rope_type": "default", "type": "linear", "factor": 4}},
    "two bases, the inner one counts, Llama": {NEW: {"rope_theta": THETA}, "rope_theta": 7.0},
    "old base wins over the saved one, Llama": {NEW: {"rope_theta": 7.0}, OLD: {"rope_theta": 9.0}},
    "empty scaling, Mistral": {OLD: {}, NEW: {"rope_theta": THETA}},
    "whole numbers, Llama": {OLD: LLAMA3 | {"factor": 8, "rope_theta": 50000}},
    "no epsilon, Llama": {"rms_norm_eps": None},
    "no epsilon, Mistral": {"rms_norm_eps": None},
    "no epsilon, Qwen3": {"rms_norm_eps": None},
    "no head dimension, Llama": {"head_dim": None},
    "no head dimension, Mistral": {"head_dim": None},
    "as wide a window, Mistral": {"sliding_window": LENGTH},
    "no window, use_sliding_window, Mistral": {"use_sliding_window": True},
    "window of another type, Llama": {"sliding_window": 32, "use_sliding_window": True},
    "window turned off, Qwen3": {"sliding_window": 32, "use_sliding_window": False},
    "all layers see all, Qwen3": {"layer_types": ["full_attention"] * 2},
}
REFUSED = {
    "window, Mistral": {"sliding_window": 32},
    "window that Qwen's key does not turn off, Mistral": {
        "sliding_window": 32,
        "use_sliding_window": False,
    },
    "window, Qwen3": {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 0},
    "sliding layers, Qwen3": {
        "use_sliding_window": True,
        "sliding_window": 32,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "half rotated, Llama": {"partial_rotary_factor": 0.5},
    "half rotated in the scaling, Llama": {OLD: LLAMA3 | {"partial_rotary_factor": 0.5}},
    "base of the saved parameters lost, Qwen3": {NEW: {"rope_theta": THETA}, OLD: LLAMA3},
    "no head dimension, Qwen3": {"head_dim": None},
    "both directions, Llama": {"is_causal": False},
}
BAD_NUMBERS = ("NaN", "Infinity", "0", "-1", "true", '"8"', "[8]", "1e400")


def rotations() -> dict[str, dict]:
    """The rotation in every place, under every name, with its base in every place."""
    forms = {}
    all_places = ((OLD,), (NEW,), (NEW, OLD))
    for places, name, kind, base in product(
        all_places, ("rope_type", "type"), SCALINGS, ("top", "inside", "absent")
    ):
        scaling = {name: kind, **SCALINGS[kind]}
        if base == "inside":
            scaling["rope_theta"] = THETA
        entries = {places[-1]: scaling}
        if len(places) == 2:  # as transformers saves it
            entries[NEW] = {"rope_type": "default", "rope_theta": 10000.0}
            if base == "top":
                entries[NEW]["rope_theta"] = THETA
        if base == "top":
            entries["rope_theta"] = THETA
        model = TYPES[len(forms) % 3]
        forms[f"{kind} by {name}, {' and '.join(places)}, base {base}, {model}"] = entries
    return forms


NUMBERS = {  # key -> where it stands
    "rope_theta": ("", OLD, NEW),
    "factor": (OLD, NEW),
    "low_freq_factor": (OLD,),
    "high_freq_factor": (OLD,),
    "original_max_position_embeddings": ("", OLD),
    "rms_norm_eps": ("",),
    "sliding_window": ("",),
    "max_position_embeddings": ("",),
    "hidden_size": ("",),
    "head_dim": ("",),
}
FORMS = rotations() | EQUAL | REFUSED


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """A model of each type, whose config.json has no optional keys."""
    folder = tmp_path_factory.mktemp("models")
    # The rotation needs several frequencies, and a loss that depends on them.
    shape = ModelShape(2, 64, 96, 4, 2, VOCAB, 10000.0)
    for kind in TYPES:
        torch.manual_seed(1)
        model = hugging_face(shape, 256, kind, initializer_range=0.2)
        model.save_pretrained(folder / kind)
        path = folder / kind / "config.json"
        config = json.loads(path.read_text())
        for key in ("rope_parameters", "rope_scaling", "layer_types", "use_sliding_window"):
            config.pop(key, None)
        path.write_text(json.dumps(config | {"sliding_window": None}))
    return {kind: folder / kind for kind in TYPES}


def changed(models: dict[str, Path], name: str, target: Path) -> Path:
    source = models[name.rsplit(" ", 1)[1]]
    config = json.loads((source / "config.json").read_text())
    for key, value in FORMS[name].items():
        if value is None:
            del config[key]
        else:
            config[key] = value
    (target / "config.json").write_text(json.dumps(config))
    (target / "model.safetensors").symlink_to(source / "model.safetensors")
    return target


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB, (3, LENGTH + 1), generator=torch.Generator().manual_seed(0))


def our_loss(folder: Path) -> float:
    ids = tokens().int()
    with attention_backends("cpu", torch.float32), torch.no_grad():
        sums, counts = load_model(folder, LENGTH, torch.device("cpu"))(ids[:, :-1], ids[:, 1:])
    return float((sums / counts).mean())


def their_loss(folder: Path) -> float:
    import transformers

    load = transformers.AutoModelForCausalLM.from_pretrained
    ids = tokens()
    with torch.no_grad():
        logits = load(folder, dtype=torch.float32)(ids[:, :-1]).logits.flatten(0, 1)
    return float(torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten()))


@pytest.mark.parametrize("name", FORMS)
def test_the_loss_is_that_of_transformers_or_the_form_is_refused(models, tmp_path, name):
    folder = changed(models, name, tmp_path)
    if name in REFUSED or name.startswith(("linear", "yarn")):
        with pytest.raises((ConfigError, WeightsError)):
            our_loss(folder)
    else:
        assert abs(our_loss(folder) - their_loss(folder)) < TOLERANCE


def test_the_forms_differ_in_their_losses(models, tmp_path):
    """Otherwise the comparison with transformers would show nothing."""
    losses = set()
    for kind, base in product(("default", "llama3"), ("inside", "absent")):
        name = f"{kind} by rope_type, rope_scaling, base {base}, "
        (name,) = (each for each in FORMS if each.startswith(name))
        model = name.rsplit(" ", 1)[1]
        (tmp_path / model / kind / base).mkdir(parents=True)
        losses.add(round(our_loss(changed(models, name, tmp_path / model / kind / base)), 3))
    assert len(losses) == 4


def evaluate(folder: Path, length: int) -> int:
    """Return the exit code of `open_llama eval`."""
    if not (folder / "text.idx").exists():
        writer = IndexedDatasetWriter(folder / "text", VOCAB)
        writer.add(tokens().flatten().tolist())
        writer.finish()
    words = [str(folder), "--data", str(folder / "text"), "--sequence-length", str(length)]
    return evaluation_command.main([*words, "--device", "cpu"])


@pytest.mark.parametrize("number", BAD_NUMBERS)
def test_a_number_that_cannot_be_used_is_refused(models, tmp_path, number, capsys):
    config = json.loads((models["Mistral"] / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(models["Mistral"] / "model.safetensors")
    for key, places in NUMBERS.items():
        for place in places:
            changed_config = config | ({place: LLAMA3 | {key: "?"}} if place else {key: "?"})
            if key == "original_max_position_embeddings":
                changed_config.setdefault(OLD, LLAMA3)
            text = json.dumps(changed_config).replace('"?"', number)
            (tmp_path / "config.json").write_text(text)
            with pytest.raises(ConfigError, match=key):
                family_of(str(tmp_path))
    assert evaluate(tmp_path, LENGTH) == ConfigError.exit_code
    assert "head_dim" in capsys.readouterr().err


def test_eval_beyond_the_window_is_refused_as_training_is(models, tmp_path, capsys):
    folder = changed(models, "window, Mistral", tmp_path)
    assert evaluate(folder, 33) == ConfigError.exit_code
    assert "sliding window" in capsys.readouterr().err
    assert evaluate(folder, 32) == 0


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "text.idx", "text.json"])
def test_a_disk_error_of_eval_is_no_other_error(models, tmp_path, capsys, name):
    folder = changed(models, "no epsilon, Llama", tmp_path)
    assert evaluate(folder, LENGTH) == 0
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("/proc/self/mem")  # whose first byte is an error to read: EIO
    assert evaluate(folder, LENGTH) == StorageError.exit_code
    assert f"{folder / name}" in capsys.readouterr().err
