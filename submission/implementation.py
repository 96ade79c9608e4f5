"""The code part of a submission: the files that a reviewer needs to read it and to run it again.

The files come from the commit that ran, not from the working tree. A file outside the commit did
not run, and caches and results cannot slip in. In addition to the code, the policy
(mlcommons/policies, submission_rules.adoc) wants README.md, setup.sh, init_datasets.sh,
run_and_time.sh and <system>_<implementation>.json in a directory named after the system. Standard
library only.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import string
import subprocess
import tarfile
import tomllib
from dataclasses import asdict
from pathlib import Path, PurePosixPath

from common.errors import CheckFailed
from submission import own_log
from submission.log_rules import DISCLOSURE_KEYS
from submission.runs import Run

README = Path(__file__).with_name("implementation_readme.txt")
# Pages that a reader of the packaged code needs, in addition to the page of the GPU. The others are
# about this project's own work.
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
# creates a new README.
LEFT_OUT = (
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
OF_OTHER_BENCHMARKS = ("README.md",)  # the README links to those of all benchmarks


def write(folder: Path, root: Path, system: str, run: Run) -> None:
    """Write the code of `run`, from the git repository at `root`, into the new directory `folder`.

    `system`: ID of the system. Raises CheckFailed if the repository does not have the commit of the
    run, or if that commit contains links or does not have the config that the log names.
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
    # The policy's "measurements file" of the implementation: config, code and number formats.
    facts: dict = {"benchmark": run.benchmark, "implementation": folder.name, "system": system}
    facts |= {"config": f"configs/{run.benchmark}/{config}", "commit": commit}
    facts |= {"python": run.versions.get("python"), "packages": run.versions.get("packages") or {}}
    facts |= {key: run.log.value(key) for key in KEYS if run.log.value(key) is not None}
    place = folder / system
    place.mkdir()
    (place / f"{system}_{folder.name}.json").write_text(json.dumps(facts, indent=4) + "\n")
    packages = "\n".join(f"- {name} {version}" for name, version in facts["packages"].items())
    texts: dict[str, object] = {
        "packages": packages,
        "hyperparameters": "\n".join(hyperparameters(run)),
    }
    texts |= {"nodes": run.nodes, "gpus_per_node": run.gpus_per_node, "gpu": run.gpu}
    page = string.Template(README.read_text())
    (folder / "README.md").write_text(page.substitute(facts | texts, up="", here=f"./{system}"))
    (place / "README.md").write_text(page.substitute(facts | texts, up="../", here="."))
    for name, lines in _scripts(run, config).items():
        (place / name).write_text(
            "\n".join(("#!/usr/bin/env bash", "set -euo pipefail", *lines, ""))
        )
        (place / name).chmod(0o755)


def hyperparameters(run: Run) -> list[str]:
    """Return the rows of a Markdown table: each hyperparameter of the log, its value, its origin.

    The origin is "rules", "config" or "computed".
    """
    fixed = {**asdict(run.rules), **run.rules.fixed_log_values()} if run.rules else {}
    config = tomllib.loads(run.config)
    rows = []
    for key in own_log.init_keys(run.benchmark):
        if key == "seed" or key.startswith("submission_") or run.log.value(key) is None:
            continue
        origin = "computed"
        if key in fixed:
            origin = "rules"
        elif key in config:
            origin = "config"
        rows.append(f"| `{key}` | {run.log.value(key)} | {origin} |")
    return rows


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

    Raises CheckFailed if `root` does not have the commit, or the commit contains links.
    """
    command = ["git", "-C", str(root), "archive", "--format=tar", "--end-of-options", commit]
    try:
        archive = subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        why = (
            (getattr(error, "stderr", b"") or str(error).encode()).decode(errors="replace").strip()
        )
        raise CheckFailed(
            f"{root} has no commit {commit}",
            why,
            "package from the repository that the runs were started in",
        ) from None
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
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


def _scripts(run: Run, config: str) -> dict[str, list[str]]:
    code = 'cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."'
    org = shlex.quote(str(run.log.value("submission_org")))
    platform = shlex.quote(str(run.log.value("submission_platform")))
    identity = [f"export MLPERF_SUBMISSION_ORG={org} MLPERF_SUBMISSION_PLATFORM={platform}"]
    start = f"exec ./run_and_time.sh {run.benchmark}"
    return {
        "setup.sh": [
            code,
            "# installs the packages of requirements.lock into .venv",
            "python3 -m launch.environment requirements.txt",
        ],
        "init_datasets.sh": [
            code,
            f'{start} prepare verify --data-dir "${{DATADIR:?the directory of the data}}"',
        ],
        "run_and_time.sh": [
            code,
            *identity,
            f'export DGXSYSTEM={shlex.quote(config.removesuffix(".toml"))} NEXP="${{NEXP:-10}}"',
            start,
        ],
    }
