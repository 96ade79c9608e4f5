"""The code part of a submission: what a reviewer needs to see and to run it again, out of the commit that ran.

Out of git, not out of the working tree: what is not in the commit did not run, and caches and results cannot slip in.
Files that the policy wants beside the code (mlcommons/policies, submission_rules.adoc): README.md, setup.sh, init_datasets.sh,
run_and_time.sh and <system>_<implementation>.json, in a directory named for the system. Standard library only.
"""

from __future__ import annotations

import io
import json
import shlex
import string
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from common.errors import CheckFailed
from submission.log import Log
from submission.log_rules import DISCLOSURE_KEYS

README = Path(__file__).with_name("implementation_readme.txt")
LEFT_OUT = ("tests", "run_tests.sh", "requirements-test.txt")  # and what begins with a dot, which the repo checker refuses
OF_OTHER_BENCHMARKS = ("__init__.py", "rules.py", "README.md")  # submission/ reads the rules of all; the README links to both


@dataclass(frozen=True)
class Implementation:
    benchmark: str
    name: str
    system: str
    root: Path  # of the project, in its git repository


def write(folder: Path, about: Implementation, log: Log, versions: dict) -> None:
    """Fill `folder`, which must not exist. `log` and `versions` (versions.json) are those of one of the runs. Raises CheckFailed."""
    config = str(log.value("config_filename"))
    _export(folder, about, str(versions["commit"]))
    if not (folder / "configs" / about.benchmark / config).is_file():
        what = f"commit {versions['commit']} has no configs/{about.benchmark}/{config}"
        raise CheckFailed(what, "the log names it as its config (config_filename)", "run with a config of the repository")
    place = folder / about.system
    place.mkdir()
    facts = _facts(about, log, versions, config)
    (place / f"{about.system}_{about.name}.json").write_text(json.dumps(facts, indent=4) + "\n")
    (place / "README.md").write_text(_readme(about, log, versions, config))
    for name, lines in _scripts(about, log, config).items():
        (place / name).write_text("\n".join(("#!/usr/bin/env bash", "set -euo pipefail", *lines, "")))
        (place / name).chmod(0o755)


def _export(folder: Path, about: Implementation, commit: str) -> None:
    command = ["git", "-C", str(about.root), "archive", "--format=tar", commit]
    try:
        archive = subprocess.run(command, capture_output=True, check=True, timeout=120).stdout
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None)
        why = said.decode(errors="replace").strip() if said else str(error)
        raise CheckFailed(
            f"{about.root} has no commit {commit}", why, "package from the repository that the runs were started in"
        ) from None
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        members = [member for member in tar if not member.isdir()]
        benchmarks = {str(PurePosixPath(m.name).parent) for m in members if PurePosixPath(m.name).name == "rules.py"}
        for member in members:
            if _is_needed(PurePosixPath(member.name), about.benchmark, benchmarks):
                _extract(tar, member, folder)


def _is_needed(path: PurePosixPath, benchmark: str, benchmarks: set[str]) -> bool:
    top = path.parts[0]
    if top in LEFT_OUT or top.startswith("."):
        return False
    return top not in benchmarks - {benchmark} or (len(path.parts) == 2 and path.name in OF_OTHER_BENCHMARKS)


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    source = tar.extractfile(member) if member.isfile() else None
    if source is None:
        raise CheckFailed(f"{member.name} is a link in the commit", "links break in a submission (repo checker)", "make it a file")
    path = folder / member.name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(source.read())
    path.chmod(0o755 if member.mode & 0o100 else 0o644)


def _facts(about: Implementation, log: Log, versions: dict, config: str) -> dict:
    """What the policy calls the implementation's measurements file: which config, which code, which number formats."""
    keys = ("global_batch_size", "gradient_accumulation_steps", "opt_base_learning_rate", *DISCLOSURE_KEYS)
    return {
        "benchmark": about.benchmark,
        "implementation": about.name,
        "system": about.system,
        "config": f"configs/{about.benchmark}/{config}",
        "commit": versions["commit"],
        "python": versions.get("python"),
        "packages": versions.get("packages"),
        **{key: log.value(key) for key in keys if log.value(key) is not None},
    }


def _readme(about: Implementation, log: Log, versions: dict, config: str) -> str:
    packages = "\n".join(f"- {name} {version}" for name, version in (versions.get("packages") or {}).items())
    facts = {name: log.value(key) for name, key in (("batch", "global_batch_size"), ("learning_rate", "opt_base_learning_rate"))}
    facts |= {"formats": ", ".join(str(log.value(key)) for key in DISCLOSURE_KEYS[:3]), "packages": packages, "config": config}
    facts |= {"commit": versions["commit"], "python": versions.get("python")}
    return string.Template(README.read_text()).substitute(vars(about), **facts)


def _scripts(about: Implementation, log: Log, config: str) -> dict[str, list[str]]:
    code = 'cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."'
    org, platform = (shlex.quote(str(log.value(f"submission_{name}"))) for name in ("org", "platform"))
    identity = [f"export MLPERF_SUBMISSION_ORG={org} MLPERF_SUBMISSION_PLATFORM={platform}"]
    run = f"exec ./run_and_time.sh {about.benchmark}"
    return {
        "setup.sh": [code, "python3 -m pip install -r requirements.txt  # on AMD GPUs in a container with ROCm's torch: leave torch out"],
        "init_datasets.sh": [code, f'{run} prepare verify --data-dir "${{DATADIR:?the directory of the data}}"'],
        "run_and_time.sh": [code, *identity, f'export DGXSYSTEM={shlex.quote(config.removesuffix(".toml"))} NEXP="${{NEXP:-10}}"', run],
    }
