"""Test preparing GovReport and the base: invalid files, harmless pickles, and the miniature."""

import ast
import hashlib
import os
import pickle
import re
import shutil
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from damage import flip

from common.data import corpus
from common.data.manifest import Manifest
from common.errors import DataError, StorageError, WeightsError
from common.model.checkpoint_loader import load_base
from common.model.checkpoint_writer import write_checkpoint
from common.model.fused_block import fused_llama
from common.model.initialization import copy_weight, init_weights
from common.model.shapes import ModelShape
from llama2_70b_lora import miniature, miniature_task, packed_npy, prepare
from llama2_70b_lora.data import next_token_labels, read_rows, write_rows
from llama2_70b_lora.rules import CLOSED, DATA_FILES, MINIATURE

HELD_OUT = ("json.decoder", "textwrap")
SMALL = replace(
    CLOSED,
    shape=ModelShape(1, 32, 48, 4, 2, 61, 10000.0),
    sequence_length=12,
    train_samples=9,
    eval_samples=3,
)


@pytest.fixture(autouse=True)
def small_rules(monkeypatch):
    """The closed division in small: 9 and 3 sequences of 12 tokens below 61."""
    monkeypatch.setattr(prepare, "CLOSED", SMALL)


def govreport_rows():
    """Return {split: int64 [rows, 2, length]}.

    Training counts every token, validation about half of them.
    """
    random = np.random.default_rng(1)
    rows = {
        "train": random.integers(61, size=(9, 1, 12)),
        "validation": random.integers(61, size=(3, 1, 12)),
    }
    rows = {split: np.repeat(ids, 2, axis=1) for split, ids in rows.items()}
    rows["validation"][:, 1][random.random((3, 12)) < 0.5] = -100
    rows["validation"][:, 1, 5] = rows["validation"][:, 0, 5]
    return rows


def write_parquet(folder, rows):
    folder.mkdir(parents=True, exist_ok=True)
    for split, array in rows.items():
        write_rows(folder, split, array)
    return folder


def tree(folder):
    return {
        path: (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in folder.rglob("*")
        if path.is_file()
    }


def assert_nothing_to_use(folder):
    assert not (folder / DATA_FILES["train"]).exists()


# ---- convert-npy


def as_dicts(array, kind):
    """Rows as AMD's converter stores them (lists), or with arrays or numpy numbers inside."""
    wrap = {"lists": list, "arrays": np.asarray, "numbers": lambda row: [np.int64(x) for x in row]}[
        kind
    ]
    return [
        {
            "input_ids": wrap([int(x) for x in ids]),
            "loss_mask": wrap([int(x != -100) for x in labels]),
            "seq_start_id": [0],
        }
        for ids, labels in array
    ]


def write_npy(folder, rows, kind="lists"):
    folder.mkdir(parents=True, exist_ok=True)
    for split, array in rows.items():
        np.save(
            folder / f"{split}.npy",
            np.array(as_dicts(array, kind), dtype=object),
            allow_pickle=True,
        )
    return folder


def convert_npy(source, target):
    return prepare.main(["convert-npy", "--npy-dir", str(source), "--data-dir", str(target)])


@pytest.mark.parametrize("kind", ["lists", "arrays", "numbers"])
def test_packed_files_give_the_same_rows(tmp_path, kind):
    rows = govreport_rows()
    source = write_npy(tmp_path / "n", rows, kind)
    assert convert_npy(source, tmp_path / "e") == 0
    for split in rows:
        assert np.array_equal(read_rows(tmp_path / "e", split, SMALL), rows[split])
    assert {path.name for path in (tmp_path / "e").iterdir()} == set(DATA_FILES.values())
    assert prepare.main(["verify", "--data-dir", str(tmp_path / "e")]) == 0
    before = tree(tmp_path / "e")
    assert convert_npy(source, tmp_path / "e") == StorageError.exit_code  # nothing is overwritten
    assert tree(tmp_path / "e") == before


@pytest.mark.parametrize("split", ["train", "validation"])
def test_packed_rows_that_break_the_rules_are_refused(tmp_path, capsys, split):
    """Nothing is left of either file, so that the next try is not refused."""
    rows = govreport_rows()
    rows[split][2, :, 3] = 61
    assert convert_npy(write_npy(tmp_path / "n", rows), tmp_path / "d") == DataError.exit_code
    assert re.search(rf"{split}\.npy: row 2, position 3: .*0 to 60.* 61", capsys.readouterr().err)
    assert_nothing_to_use(tmp_path / "d")


def test_a_file_of_numpy_1_is_read(tmp_path):
    """numpy 1 pickles the function under another module's name, as in AMD's files."""
    source = write_npy(tmp_path, govreport_rows(), "arrays") / "train.npy"
    raw = source.read_bytes()
    assert b"numpy._core.multiarray" in raw
    source.write_bytes(
        raw.replace(b"\x8c\x16numpy._core.multiarray", b"\x8c\x15numpy.core.multiarray").replace(
            b"cnumpy._core.", b"cnumpy.core."
        )
    )
    assert b"numpy.core.multiarray" in source.read_bytes()
    shift = source.read_bytes()
    if b"\x80\x04\x95" in shift:  # protocol 4 frames state their length
        at = shift.index(b"\x80\x04\x95") + 3
        length = int.from_bytes(shift[at : at + 8], "little") - (len(raw) - len(shift))
        source.write_bytes(shift[:at] + length.to_bytes(8, "little") + shift[at + 8 :])
    assert len(list(packed_npy.read_packed(source))) == 9


class Payload:
    """Creates a marker file when it is unpickled."""

    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments
        self.state = None

    def __reduce__(self):
        return self.call, self.arguments, self.state


class Forged:
    """An array whose object is at the address that the file says."""

    def __reduce__(self):
        field = {"a": (np.dtype("O"), 0)}
        dtype = Payload(np.dtype, "V8", False, True)
        dtype.state = (3, "|", None, ("a",), field, 8, 1, 0)
        make = np.zeros(1).__reduce__()[0]
        return make, (np.ndarray, (0,), b"b"), (1, (1,), dtype, False, b"AAAAAAAA")


class Loaded(np.ndarray):
    """A class of one's own that only looks like numpy's."""


PAYLOADS = {
    "command": lambda marker: Payload(os.system, f"touch {marker}"),
    "open": lambda marker: Payload(open, str(marker), "w"),
    "eval": lambda marker: Payload(eval, f"open({str(marker)!r}, 'w')"),
    "path": lambda marker: Payload(Path.touch, marker),
    "exec in a row": lambda marker: {
        "input_ids": Payload(exec, f"open({str(marker)!r}, 'w')"),
        "loss_mask": [1],
        "seq_start_id": [0],
    },
    "numpy function": lambda marker: Payload(np.save, str(marker), [1]),
    "subclass": lambda marker: np.zeros(3).view(Loaded),
    "structured array": lambda marker: np.zeros(3, [("a", "i4")]),
    "pointer": lambda marker: Forged(),
    "dates": lambda marker: np.zeros(3, "datetime64[s]"),
}


@pytest.mark.parametrize("kind", PAYLOADS)
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_payload_is_refused_and_not_executed(tmp_path, kind, protocol, capsys):
    source, marker = write_npy(tmp_path / "n", govreport_rows()), tmp_path / "marker"
    content = np.array([PAYLOADS[kind](marker), None], dtype=object)
    with (source / "train.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "|O", "fortran_order": False, "shape": (2,)}
        )
        pickle.dump(content, file, protocol=protocol)
    assert convert_npy(source, tmp_path / "d") == DataError.exit_code
    assert "nothing was executed" in capsys.readouterr().err
    assert not marker.exists()
    assert_nothing_to_use(tmp_path / "d")


def nested(depth: int, pair):
    value = pair(1, 1)
    for _ in range(depth):
        value = pair(value, value)
    return value


NESTED = {
    "lists": lambda: nested(40, lambda *pair: list(pair)),
    "tuples": lambda: nested(40, lambda *pair: pair),
}


@pytest.mark.parametrize("kind", ["lists", "tuples"])
def test_nested_pairs_are_refused_in_time(tmp_path, kind, capsys):
    """40 pairs of pairs, each stored once, are 2**40 values."""
    source = write_npy(tmp_path / "n", govreport_rows())
    rows = np.empty(1, dtype=object)
    rows[0] = {"input_ids": NESTED[kind](), "loss_mask": [1]}
    np.save(source / "train.npy", rows, allow_pickle=True)
    assert convert_npy(source, tmp_path / "d") == DataError.exit_code
    assert "row 0: input_ids" in capsys.readouterr().err


def test_nested_pairs_as_a_key_are_refused_in_time(tmp_path, monkeypatch, capsys):
    """Their hash takes 2**40 steps, which no signal interrupts."""
    monkeypatch.setattr(packed_npy, "LOAD_S", 1.0)
    source = write_npy(tmp_path / "n", govreport_rows())
    leaf = b"K\x01K\x01\x86q\x00"
    pickled = (
        b"\x80\x02}"
        + leaf
        + b"".join(b"0h%ch%c\x86q%c" % (n, n, n + 1) for n in range(60))
        + b"K\x01s."
    )
    with (source / "train.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "|O", "fortran_order": False, "shape": (1,)}
        )
        file.write(pickled)
    assert convert_npy(source, tmp_path / "d") == DataError.exit_code
    assert "cannot be read in" in capsys.readouterr().err


def test_a_pipe_is_refused(tmp_path, capsys):
    source = write_npy(tmp_path / "n", govreport_rows())
    (source / "train.npy").unlink()
    os.mkfifo(source / "train.npy")
    assert convert_npy(source, tmp_path / "d") == DataError.exit_code
    assert "regular file" in capsys.readouterr().err


def test_a_bare_payload_without_an_array(tmp_path, capsys):
    source, marker = write_npy(tmp_path / "n", govreport_rows()), tmp_path / "marker"
    with (source / "train.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "|O", "fortran_order": False, "shape": ()}
        )
        file.write(f"cos\nsystem\n(S'touch {marker}'\ntR.".encode())
    assert convert_npy(source, tmp_path / "d") == DataError.exit_code
    assert "contains os.system" in capsys.readouterr().err or not marker.exists()
    assert not marker.exists()


def dicts(**row):
    return lambda path: np.save(path, np.array([row] * 2, dtype=object), allow_pickle=True)


NPY = {
    "truncated": (lambda path: os.truncate(path, path.stat().st_size - 10), "train.npy"),
    "no npy": (lambda path: path.write_bytes(b"PK\x03\x04" * 10), "train.npy"),
    "missing": (lambda path: path.unlink(), "train.npy: no such file"),
    "plain numbers": (
        lambda path: np.save(path, np.zeros(3)),
        "float64",
    ),
    "no dicts": (
        lambda path: np.save(path, np.array([1, None], dtype=object), allow_pickle=True),
        "dicts",
    ),
    "no mask": (dicts(input_ids=[1] * 12), "row 0: loss_mask"),
    "text": (
        dicts(input_ids=["a"] * 12, loss_mask=[1] * 12),
        "input_ids",
    ),
    "ragged": (
        dicts(input_ids=[1, [2]], loss_mask=[1] * 12),
        "input_ids",
    ),
    "fractions": (
        dicts(input_ids=[0.5] * 12, loss_mask=[1] * 12),
        "input_ids",
    ),
    "too short": (
        dicts(input_ids=[1] * 11, loss_mask=[1] * 11),
        "input_ids",
    ),
    "mask of 2": (dicts(input_ids=[1] * 12, loss_mask=[2] * 12), "loss_mask"),
}


@pytest.mark.parametrize("kind", NPY)
def test_a_damaged_packed_file_is_named(tmp_path, kind, capsys):
    damage, message = NPY[kind]
    source = write_npy(tmp_path / "n", govreport_rows())
    damage(source / "train.npy")
    assert convert_npy(source, tmp_path / "d") == DataError.exit_code
    assert message in capsys.readouterr().err


# ---- verify, write-manifest, fetch


@pytest.fixture
def whole(tmp_path):
    """Data, and weights, of the rules' shape."""
    write_parquet(tmp_path / "d", govreport_rows())
    model = fused_llama(SMALL.shape, 12)
    init_weights(model, SMALL.shape.num_layers, 1, 0.02, copy_weight)
    write_checkpoint(model, tmp_path / "w", dtype=torch.bfloat16)
    return tmp_path


def test_an_error_of_the_weights_names_the_command_that_helps(tmp_path, capsys):
    """The checkpoint reader is shared and knows no benchmark."""
    weights = tmp_path / "empty"
    weights.mkdir()
    for options in (
        ["write-manifest", "--output", str(tmp_path / "m.json")],
        ["verify", "--data-dir", str(tmp_path / "d")],
    ):
        if options[0] == "verify":
            write_parquet(tmp_path / "d", govreport_rows())
        assert prepare.main([*options, "--weights", str(weights)]) == WeightsError.exit_code
        assert "llama2_70b_lora prepare" in capsys.readouterr().err


def verify(folder, *options):
    return prepare.main(["verify", "--data-dir", str(folder / "d"), *options])


def test_verify_of_good_data_and_weights(whole, capsys):
    weights = ["--weights", str(whole / "w")]
    assert verify(whole) == 0 and verify(whole, *weights) == 0
    err = capsys.readouterr().err
    assert "9 and 3 sequences of 12" in err and "10 tensors" in err and "--manifest" in err
    assert prepare.main(["write-manifest", *weights, "--output", str(whole / "m.json")]) == 0
    assert set(Manifest.read(whole / "m.json").files) == {
        path.name for path in (whole / "w").glob("*.safetensors")
    }
    manifest = ["--manifest", str(whole / "m.json")]
    assert verify(whole, *weights, *manifest) == 0
    assert "--full" in capsys.readouterr().err
    assert verify(whole, *weights, *manifest, "--full") == 0
    assert "not checked" not in capsys.readouterr().err
    flip(whole / "w" / "model-00002-of-00003.safetensors", -1)
    assert verify(whole, *weights, *manifest) == 0
    assert verify(whole, *weights, *manifest, "--full") == WeightsError.exit_code
    assert "model-00002-of-00003.safetensors" in capsys.readouterr().err


def changed(split, place, value):
    def change(folder):
        rows = govreport_rows()
        rows[split][place] = value(rows) if callable(value) else value
        write_parquet(folder, rows)

    return change


DAMAGE = {
    "label": (
        changed("train", (0, 1, 0), 1),
        r"row 0, position 0: .*-100.* 1\b",
    ),
    "id": (
        changed("train", (1, slice(None), 2), 61),
        "row 1, position 2: .*0 to 60.* 61",
    ),
    "truncated": (
        lambda d: os.truncate(d / DATA_FILES["validation"], 100),
        "GovReport",
    ),
    "missing": (lambda d: (d / DATA_FILES["train"]).unlink(), "GovReport"),
    "leak": (
        changed("train", 2, lambda rows: rows["validation"][1, 0]),
        "row 1 .*validation.* row 2 .*training",
    ),
    "all masked": (
        changed("validation", (2, 1), -100),
        "row 2",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_verify_names_the_damage_and_changes_nothing(whole, kind, capsys):
    damage, message = DAMAGE[kind]
    damage(whole / "d")
    before = tree(whole)
    assert verify(whole, "--weights", str(whole / "w")) == DataError.exit_code
    assert re.search(message, capsys.readouterr().err)
    assert tree(whole) == before


def test_verify_of_a_missing_directory_names_the_option(tmp_path, capsys):
    code = prepare.main(["verify", "--miniature", "--data-dir", str(tmp_path / "no")])
    err = capsys.readouterr().err
    assert code == DataError.exit_code
    assert f"error: --data-dir {tmp_path / 'no'}" in err and "DATADIR" not in err


def test_verify_of_missing_weights(whole, capsys):
    (whole / "w" / "model-00001-of-00003.safetensors").unlink()
    assert verify(whole, "--weights", str(whole / "w")) == WeightsError.exit_code
    assert "model.safetensors.index.json" in capsys.readouterr().err


def fetch(folder):
    return prepare.main(["fetch", "--data-dir", str(folder / "d"), "--weights", str(folder / "w")])


def test_fetch_downloads_nothing_and_says_what_to_get(tmp_path, capsys):
    assert fetch(tmp_path) == 0
    err = capsys.readouterr().err
    assert "downloaded" in err and "Community License" in err and "| bash" not in err
    for text in (
        prepare.DATA_REPOSITORY,
        prepare.DATA_REVISION,
        prepare.WEIGHTS_REPOSITORY,
        prepare.WEIGHTS_REVISION,
    ):
        assert text in err
    assert list(tmp_path.iterdir()) == []


def test_fetch_only_warns_of_too_little_space(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prepare, "WEIGHTS", replace(prepare.WEIGHTS, size_bytes=10**18))
    assert fetch(tmp_path) == 0
    assert "needs 1000000000 GB" in capsys.readouterr().err


def test_fetch_recognizes_complete_data(whole, capsys):
    assert fetch(whole) == 0
    assert "--weights" in capsys.readouterr().err


# ---- miniature


@pytest.fixture(scope="module")
def built(documents, tmp_path_factory):
    """The whole miniature, its base trained for two steps only."""
    folder = tmp_path_factory.mktemp("miniature")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(miniature, "BASE_STEPS", 2)
        patch.setattr(corpus, "documents", lambda: documents)
        assert prepare.main(["miniature", "--data-dir", str(folder)]) == 0
    return folder


@pytest.fixture
def copy(built, tmp_path, monkeypatch):
    monkeypatch.setattr(
        miniature, "train_base", lambda *args: pytest.fail("the base must not be trained again")
    )
    return Path(shutil.copytree(built, tmp_path / "copy"))


def test_the_miniature_serves_the_training(built, capsys):
    assert (
        prepare.main(
            ["verify", "--miniature", "--data-dir", str(built), "--weights", str(built / "base")]
        )
        == 0
    )
    model = fused_llama(MINIATURE.shape, MINIATURE.sequence_length)
    report = load_base(model, built / "base", built / "base" / "manifest.json")
    assert report.layout == "fused" and report.bytes == 2 * MINIATURE.shape.num_parameters
    tokenizer = corpus.load_sentencepiece(built / "base" / "tokenizer.model")
    text = tokenizer.decode(read_rows(built, "train", MINIATURE)[:8, 0].ravel().tolist())
    assert "### Document the following source:\ndef " in text and "### Docstring:\n" in text
    pairs = next_token_labels(read_rows(built, "validation", MINIATURE))
    counts = (pairs[:, 1] != -100).sum(axis=1)
    assert counts.min() > 0 and 0.05 < counts.mean() / pairs.shape[2] < 0.5
    assert not np.isin(pairs[:, 1], tokenizer.eos_id()).any()


def test_the_files_of_the_base_have_one_mode_and_no_lock_is_left(built):
    paths = list((built / "base").iterdir())
    assert len({path.stat().st_mode for path in paths}) == 1
    assert not [path.name for path in paths if path.name.startswith(".")]


def test_the_miniature_is_built_once(built, copy, capsys):
    before = tree(copy)
    assert prepare.main(["miniature", "--data-dir", str(copy)]) == 0
    assert tree(copy) == before
    assert capsys.readouterr().err.count("complete and verified") == 2


@pytest.mark.parametrize("name", DATA_FILES.values())
def test_damaged_data_are_built_again_without_training(built, copy, name, capsys):
    (copy / "mine.txt").write_text("keep me")
    flip(copy / name, 100)
    assert prepare.main(["miniature", "--data-dir", str(copy)]) == 0
    assert f"{name} is missing or damaged" in capsys.readouterr().err
    assert (copy / name).read_bytes() == (built / name).read_bytes() and (
        copy / "mine.txt"
    ).read_text() == "keep me"


def test_a_foreign_checkpoint_is_not_overwritten(tmp_path, capsys):
    (tmp_path / "base").mkdir()
    for name, message in (
        ("model.safetensors", "exists already"),
        ("model-00001-of-00015.safetensors", "other weights"),
    ):
        (tmp_path / "base" / name).write_text("somebody's")
        assert prepare.main(["miniature", "--data-dir", str(tmp_path)]) == StorageError.exit_code
        assert message in capsys.readouterr().err
        (tmp_path / "base" / name).unlink()


def test_packing_is_that_of_the_reference():
    class Letters:
        """A tokenizer of one id per character."""

        def bos_id(self):
            return 1

        def eos_id(self):
            return 2

        def encode(self, texts):
            return [[ord(letter) for letter in text] for text in texts]

    head = list(map(ord, miniature_task.PROMPT.format(source="xy")))
    long = len(head) + 10
    ids = [*[1, *head, *map(ord, "abc"), 2], *[1, *head, *map(ord, "de"), 2]]
    masked = [
        *[-100] * (1 + len(head)),
        *map(ord, "abc"),
        -100,
        *[-100] * (1 + len(head)),
        *map(ord, "de"),
        -100,
    ]
    pairs = [("xy", "abc"), ("xy", "far too long" * 9), ("xy", "de")]
    rows = len(ids) // long
    packed = miniature_task.pack(pairs, Letters(), long, mask_prompts=True)
    assert packed.dtype == np.int32
    assert (
        packed[:, 0].ravel().tolist() == ids[: rows * long]
        and packed[:, 1].ravel().tolist() == masked[: rows * long]
    )
    assert (
        miniature_task.pack(pairs, Letters(), long, mask_prompts=False)[0, 1].tolist() == ids[:long]
    )


def test_code_of_held_out_modules_is_not_in_training(monkeypatch):
    texts = miniature_task.library_texts()  # the whole library: parsed for `built` already
    assert len(texts.train) > 3000 and len(texts.validation) > 5
    assert not {source for source, _ in texts.train} & {source for source, _ in texts.validation}
    library = Path(textwrap.__file__).parent
    trees = [
        (name, "", ast.parse((library / f"{name.replace('.', '/')}.py").read_text()))
        for name in (*HELD_OUT, "json.encoder", "shutil")
    ]
    monkeypatch.setattr(corpus, "modules", lambda: iter(trees))
    train, validation = miniature_task.documented_code(set(HELD_OUT))
    assert len(validation) > 5 and any(
        source.startswith("def shorten(") for source, _ in validation
    )
    assert any(source.startswith("def copyfile(") for source, _ in train)
    assert not {source for source, _ in train} & {source for source, _ in validation}
    assert all('"""' not in source.split("\n")[1] for source, _ in validation)
