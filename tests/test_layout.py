"""The house rules of docs: who imports whom, what runs without torch, and what stands nowhere."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = sorted(path.parent.name for path in ROOT.glob("*/rules.py"))
ROOMS = ["common", "gemm_tuning", "launch", "plan", "preflight", "records", "submission", "throughput", *BENCHMARKS]
SOURCES = sorted(path.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).rglob("*.py"))
HEAVY = {"torch", "triton", "transformers"}


def imported(path: Path) -> set[str]:
    """Every module that `path` imports, also inside functions; `from a import b` counts as a and, where it is one, a.b."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            found.add(module)
            found |= {f"{module}.{name.name}" for name in node.names if is_module(f"{module}.{name.name}")}
    return found


def is_module(name: str) -> bool:
    place = ROOT / name.replace(".", "/")
    return place.is_dir() or place.with_suffix(".py").is_file()


def ours(path: Path) -> set[str]:
    return {name for name in imported(path) if name.split(".")[0] in ROOMS}


def sources(room: str) -> list[Path]:
    return [path for path in SOURCES if path.is_relative_to(room)]


def strays(paths: list[Path], allowed) -> list[str]:
    return [f"{path} imports {name}" for path in paths for name in sorted(ours(path)) if not allowed(name)]


def within(*rooms: str):
    return lambda name: any(name == room or name.startswith(room + ".") for room in rooms)


def test_the_rooms_are_where_this_test_looks():
    assert "llama31_8b" in BENCHMARKS and len(SOURCES) > 30
    assert "common.model.llama" in ours(Path("llama31_8b/train.py")) and "common.kernels.rope" in ours(Path("common/model/llama.py"))


def test_kernels_import_nothing_of_common_but_kernels_and_shapes():
    assert strays(sources("common/kernels"), within("common.kernels", "common.model.shapes")) == []


def test_common_imports_common_only():
    moving = ("common/training/session.py",)  # imports profiling of throughput/ for now
    assert strays([path for path in sources("common") if str(path) not in moving], within("common")) == []


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_a_benchmark_imports_itself_and_common_only(benchmark):
    assert strays(sources(benchmark), within(benchmark, "common")) == []


def test_submission_imports_rules_and_the_words_of_the_log_but_no_training_code():
    words = (
        "common.errors",
        "common.training.mllog",
        "common.training",
        "common.gpu_kinds",
        "common.hardware",
        "records",
    )  # of the log, the ledger and the machine
    allowed = within("submission", *words, *(f"{benchmark}.rules" for benchmark in BENCHMARKS))
    names = {"common", "launch", *BENCHMARKS}  # `from llama31_8b import rules` names the package as well
    assert strays(sources("submission"), lambda name: name in names or allowed(name)) == []


def test_of_the_launcher_only_torchrun_imports_torch():
    heavy = {path.name for path in sources("launch") if {name.split(".")[0] for name in imported(path)} & HEAVY}
    assert heavy == {"torchrun.py"}


def test_preflight_reads_configs_their_plan_and_the_hardware_table_and_nobody_imports_it():
    mine = within("preflight", "common.errors", "common.gpu_kinds", "common.hardware", "common.config", "gemm_tuning.file", "plan")
    assert strays(sources("preflight"), mine) == [
        "preflight/__main__.py imports common"  # `from common import config` names the package as well
    ]
    others = [path for path in SOURCES if not path.is_relative_to("preflight")]
    assert [path for path in others if any(within("preflight")(name) for name in imported(path))] == []
    heavy = {path.name for path in sources("preflight") if {name.split(".")[0] for name in imported(path)} & HEAVY}
    assert heavy == {"measure.py"}


LIGHT = ["common.model.shapes", "common.errors", "common.config", "common.gpu_kinds", "common.hardware", "common.training.mllog"]
LIGHT += [f"{benchmark}.{name}" for benchmark in BENCHMARKS for name in ("rules", "log_keys") if is_module(f"{benchmark}.{name}")]
LIGHT += [
    ".".join(path.with_suffix("").parts)
    for room in ("gemm_tuning", "launch", "plan", "preflight", "records", "submission")
    for path in sources(room)
]
LIGHT = [name for name in LIGHT if not name.endswith(("__init__", "__main__", "gemm_tuning.tune", "launch.torchrun"))] + [
    "launch.__main__",
    "preflight.__main__",
]

WITHOUT_TORCH = """
import importlib, sys

class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {heavy}:
            raise ImportError(f"{{name}} must not be imported here")

sys.meta_path.insert(0, Forbid())
failed = []
for name in {modules}:
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed.append(f"{{name}}: {{error}}")
try:
    import torch
except ImportError:
    print("forbidden;", "; ".join(failed))
"""


def test_what_the_launcher_reads_imports_without_torch():
    code = WITHOUT_TORCH.format(heavy=HEAVY, modules=LIGHT)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "forbidden;"
    assert len(LIGHT) > 15


def test_no_file_is_called_utils():
    bad = {"utils", "util", "helpers", "misc"}
    assert [path for path in SOURCES if path.stem in bad or set(path.parts) & bad] == []


def calls(path: Path):
    return (node for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.Call))


def unsafe(call: ast.Call) -> str:
    """What is wrong with a call that could run code out of a file or the network; "" if nothing."""
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    function = ast.unparse(call.func)
    for name in ("allow_pickle", "trust_remote_code"):
        if keywords.get(name, "False") != "False":
            return f"{name}={keywords[name]}"
    if function == "torch.load" and keywords.get("weights_only") != "True":
        return "torch.load without weights_only=True"
    if function in ("pickle.load", "pickle.loads", "eval", "exec", "os.system") or keywords.get("shell", "False") != "False":
        return function
    return ""


def test_nothing_reads_pickles_or_runs_foreign_code():
    found = [f"{path}:{call.lineno}: {unsafe(call)}" for path in SOURCES for call in calls(path) if unsafe(call)]
    assert found == []


@pytest.mark.parametrize(
    "text",
    ["np.load(p, allow_pickle=True)", "f(trust_remote_code=True)", "torch.load(p)", "torch.load(p, weights_only=False)", "pickle.load(f)"],
)
def test_this_test_would_see(text):
    (call,) = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    assert unsafe(call)
