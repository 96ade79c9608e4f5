"""Tables of docs/settings.md: every config key, and every environment variable that the code reads.

Config keys come from the dataclasses, their meaning from the comment beside or above each field.
Environment variables are found in the syntax tree of the product's Python files and in its shell
scripts. Their meaning comes from common/variables.py. A variable without an entry, or an entry
without a variable, is an error.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path

from common.benchmarks import names
from common.config import RunConfig
from common.paths import ROOT
from common.text_tables import markdown
from common.variables import TABLE, Use

SCRIPTS = ("run_and_time.sh", "run_with_docker.sh", "run.sub", "kubernetes_manifest.sh")
# Names that Python code gives to the environment of this process or of a child.
ENVIRONMENTS = ("environ", "environment", "env")
VARIABLE = re.compile(r"[A-Z][A-Z0-9_]+")
SHELL_VARIABLE = re.compile(r"\$\{?([A-Z][A-Z0-9_]{2,})")
# Set by the shell itself, or in the same script before it is read.
SHELL_OWN = {"BASH_REMATCH", "BASH_SOURCE", "BASH_VERSION", "PWD", "HOME"}


# ---- config keys


def comments_of(path: Path, class_name: str) -> dict[str, str]:
    """Return the comment of each field of a dataclass: beside it, or in the lines above it."""
    source = path.read_text()
    lines = source.splitlines()
    tree = ast.parse(source)
    (body,) = [
        node.body
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == class_name
    ]
    comments = {}
    for node in body:
        if not isinstance(node, ast.AnnAssign):
            continue
        assert isinstance(node.target, ast.Name)
        assert node.end_lineno is not None
        _, _, beside = lines[node.end_lineno - 1].partition("  # ")
        comments[node.target.id] = beside or _comment_above(lines, node.lineno - 1)
    return comments


def _comment_above(lines: list[str], index: int) -> str:
    above: list[str] = []
    while lines[index - 1].lstrip().startswith("# "):
        index -= 1
        above.insert(0, lines[index].strip().removeprefix("# "))
    return " ".join(above)


def default_of(field: Field) -> str:
    if field.default is not MISSING:
        return f"`{str(field.default).lower() if field.type == 'bool' else repr(field.default)}`"
    return "none: required" if field.default_factory is MISSING else "empty"


def keys_table() -> str:
    """Return one row for each key: of all benchmarks first, then of one benchmark."""
    shared = comments_of(ROOT / "common" / "config.py", "RunConfig")
    rows = [key_row(field, "all", shared) for field in fields(RunConfig)]
    for benchmark in sorted(names()):
        config = importlib.import_module(f"{benchmark}.rules").Config
        comments = comments_of(Path(inspect.getfile(config)), config.__name__)
        rows += [
            key_row(field, benchmark, comments)
            for field in fields(config)
            if field.name not in shared
        ]
    return markdown(["key", "type", "default", "benchmark", "meaning"], rows)


def key_row(field: Field, benchmark: str, comments: dict[str, str]) -> list[str]:
    meaning = comments[field.name].replace("|", "\\|")
    return [f"`{field.name}`", f"`{field.type}`", default_of(field), benchmark, meaning]


# ---- environment variables


def product_files() -> list[Path]:
    return [
        path
        for path in sorted(ROOT.glob("[!.]*/**/*.py"))
        if path.relative_to(ROOT).parts[0] not in ("tests", "build")
    ]


def constants(tree: ast.Module) -> dict[str, tuple[str, ...]]:
    """Return the strings that a file's module-level constants hold, by the constant's name."""
    return {
        target.id: strings_of(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def strings_of(node: ast.expr) -> tuple[str, ...]:
    """Return the string, or the strings of the tuple, that a literal holds."""
    elements = node.elts if isinstance(node, ast.Tuple) else [node]
    return tuple(
        element.value
        for element in elements
        if isinstance(element, ast.Constant) and isinstance(element.value, str)
    )


def loop_values(tree: ast.Module, known: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return the strings that each loop variable takes, where the loop is over such constants."""
    return {
        node.target.id: known[node.iter.id]
        for node in ast.walk(tree)
        if isinstance(node, ast.For | ast.comprehension)
        and isinstance(node.target, ast.Name)
        and isinstance(node.iter, ast.Name)
        and node.iter.id in known
    }


def is_environment(node: ast.expr) -> bool:
    name = getattr(node, "attr", None) or getattr(node, "id", None)
    return name in ENVIRONMENTS


def variable_expressions(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield the names of variables in environ[X], environ.get(X), X in environ and of_variable."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and is_environment(node.value):
            yield node.slice
        elif isinstance(node, ast.Compare) and is_environment(node.comparators[0]):
            yield node.left
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("get", "pop", "setdefault")
            and is_environment(node.func.value)
        ):
            yield node.args[0]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "of_variable":
            yield node.args[1]


def variables() -> set[str]:
    """Return the environment variables that the product reads."""
    trees = [ast.parse(path.read_text()) for path in product_files()]
    exported: dict[str, tuple[str, ...]] = {}
    for tree in trees:
        exported |= constants(tree)
    read: set[str] = set()
    for tree in trees:
        known = exported | constants(tree)  # a file's own constants hide other files'
        known |= loop_values(tree, known)
        for expression in variable_expressions(tree):
            values = strings_of(expression)
            if isinstance(expression, ast.Name):
                values = known.get(expression.id, ())
            read.update(filter(VARIABLE.fullmatch, values))
    for script in SCRIPTS:
        read.update(SHELL_VARIABLE.findall((ROOT / script).read_text()))
    return read - SHELL_OWN


def variables_table() -> str:
    """Return one row for each variable and prefix, with its uses."""
    read = variables()
    entries = {name for name, variable in TABLE.items() if not variable.is_prefix}
    if read != entries:
        missing = sorted(read - entries)
        raise SystemExit(
            "error: common/variables.py does not match the code\n"
            f"  why: without an entry: {missing}; not read: {sorted(entries - read)}\n"
            "  do:  add or delete the entries"
        )
    uses = (Use.RECORDED, Use.COMPARED, Use.PACKAGED)
    rows = []
    for variable in TABLE.values():
        container = "yes" if Use.POD in variable.use else "not in Kubernetes"
        cells = [container if Use.CONTAINER in variable.use else "no"]
        cells += ["yes" if use in variable.use else "no" for use in uses]
        meaning = f"passed on: {variable.meaning}" if variable.is_prefix else variable.meaning
        rows.append([f"`{variable.name}`", variable.set_by, *cells, meaning])
    head = ["variable", "set by", "containers", "recorded", "compared", "packaged", "meaning"]
    return markdown(head, rows)
