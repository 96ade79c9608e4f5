"""The memory and CPUs that a process may use: its affinity and its control groups."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from imports import source_files

from common.machine.host import available_memory, cpu_count
from common.paths import ROOT

GB = 10**9
UNLIMITED = 0x7FFFFFFFFFFFF000  # what version 1 shows for no limit


def host(root: Path, groups: str, files: dict[str, object]) -> Path:
    """Write a host with 100 GB of memory, whose process is in `groups`."""
    files |= {"proc/self/cgroup": groups, "proc/meminfo": "MemAvailable: 100000000 kB"}
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def version_2(folder: str, limit: object, used: int = 0) -> dict[str, object]:
    group = f"sys/fs/cgroup{folder}"
    return {f"{group}/memory.max": limit, f"{group}/memory.current": used}


def version_1(folder: str, limit: object, used: int = 0) -> dict[str, object]:
    group = f"sys/fs/cgroup/memory{folder}"
    return {f"{group}/memory.limit_in_bytes": limit, f"{group}/memory.usage_in_bytes": used}


JOB = "/slurm/uid_0/job_7"
IN_V1 = f"5:devices:/\n4:memory:{JOB}/step_0\n3:cpu,cpuacct:{JOB}\n"


@pytest.mark.parametrize(
    "groups, files, expected",
    [
        pytest.param("0::/", version_2("", "max"), 102.4, id="no limit"),
        pytest.param("0::/", version_2("", 8 * GB, 3 * GB), 5, id="container"),
        pytest.param(f"0::{JOB}", version_2(JOB, 8 * GB, 3 * GB), 5, id="own group"),
        pytest.param(
            f"0::{JOB}/step_0/user",
            version_2(JOB, 8 * GB, 3 * GB) | version_2(f"{JOB}/step_0", 9 * GB),
            5,
            id="group above",
        ),
        pytest.param(
            IN_V1,
            version_1("", UNLIMITED, GB) | version_1(JOB, 8 * GB, 3 * GB),
            5,
            id="version 1, group above",
        ),
        pytest.param(
            IN_V1,
            version_1("/slurm", 20 * GB, 19 * GB) | version_1(f"{JOB}/step_0", 8 * GB, 3 * GB),
            1,
            id="version 1, the fullest group",
        ),
        pytest.param("4:memory:/docker/1\n", version_1("", 8 * GB, 9 * GB), 0, id="full container"),
        pytest.param(
            f"4:memory:{JOB}",
            version_1(JOB, 8 * GB, 7 * GB)
            | {f"sys/fs/cgroup/memory{JOB}/memory.stat": f"total_inactive_file {2 * GB}"},
            3,
            id="version 1, page cache",
        ),
    ],
)
def test_memory_is_what_the_smallest_control_group_has_left(groups, files, expected, tmp_path):
    assert available_memory(host(tmp_path, groups, files)) == expected * GB


@pytest.mark.parametrize(
    "groups, files, expected",
    [
        pytest.param("0::/", {}, 64, id="no quota"),
        pytest.param("0::/a/b", {"sys/fs/cgroup/a/cpu.max": "max 100000"}, 64, id="max"),
        pytest.param("0::/a/b", {"sys/fs/cgroup/a/cpu.max": "250000 100000"}, 3, id="2.5 CPUs"),
        pytest.param("0::/a", {"sys/fs/cgroup/a/cpu.max": "10000 100000"}, 1, id="0.1 CPUs"),
        pytest.param(
            IN_V1,
            {
                f"sys/fs/cgroup/cpu{JOB}/cpu.cfs_quota_us": 400000,
                f"sys/fs/cgroup/cpu{JOB}/cpu.cfs_period_us": 100000,
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": -1,
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": 100000,
            },
            4,
            id="version 1",
        ),
    ],
)
def test_cpus_are_those_of_the_quota(groups, files, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(64))
    assert cpu_count(host(tmp_path, groups, files)) == expected


def test_cpus_are_those_of_the_affinity():
    program = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from common.machine.host import cpu_count;"
        "from open_llama.prepare import parser;"
        "words = ['text', '--input', 'a', '--data-dir', 'b', '--train-tokenizer', '9'];"
        "print(cpu_count(), parser().parse_args(words).processes)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["1", "1"], done.stderr


def test_nobody_else_counts_cpus():
    counting = [path for path in source_files() if "os.cpu_count" in path.read_text()]
    assert counting == []
