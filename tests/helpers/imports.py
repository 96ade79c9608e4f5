"""Find the modules of this repository that a file imports, from its syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from common.paths import ROOT


def source_files() -> list[Path]:
    """Return every Python file of the packages at the top of the repository, tests apart."""
    packages = sorted(path.parent for path in ROOT.glob("*/__init__.py"))
    return [path for package in packages for path in sorted(package.rglob("*.py"))]


def module_of(path: Path) -> str:
    """Return the dotted name of a file: `launch/job.py` is `launch.job`."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported_names(path: Path, type_checking: bool = False) -> Iterator[str]:
    """Yield the dotted names that `path` imports, also inside functions.

    Imports under `if TYPE_CHECKING:` are included if `type_checking` is set.
    """
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        if (
            isinstance(node, ast.If)
            and "TYPE_CHECKING" in ast.unparse(node.test)
            and not type_checking
        ):
            nodes += node.orelse
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            nodes += ast.iter_child_nodes(node)


def file_of(name: str) -> Path | None:
    """Return the file of the module that the dotted name `name` is, or is a name in."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        place = ROOT.joinpath(*parts[:end])
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path.is_file():
                return path
    return None


def imported_files(path: Path, type_checking: bool = False) -> set[Path]:
    """Return the files of this repository that `path` imports directly, itself excluded."""
    files = {file_of(name) for name in imported_names(path, type_checking)}
    return {file for file in files if file is not None} - {path}
