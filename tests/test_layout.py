"""Test the layout of this repository: folders, direction of imports, and forbidden content."""

import ast
import dataclasses
import graphlib
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
from imports import file_of, imported_files, imported_names, module_of, source_files

from common import benchmarks
from common.errors import ConfigError
from common.packages import requirements
from common.paths import ROOT

pytestmark = pytest.mark.quick

SOURCES = source_files()
BENCHMARKS = {*benchmarks.names()}
FOLDERS = BENCHMARKS | {
    "common",
    "configs",
    "docs",
    "launch",
    "submission",
    "system_tuning",
    "tests",
    "throughput",
}
# Files that every package may import. They import nothing but each other.
BASE = {
    "common.atomic_write",
    "common.benchmarks",
    "common.command_line",
    "common.config",
    "common.engines",
    "common.errors",
    "common.folder_walk",
    "common.gpu_kinds",
    "common.known_issues",
    "common.linear_formats",
    "common.lock_files",
    "common.machine.gpu_stats",
    "common.machine.hardware",
    "common.machine.host",
    "common.machine.inventory",
    "common.machine.network",
    "common.model.shapes",
    "common.packages",
    "common.paths",
    "common.process_identity",
    "common.repository",
    "common.suggestions",
    "common.terminal",
    "common.values",
    "common.text_tables",
    "common.variables",
}
# Package -> packages or modules that it may import besides itself and BASE. A package that is
# missing here fails the test.
MAY_IMPORT: dict[str, set[str]] = {
    "common": set(),  # the files directly in it
    "common.kernels": set(),
    "common.data": set(),
    "common.machine": set(),
    "common.records": set(),
    "common.estimate": set(),
    "common.html": {"common.records"},
    "common.sharding": {"common.kernels"},
    "common.model": {
        "common.data",
        "common.kernels",
        "common.records.json_lines",  # what counts as a number in a JSON file
        "common.sharding",
    },
    "common.training": {
        "common.data",
        "common.estimate.mfu",
        "common.kernels",
        "common.model",
        "common.records",
        "common.self_test",
        "common.sharding",
        "system_tuning.settings",  # the host's settings, for versions.json
    },
    "common.self_test": {"common.kernels", "common.model", "common.sharding"},
    "common.measure": {
        "common.estimate",
        "common.html",
        "common.kernels",
        "common.model",
        "common.records",
        "common.self_test",
        "common.sharding",
        "common.training",
    },
    **{name: {"common"} for name in BENCHMARKS},
    "launch": {  # the page of `plan --scaling`, a lock, and what a checkpoint says, without torch
        "common.data.preparation",
        "common.estimate",
        "common.html",
        "common.measure.bench",  # started by name
        "common.measure.defaults",
        "common.records",
        "common.training.arguments",
        "common.training.continuation",
        "common.training.log_keys",
        "submission",
        "system_tuning",
    },
    "submission": {
        "common.estimate",
        "common.html",
        "common.records",
        "common.training.arguments",
        "common.training.log_keys",
        "common.training.mllog",
    },
    "system_tuning": set(),
    "throughput": {"common", "launch", "submission"},
}
# Subpackages of launch/ have the imports of launch/, and these.
MAY_IMPORT["launch"] |= {
    "common.kernels.step_clock",  # preflight
    "common.model.families",  # plan: of any model
    "common.self_test",  # preflight
}
HEAVY = {"torch", "triton", "transformers", "numpy"}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def package_of(module: str) -> str:
    """Return the package of a module: `common.kernels.rope` -> `common.kernels`.

    `common.errors` -> `common`, `launch.job` -> `launch`.
    """
    parts = module.split(".")
    deep = parts[0] == "common" and len(parts) > 1 and (ROOT / "common" / parts[1]).is_dir()
    return ".".join(parts[: 2 if deep else 1])


def imports(path: Path) -> set[str]:
    """Modules of this repository that `path` imports when it runs, also inside functions."""
    return {module_of(file) for file in imported_files(path)}


def started(path: Path) -> set[str]:
    """Modules of this repository that `path` names in strings, to start them as programs.

    A string with a dot counts if it is the name of a module, one without only behind "-m".
    """
    texts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            texts.add(node.value)
        if isinstance(node, ast.List | ast.Tuple):
            values = [each.value for each in node.elts if isinstance(each, ast.Constant)]
            texts |= {name for option, name in pairwise(values) if option == "-m"}
    names = {str(text) for text in texts if re.fullmatch(r"\w+(\.\w+)*", str(text))}
    return {name for name in names if (file := file_of(name)) and module_of(file) == name}


def needed(path: Path) -> set[str]:
    """Modules that `path` imports or starts. The table of all commands may name every module."""
    return imports(path) | (set() if name_of(path) == "launch/cli.py" else started(path))


def within(module: str, names: set[str]) -> bool:
    return any(module == name or module.startswith(name + ".") for name in names)


def strays(paths: list[Path]) -> set[str]:
    """Imports that MAY_IMPORT does not list."""
    found = set()
    for path in paths:
        package = package_of(module_of(path))
        allowed = MAY_IMPORT[package] | BASE
        others = {name for name in needed(path) if package_of(name) != package}
        found |= {f"{name_of(path)} imports {name}" for name in others if not within(name, allowed)}
    return found


def test_the_repository_has_a_folder_for_each_benchmark_and_eight_more():
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    folders = {name.split("/")[0] for name in tracked.stdout.split("\n") if "/" in name}
    assert {name for name in folders if not name.startswith(".")} == FOLDERS


def test_a_clone_by_git_for_windows_has_the_line_ends_of_linux():
    command = ["git", "check-attr", "eol", "text", "--", "run_and_time.sh", "launch/cli.py"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said.count("eol: lf") == said.count("text: auto") == 2


def test_a_package_imports_what_is_below_it():
    assert {package_of(module_of(path)) for path in SOURCES} == MAY_IMPORT.keys()
    assert strays(SOURCES) == set()


def test_a_program_that_is_started_by_name_counts_as_an_import(tmp_path):
    path = tmp_path / "a.py"
    path.write_text(
        'run([python, "-m", "throughput", x])\ncaptured("submission.check", "common")\n'
    )
    assert started(path) == {"throughput", "submission.check"}


def test_the_base_imports_the_base_only():
    for module in BASE:
        path = file_of(module)
        assert path is not None and imports(path) <= BASE, module


def test_no_circle_between_packages_and_nothing_builds_on_throughput_or_tests():
    packages: dict[str, set[str]] = {}
    for path in SOURCES:
        package = path.relative_to(ROOT).parts[0]
        names = imports(path)
        if name_of(path) != "launch/cli.py":  # the table of all commands
            names |= started(path)
        packages.setdefault(package, set()).update(
            {name.split(".")[0] for name in names} - {package}
        )
        assert "tests" not in {name.split(".")[0] for name in imported_names(path)}, name_of(path)
    list(graphlib.TopologicalSorter(packages).static_order())  # raises CycleError
    assert [package for package, names in packages.items() if "throughput" in names] == []


def circle_in(files: dict[Path, set[Path]]) -> list[Path]:
    """Return the files of one import cycle in order, or none."""
    try:
        list(graphlib.TopologicalSorter(files).static_order())
    except graphlib.CycleError as error:
        return list(reversed(error.args[1]))
    return []


def test_no_circle_between_files():
    """Imports in functions and under TYPE_CHECKING count, too."""
    assert circle_in({path: imported_files(path, type_checking=True) for path in SOURCES}) == []


def test_a_circle_would_be_seen(tmp_path):
    one, two, three = (tmp_path / f"{name}.py" for name in ("one", "two", "three"))
    assert circle_in({one: {two}, two: {three}, three: set()}) == []
    assert set(circle_in({one: {two}, two: {three}, three: {one}})) == {one, two, three}


def test_system_tuning_needs_the_standard_library_only():
    foreign = {
        (name_of(path), name)
        for path in SOURCES
        if path.is_relative_to(ROOT / "system_tuning")
        for name in imported_names(path)
        if name.split(".")[0] not in {*sys.stdlib_module_names, "system_tuning"}
    }
    assert foreign == set()


def test_imports_are_followed(tmp_path):
    """Into functions, and under TYPE_CHECKING where asked for."""
    path = tmp_path / "a.py"
    path.write_text(
        "from common import paths\ndef f():\n    import launch.job\nif TYPE_CHECKING:\n"
        "    from common.errors import RunError\n"
    )
    assert imports_of_names(path, False) == {"common.paths", "launch.job"}
    assert imports_of_names(path, True) == {"common.paths", "launch.job", "common.errors"}
    assert "common.training.pretraining" in imports(ROOT / "llama31_8b" / "train.py")
    assert package_of("common.kernels.rope") == "common.kernels"
    assert package_of("common.errors") == "common" and package_of("launch.job") == "launch"


def imports_of_names(path: Path, type_checking: bool) -> set[str]:
    return {module_of(file) for file in imported_files(path, type_checking)}


# --- a benchmark is a type: class Rules and its Config, behind the registry in common/benchmarks.py
# --------------------

# Names of an object that is a Rules or a RunConfig.
TYPED = re.compile(r"(^|[._])(rules|configs?)$")
OPTIONS = {
    field.name
    for name in BENCHMARKS
    for typed in (benchmarks.config_class(name), *map(type, benchmarks.divisions(name).values()))
    for field in dataclasses.fields(typed)
}


def untyped(tree: ast.AST) -> list[str]:
    """Return the uses of rules and configs that a type checker cannot follow.

    A lambda cannot have types.
    """
    found = []
    lambdas = (node for node in ast.walk(tree) if isinstance(node, ast.Lambda))
    in_lambdas = {arg for node in lambdas for arg in ast.walk(node.args)}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and TYPED.search(node.arg) and node not in in_lambdas:
            if node.annotation is None or has_any(node.annotation):
                found.append(f"{node.lineno}: {node.arg} has no type")
        elif isinstance(node, ast.AnnAssign) and TYPED.search(ast.unparse(node.target)):
            if has_any(node.annotation):
                found.append(f"{node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.FunctionDef) and TYPED.search(node.name):
            if node.returns is None or has_any(node.returns):
                found.append(f"{node.lineno}: {node.name} returns no type")
        elif isinstance(node, ast.Call) and guesses(node):
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def has_any(annotation: ast.expr) -> bool:
    """Whether it is Any or a union with Any. A dict[str, Any] is no Rules and no RunConfig."""
    return "Any" in re.split(r" *\| *", ast.unparse(annotation))


def guesses(call: ast.Call) -> bool:
    """Return whether a call is hasattr, or getattr with a default, on rules or a config."""
    function = ast.unparse(call.func)
    if function != "hasattr" and (function != "getattr" or len(call.args) < 3):
        return False
    owner, key = call.args[:2]
    of_command_line = ast.unparse(owner) in ("args", "options")
    is_option = isinstance(key, ast.Constant) and key.value in OPTIONS
    return TYPED.search(ast.unparse(owner)) is not None or (is_option and not of_command_line)


def test_rules_and_configs_are_typed():
    found = [
        f"{name_of(path)}:{each}"
        for path in SOURCES
        for each in untyped(ast.parse(path.read_text()))
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "def f(rules): pass",
        "def f(rules: Any): pass",
        "def f(base_config: Any | None): pass",
        "def rules_of(x): return x\nrules: Any = 1",
        "class Job:\n    def rules(self): return 1",
        'getattr(rules, "lora_rank", 0)',
        "getattr(self.config, key, None)",
        'getattr(file, "frozen_base", "")',
        'hasattr(start, "offload_layers")',
    ],
)
def test_this_test_would_see_an_untyped_use(text):
    assert untyped(ast.parse(text))


def test_typed_uses_pass():
    typed = (
        "def f(rules: Rules, config: RunConfig) -> int: return getattr(config, name) + "
        "getattr(args, 'miniature', 0)"
    )
    assert untyped(ast.parse(typed)) == []


def benchmark_names(tree: ast.AST) -> list[str]:
    """Return the strings and names that contain the name of a benchmark.

    Two kinds of strings are documentation and left out: docstrings, and the examples that a Parser
    shows in its help.
    """
    documentation = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            documentation.add(node.value)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Parser"):
            documentation |= {*ast.walk(node)}
    texts = []
    for node in ast.walk(tree):
        if node in documentation:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
        elif isinstance(node, ast.ImportFrom):
            texts.append(node.module or "")
        elif isinstance(node, ast.alias):
            texts.append(node.name)
        elif isinstance(node, ast.Name):
            texts.append(node.id)
    return [text for text in texts if any(name in text for name in BENCHMARKS)]


def test_shared_code_names_no_benchmark():
    shared = [path for path in SOURCES if path.relative_to(ROOT).parts[0] not in BENCHMARKS]
    assert [
        f"{name_of(path)}: {text}"
        for path in shared
        for text in benchmark_names(ast.parse(path.read_text()))
    ] == []


@pytest.mark.parametrize(
    "text",
    [
        'FULL = "llama31_8b"',
        "from llama31_8b.rules import CLOSED",
        "import llama31_8b",
        'do = f"python -m llama2_70b_lora.prepare {x}"',
        "rules = llama31_8b_rules.CLOSED",
    ],
)
def test_this_test_would_see_a_benchmark(text):
    assert benchmark_names(ast.parse(text))
    assert benchmark_names(ast.parse('"llama31_8b"\nParser("run", "about", ["llama31_8b"])')) == []


def test_each_mode_of_throughput_is_that_of_one_benchmark():
    for mode in ("full", "lora"):
        modes = [
            name
            for name in BENCHMARKS
            if mode in {each.throughput_mode for each in benchmarks.divisions(name).values()}
        ]
        assert modes == [benchmarks.measured_in(mode)]
    with pytest.raises(ConfigError, match="no_such_mode"):
        benchmarks.measured_in("no_such_mode")


# --- what the launcher reads runs without torch ---------------------------------------------------

LIGHT_PACKAGES = ("launch", "submission", "system_tuning")
NEED_TORCH_SOMETIMES = {  # import it in a function
    "launch.multi_node",  # that only a run of several nodes calls
}
# Run in processes that import torch anyway.
NEED_TORCH = {
    "launch.processes.torchrun",
    "launch.preflight.measure",
    "launch.preflight.nodes.all_reduce",
}
LIGHT = [
    *sorted(BASE),
    "common.training.mllog",
    "common.training.log_keys",
    *(f"{name}.rules" for name in sorted(BENCHMARKS)),
]
LIGHT += [module_of(path) for path in SOURCES if path.relative_to(ROOT).parts[0] in LIGHT_PACKAGES]
LIGHT += [module_of(path) for path in SOURCES if path.is_relative_to(ROOT / "common" / "records")]
LIGHT = sorted(
    {name for name in LIGHT if name not in NEED_TORCH and importlib.util.find_spec(name)}
)

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
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "forbidden;"
    assert len(LIGHT) > 40


def test_starting_a_run_imports_neither_tune_nor_the_words_of_plan():
    """Only what derives a config, which the selection needs."""
    code = "import sys, launch.run_command; names = sorted(sys.modules); "
    code += "print([n for n in names if n.startswith(('launch.plan.', 'launch.tune'))])"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.stdout == "['launch.plan.derive_config']\n", done.stderr


def test_only_listed_modules_of_the_launcher_import_torch():
    heavy = {
        module_of(path)
        for path in SOURCES
        if path.relative_to(ROOT).parts[0] in LIGHT_PACKAGES
        and {name.split(".")[0] for name in imported_names(path)} & {"torch", "triton"}
    }
    assert heavy <= NEED_TORCH | NEED_TORCH_SOMETIMES


# --- what no file may contain ---------------------------------------------------------------------


def test_no_file_is_called_utils():
    bad = {"utils", "util", "helpers", "misc"}
    assert [
        path for path in SOURCES if path.stem in bad or set(path.relative_to(ROOT).parts) & bad
    ] == []


def calls(path: Path):
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))


def unsafe(call: ast.Call) -> str:
    """Return why a call could run code from a file or the network, or ""."""
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    function = ast.unparse(call.func)
    for name in ("allow_pickle", "trust_remote_code"):
        if keywords.get(name, "False") != "False":
            return f"{name}={keywords[name]}"
    if function == "torch.load" and keywords.get("weights_only") != "True":
        return "torch.load without weights_only=True"
    if (
        function in ("pickle.load", "pickle.loads", "eval", "exec", "os.system")
        or keywords.get("shell", "False") != "False"
    ):
        return function
    return ""


def test_nothing_reads_pickles_or_runs_foreign_code():
    assert [
        f"{name_of(path)}:{call.lineno}: {unsafe(call)}"
        for path in SOURCES
        for call in calls(path)
        if unsafe(call)
    ] == []


@pytest.mark.parametrize(
    "text",
    [
        "np.load(p, allow_pickle=True)",
        "f(trust_remote_code=True)",
        "torch.load(p)",
        "torch.load(p, weights_only=False)",
        "pickle.load(f)",
    ],
)
def test_this_test_would_see(text):
    (call,) = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    assert unsafe(call)


def test_the_package_metadata_lists_every_package():
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {path.relative_to(ROOT).parts[0] for path in SOURCES}
    excluded = {
        name.rstrip("*") for name in table["tool"]["setuptools"]["packages"]["find"]["exclude"]
    }
    assert excluded == FOLDERS - packages
    left_out = [re.compile(pattern) for pattern in table["tool"]["mypy"]["exclude"]]
    assert [
        path for path in SOURCES if any(pattern.match(name_of(path)) for pattern in left_out)
    ] == []
    pinned = {name for name, _ in requirements(ROOT / "requirements.txt")}
    assert {name.split(">")[0] for name in table["project"]["dependencies"]} <= pinned


def test_a_symlinked_environment_leaves_the_tree_clean(tmp_path):
    (tmp_path / ".gitignore").write_text((ROOT / ".gitignore").read_text())
    (tmp_path / ".venv").symlink_to("elsewhere")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    status = ["git", "status", "--porcelain"]
    found = subprocess.run(status, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert found.stdout.split() == ["??", ".gitignore"]
