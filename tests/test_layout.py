"""The rooms of this repository: who may import whom, what runs without torch, what no file may contain, and how large it may become."""

import ast
import graphlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import house
import pytest

from common.packages import requirements

ROOT = house.ROOT
SOURCES = house.source_files()
BENCHMARKS = set(house.BENCHMARKS)
# Files that every room may import: they import nothing but each other.
BASE = {
    "common.command_line",
    "common.config",
    "common.errors",
    "common.gpu_kinds",
    "common.gpu_stats",
    "common.hardware",
    "common.known_issues",
    "common.model.shapes",
    "common.packages",
    "common.profilers",
    "common.terminal",
}
# Room -> rooms or modules that it may import besides itself and BASE. A room that is missing here fails the test.
MAY_IMPORT: dict[str, set[str]] = {
    "common": set(),  # the files directly in it
    "common.kernels": set(),
    "common.data": set(),
    "common.sharding": {"common.kernels"},
    "common.model": {"common.data", "common.kernels", "common.sharding"},
    "common.training": {"common"},
    "llama31_8b": {"common"},
    "llama2_70b_lora": {"common"},
    "records": set(),  # facts about runs that both the launcher and a submission need
    "supervision": set(),  # processes: what starts, watches and ends them
    "live": {"records"},  # a run while it lasts
    "door": {"common.data.preparation", "launch", "supervision"},
    "launch": {  # a lock, what a manifest or a checkpoint says
        "common.data.page_cache",
        "common.data.preparation",
        "common.training.continuation",
        "live",
        "plan",
        "records",
        "supervision",
        "system_tuning",
    },
    "gemm_tuning": {"launch"},
    "plan": {"common.model.families", "records"},
    "preflight": {"common.training.kernel_cases", "common.training.metrics", "common.training.self_test", "launch", "plan", "supervision"},
    "pages": {"records"},
    "submission": {"common.inventory", "common.training.mllog", "pages", "plan", "records", *(f"{name}.rules" for name in BENCHMARKS)},
    "system_tuning": set(),
    "throughput": {"common", "launch", "pages", "plan", "preflight", "submission", "supervision", *BENCHMARKS},
}
NOT_YET: set[str] = set()  # a move that is still to come removes it
HEAVY = {"torch", "triton", "transformers", "numpy"}


def name_of(path: Path) -> str:
    return house.relative(path)


def room_of(module: str) -> str:
    """`common.kernels.rope` -> `common.kernels`, `common.errors` -> `common`, `launch.job` -> `launch`."""
    parts = module.split(".")
    deep = parts[0] == "common" and len(parts) > 1 and (ROOT / "common" / parts[1]).is_dir()
    return ".".join(parts[: 2 if deep else 1])


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def ours(path: Path) -> set[str]:
    """Modules of this repository that `path` imports, also inside functions; `from module import name` counts as the module."""
    return {module_of(files[-1]).removesuffix(".__init__") for name in house.imported_names(path) if (files := house.module_files(name))}


def within(module: str, names: set[str]) -> bool:
    return any(module == name or module.startswith(name + ".") for name in names)


def strays(paths: list[Path]) -> set[str]:
    """Imports that MAY_IMPORT does not list."""
    found = set()
    for path in paths:
        room = room_of(module_of(path))
        allowed = MAY_IMPORT[room] | BASE
        found |= {f"{name_of(path)} imports {name}" for name in ours(path) if room_of(name) != room and not within(name, allowed)}
    return found


def test_a_room_imports_what_is_below_it():
    assert {room_of(module_of(path)) for path in SOURCES} == MAY_IMPORT.keys()
    assert strays(SOURCES) <= NOT_YET


def test_the_base_imports_the_base_only():
    for module in BASE:
        for path in house.module_files(module)[-1:]:
            assert ours(path) <= BASE, name_of(path)


def test_no_circle_between_rooms_and_nothing_builds_on_throughput_or_tests():
    rooms: dict[str, set[str]] = {}
    for path in SOURCES:
        room = path.relative_to(ROOT).parts[0]
        names = {name for name in ours(path) if f"{name_of(path)} imports {name}" not in NOT_YET}
        rooms.setdefault(room, set()).update({name.split(".")[0] for name in names} - {room})
        assert "tests" not in {name.split(".")[0] for name in house.imported_names(path)}, name_of(path)
    list(graphlib.TopologicalSorter(rooms).static_order())  # raises CycleError
    assert [room for room, names in rooms.items() if "throughput" in names] == []


def test_system_tuning_needs_the_standard_library_only():
    foreign = {
        (name_of(path), name)
        for path in SOURCES
        if path.is_relative_to(ROOT / "system_tuning")
        for name in house.imported_names(path)
        if name.split(".")[0] not in {*sys.stdlib_module_names, "system_tuning"}
    }
    assert foreign == set()


def test_the_test_sees_imports():
    assert "common.model.llama" in ours(ROOT / "llama31_8b" / "train.py")
    assert strays([ROOT / "common" / "model" / "llama.py"]) <= NOT_YET and len(SOURCES) > 90
    assert room_of("common.kernels.rope") == "common.kernels" and room_of("common.errors") == "common" and room_of("launch.job") == "launch"


# --- what the launcher reads runs without torch -----------------------------------------------------------------------

LIGHT_ROOMS = ("door", "launch", "live", "plan", "preflight", "records", "submission", "supervision", "system_tuning", "gemm_tuning")
NEED_TORCH_SOMETIMES = {"launch.multi_node"}  # imports it in a function that only a run of several nodes calls
NEED_TORCH = {"supervision.torchrun", "preflight.measure", "gemm_tuning.tune"}  # these run in processes that import torch anyway
LIGHT = [*sorted(BASE), "common.training.mllog", "common.training.log_keys", *(f"{name}.rules" for name in sorted(BENCHMARKS))]
LIGHT += [module_of(path).removesuffix(".__init__") for path in SOURCES if path.relative_to(ROOT).parts[0] in LIGHT_ROOMS]
LIGHT = sorted({name for name in LIGHT if name not in NEED_TORCH and importlib.util.find_spec(name)})

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
    code = WITHOUT_TORCH.format(heavy=HEAVY - {"numpy"}, modules=LIGHT)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "forbidden;"
    assert len(LIGHT) > 40


def test_only_listed_modules_of_the_launcher_import_torch():
    heavy = {
        module_of(path)
        for path in SOURCES
        if path.relative_to(ROOT).parts[0] in LIGHT_ROOMS
        and {name.split(".")[0] for name in house.imported_names(path)} & {"torch", "triton"}
    }
    assert heavy <= NEED_TORCH | NEED_TORCH_SOMETIMES


# --- what no file may contain -----------------------------------------------------------------------------------------


def test_no_file_is_called_utils():
    bad = {"utils", "util", "helpers", "misc"}
    assert [path for path in SOURCES if path.stem in bad or set(path.relative_to(ROOT).parts) & bad] == []


def calls(path: Path):
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))


def unsafe(call: ast.Call) -> str:
    """What is wrong with a call that could run code from a file or the network; "" if nothing."""
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
    assert [f"{name_of(path)}:{call.lineno}: {unsafe(call)}" for path in SOURCES for call in calls(path) if unsafe(call)] == []


@pytest.mark.parametrize(
    "text",
    ["np.load(p, allow_pickle=True)", "f(trust_remote_code=True)", "torch.load(p)", "torch.load(p, weights_only=False)", "pickle.load(f)"],
)
def test_this_test_would_see(text):
    (call,) = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    assert unsafe(call)


# --- size -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in house.LIMITS if name != "files in a step"])
def test_size_is_within_its_limit(name):
    assert house.measures()[name] <= house.LIMITS[name]


def test_a_training_step_opens_few_files(miniature_data):
    assert len(house.trace_step(miniature_data)) <= house.LIMITS["files in a step"]


@pytest.mark.parametrize("benchmark", house.BENCHMARKS)
def test_every_legal_combination_is_shipped_or_has_a_reason(benchmark):
    combinations = house.combinations(benchmark)
    assert [str(combination) for combination in combinations if combination.unexplained] == []
    assert house.unknown_keys() == []
    shipped = {name for combination in combinations for name in combination.configs}
    assert shipped == {path.stem for path in (ROOT / "configs" / benchmark).glob("*.toml")}


def test_imports_are_followed(tmp_path, monkeypatch):
    """Through packages, functions and `from`, but not under TYPE_CHECKING."""
    files = {
        "a/__init__.py": "",
        "a/entry.py": "from a import b\ndef f():\n    import c.d\nif TYPE_CHECKING:\n    import a.never\n",
        "a/b.py": "import os\n" * 3,
        "a/never.py": "",
        "c/d.py": "from a.e import name\n",
        "a/e.py": "1\n2\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(house, "ROOT", tmp_path)
    found = house.imported_files("a/entry.py")
    assert {house.relative(path) for path in found} == {"a/__init__.py", "a/entry.py", "a/b.py", "c/d.py", "a/e.py"}
    assert house.lines(list(found)) == 5 + 3 + 1 + 2
    assert {house.relative(path) for path in house.imported_files("a/entry.py", skip=("c/d.py",))} == {
        "a/__init__.py",
        "a/entry.py",
        "a/b.py",
    }


def test_the_package_metadata_lists_every_room():
    import tomllib

    table = tomllib.loads((ROOT / "pyproject.toml").read_text())
    rooms = {path.relative_to(ROOT).parts[0] for path in SOURCES}
    assert {name.rstrip("*") for name in table["tool"]["setuptools"]["packages"]["find"]["include"]} == rooms
    assert set(table["tool"]["mypy"]["packages"]) == rooms
    pinned = {name for name, _ in requirements(ROOT / "requirements.txt")}
    assert {name.split(">")[0] for name in table["project"]["dependencies"]} <= pinned
