"""The code part of a submission: the files that a reviewer needs to read it and to run it again.

The files come from the commit that ran, not from the working tree. This excludes caches, results,
and changes that did not run. In addition to the code, the policy (mlcommons/policies,
submission_rules.adoc) requires README.md, setup.sh, init_datasets.sh, run_and_time.sh and
<system>_<implementation>.json in a directory named after the system, beside the code. So the code
is shared by the systems of a submission. Standard library only.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import string
import tarfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path, PurePosixPath

from common import engines
from common.errors import CheckFailed, first_line
from common.repository import GitError, git, remote_name
from common.text_tables import markdown
from common.variables import Use, packaged, select
from submission import own_log
from submission.log_rules import DISCLOSURE_KEYS
from submission.run import Run

README = Path(__file__).with_name("implementation_readme.txt")
# Pages that a reader of the packaged code needs, in addition to the page of the GPU kind. The other
# pages describe the development of this project.
DOCS = (
    "architecture.md",
    "checkpoints.md",
    "glossary.md",
    "number_formats.md",
    "preflight.md",
    "run_directory.md",
    "setup.md",
    "system_tuning.md",
    "troubleshooting.md",
)
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
# Names that begin with a dot are left out as well, because the repo checker refuses them. `write`
# creates the README.md of each system.
LEFT_OUT = (
    "AGENTS.md",
    "tests",
    "run_tests.sh",
    "requirements-test.txt",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
)
# Keys of the log that are copied into <system>_<implementation>.json.
KEYS = (
    "global_batch_size",
    "gradient_accumulation_steps",
    "opt_base_learning_rate",
    *DISCLOSURE_KEYS,
)
# Files of other benchmarks that are packaged, because pages link to them.
OF_OTHER_BENCHMARKS = ("README.md",)


def write(folder: Path, root: Path, system: str, run: Run) -> None:
    """Write the code of `run` into the new directory `folder`, its documents into one beside it.

    `root`: git repository of the project. `system`: ID of the system, which names the directory of
    the documents. Raises CheckFailed if the repository does not have the commit of the run, or if
    that commit contains links or lacks the config that the log names.
    """
    config = str(run.log.value("config_filename"))
    commit = str(run.versions["commit"])
    export(folder, root, run.benchmark, commit, str(run.gpu))
    if not (folder / "configs" / run.benchmark / config).is_file():
        raise CheckFailed(
            f"commit {commit} has no configs/{run.benchmark}/{config}",
            "the log names it as its config (config_filename)",
            "run with a config of the repository",
        )
    measurements = {
        "benchmark": run.benchmark,
        "implementation": folder.name,
        "system": system,
        "config": f"configs/{run.benchmark}/{config}",
        "commit": commit,
        "repository": remote_name(root),
        "python": run.versions.get("python"),
        "packages": run.versions.get("packages", {}),
        "engines": run.engines,
        "environment_variables": packaged(run.variables),
        "system_tuning": run.versions.get("system_tuning", {}),
    }
    for key in KEYS:
        if run.log.value(key) is not None:
            measurements[key] = run.log.value(key)
    of_system = folder.parent / system
    of_system.mkdir()
    # The policy calls this the measurements file of the implementation.
    file = of_system / f"{system}_{folder.name}.json"
    file.write_text(json.dumps(measurements, indent=4) + "\n")
    _write_readme(of_system, run, measurements)
    for name, lines in _scripts(run, config, folder.name).items():
        script = "\n".join(("#!/usr/bin/env bash", "set -euo pipefail", *lines, ""))
        (of_system / name).write_text(script)
        (of_system / name).chmod(0o755)


def _write_readme(of_system: Path, run: Run, measurements: dict) -> None:
    """Write README.md into the directory of the system."""
    packages = measurements["packages"].items()
    repository = measurements["repository"]
    private = select(Use.PACKAGED, run.variables).keys() - measurements["environment_variables"]
    values = {
        **measurements,
        "repository": f" of {repository}" if repository else "",
        "packages": "\n".join(f"- {name} {version}" for name, version in packages),
        "hyperparameters": "\n".join(hyperparameters(run)),
        "engines": _rows("operation", "engine", measurements["engines"]),
        "variables": _rows("variable", "value", measurements["environment_variables"]),
        "private": ", ".join(sorted(private)) or "none",
        "host": _rows("setting", "state", measurements["system_tuning"]),
        "nodes": run.nodes,
        "gpus_per_node": run.gpus_per_node,
        "gpu": run.gpu,
    }
    readme = string.Template(README.read_text()).substitute(values)
    (of_system / "README.md").write_text(readme)


def _rows(name: str, value: str, items: Mapping[str, object]) -> str:
    """Return a Markdown table of `items`, "none recorded" if there are none."""
    rows = [[f"`{key}`", f"`{item}`"] for key, item in items.items()]
    return markdown([name, value], rows).rstrip() if rows else "none recorded"


def hyperparameters(run: Run) -> list[str]:
    """Return the rows of a Markdown table: each hyperparameter of the log, its value and origin.

    The origin is "rules", "config" or "computed".
    """
    fixed = {**asdict(run.rules), **run.rules.fixed_log_values()} if run.rules else {}
    rows = []
    for key in own_log.init_keys(run.benchmark):
        if key == "seed" or key.startswith("submission_") or run.log.value(key) is None:
            continue
        origin = "computed"
        if key in fixed:
            origin = "rules"
        elif key in run.settings:
            origin = "config"
        rows.append(f"| `{key}` | {run.log.value(key)} | {origin} |")
    return rows


def engine_names(run: Run) -> dict[str, str]:
    """Return operation -> name of its engine.

    `run.engines` has SDPA's backend of attention instead of "sdpa", and versions of packages.
    """
    names = {}
    for operation, text in run.engines.items():
        name, *_ = str(text).split()
        known = [engine.name for engine in engines.ENGINES[operation]]
        names[operation] = name if name in known else engines.SDPA
    return names


def without_dead_links(page: Path) -> str:
    """Return the text of a Markdown page, with links to missing files replaced by plain text."""

    def kept(link: re.Match) -> str:
        there = "://" in link[3] or (page.parent / link[3]).exists()
        return link[0] if there else link[2]

    return LINK.sub(kept, page.read_text())


def _is_packaged(path: PurePosixPath, benchmark: str, others: set[str], gpu: str) -> bool:
    """Return whether the file at `path` in the commit belongs in the package."""
    top = path.parts[0]
    if top in LEFT_OUT or top.startswith("."):
        return False
    if top in others:
        return path.name in OF_OTHER_BENCHMARKS
    if top == "configs":
        return path.parts[1] == benchmark
    if top == "docs":
        return path.name in DOCS or path.as_posix() == f"docs/gpus/{gpu}.md"
    return True


def export(folder: Path, root: Path, benchmark: str, commit: str, gpu: str = "") -> None:
    """Extract the files of `commit` that belong to `benchmark` on `gpu` into `folder`.

    `root`: git repository of the project. `gpu`: GPU kind, whose page is included. Raises
    CheckFailed if the repository does not have the commit, or if it is empty or contains links.
    """
    with _archive(root, commit) as tar:
        # No filter, as is the default up to Python 3.13: an archive made by git has no path that
        # leads out of the folder.
        tar.extraction_filter = lambda member, path: member
        files = {PurePosixPath(member.name): member for member in tar if not member.isdir()}
        others = {path.parent.name for path in files if path.name == "rules.py"} - {benchmark}
        for path, member in files.items():
            if not _is_packaged(path, benchmark, others, gpu):
                continue
            if not member.isfile():
                raise CheckFailed(
                    f"{path} is a link in the commit",
                    "links break in a submission (repo checker)",
                    "make it a file",
                )
            tar.extract(member, folder)
    for page in folder.rglob("*.md"):
        page.write_text(without_dead_links(page))


def _archive(root: Path, commit: str) -> tarfile.TarFile:
    """Return an archive of `commit`. Raises CheckFailed if the repository has no files of it."""
    try:
        archive = git(root, "archive", "--format=tar", "--end-of-options", commit)
        return tarfile.open(fileobj=io.BytesIO(archive))
    except (GitError, tarfile.ReadError) as error:  # tarfile.ReadError: the commit is empty
        raise CheckFailed(
            f"{root} has no commit {commit}",
            first_line(error),
            "package from the repository that the runs were started in",
        ) from None


def _scripts(run: Run, config: str, implementation: str) -> dict[str, list[str]]:
    """Return file name -> lines of the three scripts that the policy requires."""
    cd_to_code = f'cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")/../{implementation}"'
    org = shlex.quote(str(run.log.value("submission_org")))
    platform = shlex.quote(str(run.log.value("submission_platform")))
    status = shlex.quote(str(run.log.value("submission_status")))
    identity = [
        f"export MLPERF_SUBMISSION_ORG={org} MLPERF_SUBMISSION_PLATFORM={platform}"
        f" MLPERF_SUBMISSION_STATUS={status}"
    ]
    exports = {**packaged(run.variables), **engines.pins(engine_names(run))}
    start = f"exec ./run_and_time.sh {run.benchmark}"
    return {
        "setup.sh": [
            cd_to_code,
            "# Install the packages of requirements.lock into .venv.",
            "python3 -m launch.environment requirements.txt",
        ],
        "init_datasets.sh": [
            cd_to_code,
            f'{start} prepare verify --data-dir "${{DATADIR:?the directory of the data}}"',
        ],
        "run_and_time.sh": [
            cd_to_code,
            *identity,
            "# The variables and the engines of the runs.",
            *(f"export {name}={shlex.quote(value)}" for name, value in exports.items()),
            f'export DGXSYSTEM={shlex.quote(config.removesuffix(".toml"))} NEXP="${{NEXP:-10}}"',
            start,
        ],
    }
