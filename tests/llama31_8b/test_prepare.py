"""Test preparing data: the miniature, conversion that survives a kill, and verification."""

import gzip
import hashlib
import http.server
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from damage import flip
from in_this_process import InThisProcess

from common.command_line import exit_code_of
from common.data import corpus, preparation, text_inputs, text_parts, verification
from common.data.gpt_dataset import TrainData, sequences_in, validation_tokens
from common.data.indexed_dataset import Index
from common.data.indexed_dataset_writer import IndexedDatasetWriter
from common.data.manifest import Manifest, PairFacts
from common.errors import DataError, StorageError
from common.paths import ROOT
from common.terminal import print_stderr
from llama31_8b import convert, prepare
from llama31_8b.rules import CLOSED, MINIATURE

TEXTS = [
    f"document {i}: " + "the quick brown fox jumps over the lazy dog, " * (i % 7) + "é" * (i % 3)
    for i in range(1500)
]


@pytest.fixture(scope="session")
def built(miniature_data, tmp_path_factory):
    """A copy: nothing else touches it."""
    return shutil.copytree(miniature_data, tmp_path_factory.mktemp("miniature") / "data")


@pytest.fixture
def copy(built, tmp_path):
    """The miniature's files again, to be damaged."""
    for path in built.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def tree(folder):
    return {
        path.name: (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in folder.iterdir()
    }


# ---- miniature


def test_the_miniature_has_enough_sequences_to_train_and_evaluate(built):
    vocab_size, length = MINIATURE.shape.vocab_size, MINIATURE.sequence_length
    assert sequences_in(built / MINIATURE.train_prefix, length) > 5000
    data = TrainData(built / MINIATURE.train_prefix, length, 5000, 1, vocab_size)
    tokenizer = corpus.load_sentencepiece(built / "tokenizer.model")
    assert "the" in tokenizer.decode(np.concatenate([data[i] for i in range(8)]).tolist())
    rows = validation_tokens(
        built / MINIATURE.validation_prefix, length, MINIATURE.eval_samples, vocab_size
    )
    assert rows.shape == (64, 129) and len(np.unique(rows)) > 500


def test_miniature_is_built_once(built, capsys):
    before = tree(built)
    assert prepare.main(["miniature", "--data-dir", str(built)]) == 0
    assert tree(built) == before
    out, err = capsys.readouterr()
    assert out == "" and "complete and verified" in err


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.model",
        pytest.param(f"{MINIATURE.train_prefix}.bin", marks=pytest.mark.slow),
        pytest.param(f"{MINIATURE.validation_prefix}.idx", marks=pytest.mark.slow),
        pytest.param("miniature.json", marks=pytest.mark.slow),
    ],
)
def test_damaged_miniature_is_built_again_and_the_same(
    built, documents, copy, name, monkeypatch, capsys
):
    monkeypatch.setattr(corpus, "documents", lambda: documents)
    (copy / "mine.txt").write_text("keep me")
    flip(copy / name, 0)
    assert prepare.main(["miniature", "--data-dir", str(copy)]) == 0
    assert f"{name} is missing or damaged" in capsys.readouterr().err or name == "miniature.json"
    assert (copy / "mine.txt").read_text() == "keep me"
    for path in built.iterdir():
        assert (copy / path.name).read_bytes() == path.read_bytes()


@pytest.mark.slow
def test_a_killed_miniature_is_built_again_and_the_same(built, documents, tmp_path, monkeypatch):
    process = subprocess.Popen(
        [sys.executable, "-m", "llama31_8b.prepare", "miniature", "--data-dir", str(tmp_path)],
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "tokenizer.model").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "miniature.json").exists(), "the kill came too late to show anything"
    monkeypatch.setattr(corpus, "documents", lambda: documents)
    assert prepare.main(["miniature", "--data-dir", str(tmp_path)]) == 0
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in built.iterdir()}
    for path in built.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_miniature_does_not_overwrite_a_foreign_tokenizer(tmp_path, capsys):
    (tmp_path / "tokenizer.model").write_text("somebody's")
    assert prepare.main(["miniature", "--data-dir", str(tmp_path)]) == StorageError.exit_code
    assert "tokenizer.model: exists already" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["tokenizer.model"]


# ---- convert


def write_inputs(folder):
    """The same documents as two JSON-lines files, one of them compressed."""
    lines = [json.dumps({"text": text, "url": "x"}) + "\n" for text in TEXTS]
    (folder / "a.jsonl").write_text("".join(lines[:900]) + "\n")
    with gzip.open(folder / "b.json.gz", "wt") as file:
        file.writelines(lines[900:])
    return [folder / "a.jsonl", folder / "b.json.gz"]


def convert_files(inputs, tokenizer, prefix):
    return convert.convert(inputs, tokenizer, prefix, "text", 1)


def stored_documents(prefix):
    index = Index.read(prefix)
    with index.open_tokens() as tokens:
        return [
            tokens.read_sequence(i, 0, int(n)).tolist()
            for i, n in enumerate(index.sequence_lengths)
        ]


def same_bytes(a, b):
    return all(
        (a.parent / f"{a.name}{s}").read_bytes() == (b.parent / f"{b.name}{s}").read_bytes()
        for s in (".bin", ".idx")
    )


def test_convert_stores_each_document_without_bos_or_eos(built, tmp_path):
    inputs = write_inputs(tmp_path)
    arguments = [
        "convert",
        "--input",
        *map(str, inputs),
        "--tokenizer",
        str(built / "tokenizer.model"),
        "--output-prefix",
        str(tmp_path / "out" / "p"),
    ]
    assert prepare.main(arguments) == 0
    assert stored_documents(tmp_path / "out" / "p") == corpus.load_sentencepiece(
        built / "tokenizer.model"
    ).encode(TEXTS)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["p.bin", "p.idx"]
    assert prepare.main(arguments) == StorageError.exit_code  # nothing is overwritten


@pytest.mark.parametrize("part_bytes", [5000, 1 << 20])
def test_convert_gives_the_same_bytes_by_any_parts(built, tmp_path, monkeypatch, part_bytes):
    """The bytes are those of the documents one after another, by the tokenizer itself."""
    monkeypatch.setattr(text_parts, "PROCESSES", InThisProcess)
    monkeypatch.setattr(text_inputs, "PART_BYTES", part_bytes)
    convert_files(write_inputs(tmp_path), built / "tokenizer.model", tmp_path / "p")
    tokenizer = corpus.load_sentencepiece(built / "tokenizer.model")
    writer = IndexedDatasetWriter(tmp_path / "expected", tokenizer.vocab_size())
    for text in TEXTS:
        writer.add(tokenizer.encode(text))
    writer.finish()
    assert same_bytes(tmp_path / "p", tmp_path / "expected")


def test_convert_of_plain_text_makes_a_document_of_each_block(built, tmp_path, monkeypatch):
    monkeypatch.setattr(text_parts, "PROCESSES", InThisProcess)
    (tmp_path / "t.txt").write_bytes(b"\n\none\ntwo\n\n \nthree\r\n\r\nfour")
    convert_files([tmp_path / "t.txt"], built / "tokenizer.model", tmp_path / "t")
    tokenizer = corpus.load_sentencepiece(built / "tokenizer.model")
    assert [tokenizer.decode(ids) for ids in stored_documents(tmp_path / "t")] == [
        "one\ntwo",
        "three",
        "four",
    ]


KILLED = """
import os, signal, sys
from dataclasses import replace
from dataclasses import replace
from pathlib import Path
from common.data.indexed_dataset_writer import IndexedDatasetWriter
from llama31_8b import convert
moment, prefix, tokenizer, *inputs = sys.argv[1:]
end = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
if moment == "second replace":
    rename, renamed = Path.rename, []
    Path.rename = lambda path, target: end() if renamed else renamed.append(rename(path, target))
else:
    setattr(IndexedDatasetWriter, moment, end)
convert.convert(list(map(Path, inputs)), Path(tokenizer), Path(prefix), "text", 1)
"""


def test_a_killed_conversion_continues(built, tmp_path, monkeypatch, capsys):
    inputs, tokenizer = write_inputs(tmp_path), built / "tokenizer.model"
    with monkeypatch.context() as patch:
        patch.setattr(text_parts, "PROCESSES", InThisProcess)
        convert_files(inputs, tokenizer, tmp_path / "whole")
    prefix = tmp_path / "killed"
    for moment in ("add", "finish", "second replace"):
        command = [sys.executable, "-c", KILLED, moment, prefix, tokenizer, *inputs]
        assert subprocess.run(command, cwd=ROOT).returncode == -signal.SIGKILL
        assert not (tmp_path / "killed.idx").exists()
        assert (tmp_path / "killed.bin").exists() == (moment == "second replace")
        assert len(list(tmp_path.glob("killed.bin.*"))) == (moment != "second replace")
    convert_files(inputs, tokenizer, prefix)
    assert "1 of 1 parts are complete" in capsys.readouterr().err
    assert same_bytes(prefix, tmp_path / "whole")
    assert not (tmp_path / ".killed.parts").exists()
    assert sorted(tmp_path.glob("killed*")) == [tmp_path / "killed.bin", tmp_path / "killed.idx"]


BROKEN = {
    "x.jsonl": (b'{"text": "good"}\n{"text": \n', "line 2: no document"),
    "y.jsonl": (b'{"body": "good"}\n', "it has body"),
    "z.jsonl": (b'{"text": 5}\n', "int"),
    "l.jsonl": (b"[1]\n", "no document"),
    "t.txt": (b"fine\n\nnot fine \xff\n", "line 3: not UTF-8"),
    "e.jsonl": (b"", "all texts are empty"),
    "f.jsonl": (b'{"text": ""}\n', "all texts are empty"),
    "g.jsonl.gz": (gzip.compress(b'{"text": "good"}\n' * 1000)[:-20], "cannot be read"),
    "h.jsonl.gz": (b"no gzip at all", "cannot be read"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_input_is_named(built, tmp_path, name, monkeypatch, capsys):
    monkeypatch.setattr(text_parts, "PROCESSES", InThisProcess)
    content, message = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    arguments = [
        "convert",
        "--input",
        str(tmp_path / name),
        "--tokenizer",
        str(built / "tokenizer.model"),
        "--output-prefix",
        str(tmp_path / "p"),
    ]
    assert prepare.main(arguments) == DataError.exit_code
    assert message in capsys.readouterr().err
    assert not (tmp_path / "p.idx").exists()


def test_an_input_that_changes_while_it_is_converted(built, tmp_path, monkeypatch, capsys):
    source = tmp_path / "a.txt"
    source.write_text("\n\n".join(TEXTS))
    documents = text_parts.documents

    def cut_at_the_end(*arguments):
        yield from documents(*arguments)
        os.truncate(source, 1000)

    monkeypatch.setattr(text_parts, "documents", cut_at_the_end)
    monkeypatch.setattr(text_parts, "PROCESSES", InThisProcess)
    arguments = ["convert", "--input", str(source), "--tokenizer", str(built / "tokenizer.model")]
    arguments += ["--output-prefix", str(tmp_path / "p")]
    assert prepare.main(arguments) == DataError.exit_code
    assert f"{source} was changed" in capsys.readouterr().err
    assert not (tmp_path / "p.idx").exists()


def test_unknown_and_missing_inputs_are_refused(built, tmp_path, capsys):
    rest = ["--tokenizer", str(built / "tokenizer.model"), "--output-prefix", str(tmp_path / "p")]
    (tmp_path / "a.png").write_bytes(b"")
    assert prepare.main(["convert", "--input", str(tmp_path / "a.png"), *rest]) == 2
    assert prepare.main(["convert", "--input", str(tmp_path / "a.txt"), *rest]) == 2
    assert ".jsonl" in capsys.readouterr().err
    (tmp_path / "a.txt").write_text("text")
    rest[1] = str(tmp_path)  # a folder
    assert (
        prepare.main(["convert", "--input", str(tmp_path / "a.txt"), *rest]) == DataError.exit_code
    )
    assert f"{tmp_path}: no such file" in capsys.readouterr().err


# ---- verify


def verify(folder, *options):
    return prepare.main(
        [
            "verify",
            "--data-dir",
            str(folder),
            "--manifest",
            str(folder / "miniature.json"),
            *options,
        ]
    )


def test_verify_finds_no_difference_in_good_data(copy, capsys):
    assert verify(copy) == 0 and verify(copy, "--full") == 0
    assert "no differences" in capsys.readouterr().err


TRAIN = MINIATURE.train_prefix
VERIFY_DAMAGE = {
    "missing": (
        lambda d: (d / f"{TRAIN}.bin").unlink(),
        f"{TRAIN}.bin: ",
    ),
    "truncated bin": (
        lambda d: os.truncate(d / f"{TRAIN}.bin", 1000),
        f"{TRAIN}.bin: size",
    ),
    "truncated idx": (lambda d: os.truncate(d / f"{TRAIN}.idx", 1000), f"{TRAIN}.idx: "),
    "flipped": (lambda d: flip(d / f"{TRAIN}.bin", 4000), f"{TRAIN}.bin: sha256"),
    "dtype": (lambda d: flip(d / f"{TRAIN}.idx", 17), f"{TRAIN}.idx: "),
}


@pytest.mark.parametrize("kind", VERIFY_DAMAGE)
def test_verify_names_the_damage_and_changes_nothing(copy, kind, capsys):
    damage, message = VERIFY_DAMAGE[kind]
    (copy / "sibling").write_text("not mine")
    damage(copy)
    before = tree(copy)
    assert verify(copy, "--full") == DataError.exit_code
    assert message in capsys.readouterr().err
    assert tree(copy) == before


def closed_like(folder, documents, tokens_each):
    """Small files under MLCommons' names, as int32."""
    for prefix in (CLOSED.train_prefix, CLOSED.validation_prefix):
        writer = IndexedDatasetWriter(folder / prefix, CLOSED.shape.vocab_size)
        for _ in range(documents):
            writer.add(np.full(tokens_each, 128255))
        writer.finish()


def test_verify_with_the_shipped_manifest_says_what_is_wrong_and_what_is_unknown(tmp_path, capsys):
    closed_like(tmp_path, 5, 7)
    assert prepare.main(["verify", "--data-dir", str(tmp_path)]) == DataError.exit_code
    err = capsys.readouterr().err
    assert "91205" in err and "47186855" in err
    assert err.count("not checked: sha256 of") == 4 and "--full" in err
    assert "c4-train.en_6_text_document: found 5" in err


def test_verify_of_a_missing_directory_is_one_error(tmp_path, capsys):
    assert prepare.main(["verify", "--data-dir", str(tmp_path / "no")]) == DataError.exit_code
    err = capsys.readouterr().err
    assert f"error: --data-dir {tmp_path / 'no'}" in err and "does not exist" in err
    assert "BAD" not in err and "manifest" not in err


def test_verify_with_the_shipped_manifest_refuses_an_empty_file(tmp_path, capsys):
    closed_like(tmp_path, 5, 7)
    empty = tmp_path / f"{CLOSED.train_prefix}.bin"
    os.truncate(empty, 0)
    (tmp_path / f"{CLOSED.train_prefix}.idx").unlink()
    assert prepare.main(["verify", "--data-dir", str(tmp_path)]) == DataError.exit_code
    assert f"BAD  {empty}: the file is empty" in capsys.readouterr().err


def test_shipped_manifest_states_what_the_reference_states():
    manifest = Manifest.read(prepare.SHIPPED_MANIFEST)
    assert manifest.vocab_size == CLOSED.shape.vocab_size and set(manifest.pairs) == {
        CLOSED.train_prefix,
        CLOSED.validation_prefix,
    }
    validation = manifest.pairs[CLOSED.validation_prefix]
    assert (validation.dtype, validation.documents, validation.tokens) == ("int32", 91205, 47186855)
    assert (47186855 - 1) // CLOSED.sequence_length == 5760  # the README's count of sequences


def test_write_manifest_then_find_a_flipped_bit(tmp_path, capsys):
    closed_like(tmp_path, 5, 7)
    shipped = Manifest.read(prepare.SHIPPED_MANIFEST)
    no_counts = Manifest(
        "test",
        shipped.vocab_size,
        shipped.files,
        {name: PairFacts("int32") for name in shipped.pairs},
    )
    no_counts.write(tmp_path / "known.json")
    rest = ["verify", "--data-dir", str(tmp_path), "--manifest"]
    assert (
        prepare.main(
            [*rest, str(tmp_path / "known.json"), "--write-manifest", str(tmp_path / "found.json")]
        )
        == 0
    )
    assert Manifest.read(tmp_path / "found.json").pairs[CLOSED.train_prefix] == PairFacts(
        "int32", 5, 35, 128255
    )
    assert prepare.main([*rest, str(tmp_path / "found.json")]) == 0
    flip(tmp_path / f"{CLOSED.train_prefix}.bin", 8)  # 128255 -> 128254: still a token id
    assert prepare.main([*rest, str(tmp_path / "known.json"), "--full"]) == 0
    # Without --full nothing is hashed.
    assert prepare.main([*rest, str(tmp_path / "found.json")]) == 0
    assert "not checked: SHA-256 and ids" in capsys.readouterr().err
    assert prepare.main([*rest, str(tmp_path / "found.json"), "--full"]) == DataError.exit_code
    assert "sha256: expected" in capsys.readouterr().err


def test_verify_checks_every_id_with_full(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(verification, "CHUNK", 300)
    writer = IndexedDatasetWriter(tmp_path / "p", 70000)
    writer.add(np.where(np.arange(1000) == 500, 69999, 5))
    writer.finish()
    manifest = Manifest("test", 69999, {}, {"p": PairFacts("int32", 1, 1000)})
    manifest.write(tmp_path / "m.json")
    arguments = ["verify", "--data-dir", str(tmp_path), "--manifest", str(tmp_path / "m.json")]
    assert prepare.main(arguments) == 0
    assert "--full" in capsys.readouterr().err
    assert prepare.main([*arguments, "--full"]) == DataError.exit_code
    assert "69999" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"source": "x"}',
        '{"source": "x", "vocab_size": 1, "files": {"a": {"md5": "0"}}, "pairs": {}}',
    ],
)
def test_a_broken_manifest_is_refused(tmp_path, content):
    (tmp_path / "m.json").write_text(content)
    with pytest.raises(DataError, match="not a manifest"):
        Manifest.read(tmp_path / "m.json")


# ---- fetch, and what all share


class Storage(http.server.BaseHTTPRequestHandler):
    """A storage whose path names the status of its answer. /cut ends the connection."""

    def do_HEAD(self):
        self.server.asked.append((self.command, self.path))
        if self.path == "/cut":
            return
        self.send_response(int(self.path[1:]))
        self.send_header("Location", "/200")
        self.end_headers()

    do_GET = do_HEAD

    def log_message(self, *args):
        pass


@pytest.fixture
def storage(monkeypatch):
    """Return a function that points `fetch` to a path of a local server, which it returns."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Storage) as server:
        server.asked = []
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def point(path):
            url = f"http://127.0.0.1:{server.server_port}/{path}"
            monkeypatch.setattr(prepare, "DATA_URI", url)
            return server

        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield point
        server.shutdown()


@pytest.mark.parametrize(
    ("path", "words", "other"),
    [
        ("200", ("needs no login",), "browser"),
        ("302", ("HTTP 302", "needs a login", "browser", "-s"), "unknown"),
        ("403", ("HTTP 403", "needs a login", "browser"), "unknown"),
        ("500", ("HTTP 500", "unknown whether", "If it needs a login"), "needs no login"),
        ("cut", ("did not answer", "unknown whether", "browser"), "needs no login"),
    ],
)
def test_fetch_asks_the_storage_once_whether_it_needs_a_login(
    tmp_path, capsys, storage, path, words, other
):
    server = storage(path)
    assert prepare.main(["fetch", "--data-dir", str(tmp_path)]) == 0
    assert server.asked == [("HEAD", f"/{path}")], "one request, and no redirect is followed"
    said = capsys.readouterr().err
    assert all(word in said for word in words) and other not in said


def test_fetch_without_a_network_prints_the_steps(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prepare, "DATA_URI", "http://127.0.0.1:9/x")
    assert prepare.main(["fetch", "--data-dir", str(tmp_path)]) == 0
    said = capsys.readouterr().err
    assert "did not answer" in said and "mlc-r2-downloader.sh -d" in said


def test_fetch_downloads_nothing_and_says_so(tmp_path, capsys, storage):
    storage("200")
    assert prepare.main(["fetch", "--data-dir", str(tmp_path / "new")]) == 0
    err = capsys.readouterr().err
    assert (
        "downloaded" in err
        and "preprocessed-c4-dataset.uri" in err
        and "| bash" not in err
        and "<(" not in err
    )
    assert list(tmp_path.iterdir()) == []


def test_fetch_only_warns_of_too_little_space(tmp_path, monkeypatch, capsys, storage):
    storage("200")
    monkeypatch.setattr(prepare, "DATA", replace(prepare.DATA, size_bytes=10**18))
    assert prepare.main(["fetch", "--data-dir", str(tmp_path)]) == 0
    assert "needs 1000000000 GB" in capsys.readouterr().err


def test_fetch_recognizes_complete_data(tmp_path, capsys, storage):
    server = storage("200")
    closed_like(tmp_path, 1, 1)
    assert prepare.main(["fetch", "--data-dir", str(tmp_path)]) == 0
    assert server.asked == []
    assert "four files" in capsys.readouterr().err


def test_interrupt_and_full_disk_have_their_exit_codes(capsys):
    def interrupted():
        os.kill(os.getpid(), signal.SIGINT)

    def full():
        raise OSError(28, "No space left on device", "/data/x")

    assert exit_code_of(interrupted) == 130
    assert exit_code_of(full) == StorageError.exit_code
    assert "/data/x: No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_any_command_with_its_exit_code(number, capsys):
    before = signal.getsignal(number)
    signal.signal(number, signal.SIG_DFL)
    try:
        assert exit_code_of(lambda: os.kill(os.getpid(), number)) == 128 + number
        assert signal.getsignal(number) is signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN)  # as under nohup
        assert exit_code_of(lambda: os.kill(os.getpid(), number)) == 0
    finally:
        signal.signal(number, before)
    assert "signal" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_control_characters_do_not_reach_the_terminal(monkeypatch, capsys):
    foreign = "\x1b]0;title\x07 \x1b[2J \x9b1m \x7f"
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert exit_code_of(lambda: print(f"\x1b[1mbold\x1b[0m {foreign}\tend")) == 0
    assert re.findall(r"[^ -~\n\t\ufffd]", sys.stdout.getvalue()) == ["\x1b", "\x1b"]
    print_stderr(foreign)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", capsys.readouterr().err)


def test_lock_makes_a_second_process_wait(tmp_path):
    program = (
        "import sys; from pathlib import Path; from common.data.preparation import locked\n"
        "with locked(Path(sys.argv[1])): print('in')"
    )
    with preparation.locked(tmp_path / "lock"):
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path / "lock")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert "waiting" in process.stderr.readline() and process.poll() is None
    assert process.communicate(timeout=20)[0] == "in\n"
    assert not (tmp_path / "lock").exists()


def test_the_lock_of_unfinished_work_stays(tmp_path):
    with pytest.raises(KeyboardInterrupt), preparation.locked(tmp_path / "lock"):
        raise KeyboardInterrupt
    assert (tmp_path / "lock").exists()


def test_a_lock_on_a_removed_file_does_not_count(tmp_path, monkeypatch):
    """The holder of a lock removes its file, and another process locks a new one of its name."""
    path = tmp_path / "lock"
    locks = []

    def flock(file, operation):
        locks.append(file)
        if len(locks) == 1:
            path.unlink()
            path.touch()

    monkeypatch.setattr(preparation.fcntl, "flock", flock)
    with preparation.locked(path):
        assert os.fstat(locks[-1]).st_ino == path.stat().st_ino
    assert len(locks) == 2
