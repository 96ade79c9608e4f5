"""Test `prepare fetch --download` with the real huggingface_hub, a local server and SIGKILL."""

import contextlib
import hashlib
import http.server
import io
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from common.data import hub as download
from common.paths import ROOT
from llama2_70b_lora import prepare
from llama2_70b_lora.rules import DATA_FILES

COMMIT = prepare.DATA_REVISION
pytest.importorskip("huggingface_hub")


class Hub(http.server.ThreadingHTTPServer):
    """Files of one data set, or of one model.

    `pause_s` after each 8 KiB; `sent` bytes of files; `damage` flips a bit in what is sent, not in
    the sums; `broken` of the next answers end in their middle.
    """

    daemon_threads = True

    def __init__(
        self,
        files: dict[str, bytes],
        repository=f"datasets/{prepare.DATA_REPOSITORY}",
        revision=COMMIT,
    ):
        super().__init__(("127.0.0.1", 0), Answer)
        self.listing = f"/api/{repository}/tree/{revision}"
        self.place = f"/{repository.removeprefix('models/')}/resolve/{revision}/"
        self.files, self.pause_s, self.sent, self.damage, self.ranges, self.gated = (
            files,
            0.0,
            0,
            False,
            0,
            False,
        )
        self.oid: str | None = None  # in place of the sums of large files
        self.more = 0  # bytes that are sent beyond those asked for
        self.broken = 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request, client_address):
        """A client that was killed is no matter."""


class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        hub, path = self.server, self.path.partition("?")[0]
        if hub.gated:
            return self.send(401, {"X-Error-Code": "GatedRepo"}, b"")
        if path == hub.listing.replace("/tree/", "/revision/"):
            return self.send(200, {"Content-Type": "application/json"}, b'{"id": "a/b"}')
        if path == hub.listing:
            return self.send(
                200,
                {"Content-Type": "application/json"},
                json.dumps([self.entry(name) for name in hub.files]).encode(),
            )
        name = path.removeprefix(hub.place)
        if name in hub.files and "lfs" in self.entry(name):
            return self.send(
                302,
                {"Location": f"http://127.0.0.1:{hub.server_address[1]}/storage/{name}"},
                b"Found. Redirecting",
            )
        name = name.removeprefix("/storage/")
        if name not in hub.files:
            return self.send(404, {"X-Error-Code": "EntryNotFound"}, b"")
        content, sum_ = hub.files[name], self.entry(name).get("lfs", self.entry(name))["oid"]
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{sum_}"', "Accept-Ranges": "bytes"}
        asked = (self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")
        first = int(asked[0])
        last = min(int(asked[1] or len(content)), len(content) - 1)
        if "Range" in self.headers:
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        if not body:
            return self.send(200, headers | {"Content-Length": str(len(content))}, b"")
        hub.ranges += bool(first)
        if hub.damage:
            content = content[:-1] + bytes([content[-1] ^ 1])
        content = content[first : last + 1] + bytes(hub.more)
        if hub.broken:
            hub.broken -= 1
            self.close_connection = True
            headers["Content-Length"] = str(len(content))
            content = content[: len(content) // 2]
        return self.send(206 if "Range" in self.headers else 200, headers, content)

    def entry(self, name: str) -> dict:
        content = self.server.files[name]
        entry = {"type": "file", "path": name, "size": len(content)}
        if len(content) < 1000:
            return entry | {"oid": hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()}
        if self.server.oid is not None:
            return entry | {
                "oid": "0" * 40,
                "lfs": {"oid": self.server.oid, "size": len(content), "pointerSize": 134},
            }
        return entry | {
            "oid": "0" * 40,
            "lfs": {
                "oid": hashlib.sha256(content).hexdigest(),
                "size": len(content),
                "pointerSize": 134,
            },
        }

    def send(self, status: int, headers: dict, content: bytes) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        for start in range(0, len(content), 8192):
            self.wfile.write(content[start : start + 8192])
            self.server.sent += len(content[start : start + 8192])
            time.sleep(self.server.pause_s)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub():
    content = random.Random(1)
    server = Hub(
        {"README.md": b"x"}
        | {f"data/{name}": content.randbytes(300_000) for name in DATA_FILES.values()}
    )
    yield server
    server.shutdown()
    server.server_close()


OF_LORA = "from llama2_70b_lora import prepare; "
OF_THE_8B = "from llama31_8b import prepare; "


def start(hub, folder, small_blocks=True, program=OF_LORA) -> subprocess.Popen:
    """`fetch --download`, with a home of its own."""
    environment = os.environ | {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_address[1]}",
        "HF_HOME": str(folder / "home"),
    }
    environment |= {
        "PYTHONPATH": str(ROOT),
        "NO_PROXY": "127.0.0.1",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    code = (
        "import sys; from common.data import hub; hub.BLOCK = 16384\n"
        if small_blocks
        else "import sys\n"
    )
    code += f"{program} sys.exit(prepare.main(sys.argv[1:]))"
    command = [
        sys.executable,
        "-c",
        code,
        "fetch",
        "--data-dir",
        str(folder / "data"),
        "--download",
    ]
    command += ["--weights", str(folder / "w")] * (program == OF_LORA)
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def finish(process) -> tuple[int, str]:
    err = process.communicate(timeout=120)[1]
    return process.returncode, err


def whole(hub, folder) -> bool:
    """Every file that has its name is whole. True if all are there."""
    there = [name for name in DATA_FILES.values() if (folder / "data" / name).exists()]
    assert all((folder / "data" / name).read_bytes() == hub.files[f"data/{name}"] for name in there)
    return len(there) == len(DATA_FILES)


def on_disk(folder) -> int:
    """Bytes on disk, however far ahead the server is."""
    return sum(path.stat().st_size for path in (folder / "data").rglob("*") if path.is_file())


def kill(process, folder, size: int) -> None:
    """Kill the process once `size` more bytes are on disk, unless it has ended."""
    size += on_disk(folder)  # nothing is writing yet
    while process.poll() is None:
        with contextlib.suppress(
            FileNotFoundError
        ):  # a part got its name between the listing and the stat
            if on_disk(folder) >= size:
                break
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()


@pytest.mark.slow
def test_a_killed_download_goes_on_where_it_was(hub, tmp_path):
    hub.pause_s = 0.02
    process = start(hub, tmp_path)
    kill(process, tmp_path, 100_000)
    assert (
        process.returncode == -signal.SIGKILL
        and not whole(hub, tmp_path)
        and not list((tmp_path / "data").glob("*.parquet"))
    )
    hub.pause_s = 0.0
    hub.ranges = 0
    code, err = finish(start(hub, tmp_path, small_blocks=False))
    assert code == 0 and whole(hub, tmp_path), err
    assert hub.ranges == 1 and "bytes, as regisss/" in err and "weights" in err
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == sorted(
        DATA_FILES.values()
    )
    assert finish(start(hub, tmp_path))[0] == 0, "what is there is verified"
    (tmp_path / "data" / DATA_FILES["train"]).write_bytes(b"another")
    code, err = finish(start(hub, tmp_path))
    assert (
        code == 17
        and "nothing is overwritten" in err
        and (tmp_path / "data" / DATA_FILES["train"]).read_bytes() == b"another"
    )


def test_a_broken_connection_is_resumed(hub, tmp_path):
    hub.broken = 1
    code, err = finish(start(hub, tmp_path))
    assert code == 0 and whole(hub, tmp_path) and not hub.broken, err
    assert hub.sent < sum(map(len, hub.files.values())) + 16384 + 2000, "one block is repeated"


def test_nothing_is_appended_to_a_file_elsewhere(hub, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("kept")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / f".{DATA_FILES['train']}.part").symlink_to(victim)
    code, err = finish(start(hub, tmp_path, small_blocks=False))
    assert code == 0 and whole(hub, tmp_path) and victim.read_text() == "kept", err


@pytest.mark.parametrize("way", ["damaged on the way", "no network", "no package"])
def test_without_the_files_it_says_what_to_do(hub, tmp_path, monkeypatch, way):
    if way == "damaged on the way":
        hub.damage = True
    elif way == "no network":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    else:
        (tmp_path / "huggingface_hub.py").write_text("raise ImportError('not here')")
        monkeypatch.setattr(sys.modules[__name__], "ROOT", f"{tmp_path}:{ROOT}")
    code, err = finish(start(hub, tmp_path, small_blocks=False))
    expected = {
        "damaged on the way": (15, "damaged"),
        "no network": (15, "could not be downloaded"),
        "no package": (18, "not installed"),
    }
    assert (
        code == expected[way][0]
        and expected[way][1] in err.splitlines()[-3]
        and "downloaded" in err
    ), err
    assert not list(tmp_path.rglob("*.parquet"))


@pytest.mark.parametrize("gated", [False, True])
def test_the_8b_gets_its_tokenizer_or_is_told_of_its_license(tmp_path, gated):
    content = random.Random(1).randbytes(50_000)
    server = Hub(
        {"original/tokenizer.model": b"x", "tokenizer.json": content},
        "models/meta-llama/Llama-3.1-8B",
        "main",
    )
    server.gated = gated
    try:
        code, err = finish(start(server, tmp_path, small_blocks=False, program=OF_THE_8B))
    finally:
        server.shutdown()
        server.server_close()
    assert "downloaded" in err, "it says what is left to do"
    if gated:
        assert (
            code == 15
            and "accept its license" in err.splitlines()[-1]
            and not (tmp_path / "data/tokenizer.json").exists()
        ), err
    else:
        assert code == 0 and (tmp_path / "data/tokenizer.json").read_bytes() == content, err


@pytest.mark.parametrize("oid", ["../../victim", "/tmp/victim", "A" * 64, ""])
def test_a_sum_that_is_a_path_is_refused(hub, tmp_path, oid):
    hub.oid = oid
    victim = tmp_path / "victim"
    victim.write_text("kept")
    code, err = finish(start(hub, tmp_path, small_blocks=False))
    assert code == 15 and "checksum" in err and victim.read_text() == "kept", err
    assert not list(tmp_path.rglob("*.parquet"))


def test_a_file_is_no_larger_than_its_list_says(hub, tmp_path):
    hub.more = 5_000_000
    code, err = finish(start(hub, tmp_path, small_blocks=False))
    assert code == 15 and "300,001 bytes instead of 300,000" in err, err
    assert on_disk(tmp_path) == 0


def test_a_server_that_sends_a_byte_now_and_then_is_given_up(hub, tmp_path):
    hub.pause_s = 1.5
    process = start(
        hub, tmp_path, program="from common.data import hub; hub.LIMIT_S = 1.0; " + OF_LORA
    )
    code, err = finish(process)
    assert code == 15 and "too slow" in err, err


def test_the_failure_of_a_download_is_what_the_command_ends_with(hub, tmp_path):
    hub.damage = True
    code, err = finish(start(hub, tmp_path, small_blocks=False))
    assert code == 15 and "damaged" in err, err


def test_what_arrived_is_a_success_though_the_rest_would_not_fit(hub, tmp_path):
    larger = "import dataclasses; "
    larger += "prepare.WEIGHTS = dataclasses.replace(prepare.WEIGHTS, size_bytes=10**18); "
    code, err = finish(start(hub, tmp_path, small_blocks=False, program=OF_LORA + larger))
    assert code == 0 and "are free" in err and whole(hub, tmp_path), err


def test_a_resumed_download_needs_space_for_the_rest_only(tmp_path, monkeypatch):
    content = b"content"
    entry = SimpleNamespace(
        size=len(content),
        lfs=SimpleNamespace(sha256=hashlib.sha256(content).hexdigest()),
    )
    (tmp_path / ".file.part").write_bytes(content[:5])
    needed = []
    monkeypatch.setattr(download, "require_free_space", lambda *args: needed.append(args[1]))
    download._complete(io.BytesIO(content), entry, tmp_path / "file", "repository")
    assert needed == [2] and (tmp_path / "file").read_bytes() == content


@pytest.mark.slow
def test_no_kill_leaves_a_part_of_a_file_under_its_name(hub, tmp_path):
    """Kill at 50 random points, then expect all files and few repeated bytes."""
    when, kills = random.Random(7), 0
    total = sum(len(content) for content in hub.files.values())
    hub.pause_s = 0.01
    while kills < 50:
        process = start(hub, tmp_path)
        if kills % 3:
            kill(process, tmp_path, when.randrange(1, total // 30))
        else:
            time.sleep(when.uniform(0.0, 2.5))
            kill(process, tmp_path, 0)
        kills += 1
        whole(hub, tmp_path)
    code, err = finish(start(hub, tmp_path))
    assert code == 0 and whole(hub, tmp_path), err
    assert hub.ranges and hub.sent < 4 * total
