"""A reader of the messages of `prepare`, such as `head`, that ends early."""

import subprocess
import sys

from common.paths import ROOT

BUILD = """
import sys
from pathlib import Path
from common.data.preparation import Recipe, build_once, say

def build(folder):
    for step in range(200):
        say(f"step {step} " + "." * 1000)
        print("and on stdout " + "." * 1000, flush=True)
    (folder / "t.bin").write_bytes(b"x")
    return {}

build_once(Path(sys.argv[1]), Recipe("files", "a test", 7, ("t.bin",), "files.json"), build)
"""


def test_data_are_built_to_the_end_when_their_reader_ends(tmp_path):
    line = f'"{sys.executable}" -c "$BUILD" "{tmp_path}" 2>&1 | head -3; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(
        ["bash", "-c", line],
        env={"BUILD": BUILD, "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "t.bin").is_file() and (tmp_path / "files.json").is_file()
