"""Test binding ranks to the CPUs of their GPU's NUMA node: a fake /sys, and a real process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.machine import gpu_stats
from common.machine.hardware import Device, Probe
from common.paths import ROOT
from launch.processes.ranks import (
    cpus_of_ranks,
    format_cpu_list,
    parse_cpu_list,
    rank_environment,
    ranks_command,
)

pytestmark = pytest.mark.quick


class Host:
    """A host's /sys with NUMA nodes of the CPU lists `nodes`.

    CPU k + `threads` is the second thread of core k.
    """

    def __init__(self, sysfs: Path, nodes: list[str], gpu_nodes: list[int], threads: int = 0):
        self.sysfs, self.gpus = sysfs, []
        for node, cpulist in enumerate(nodes):
            self.write(f"devices/system/node/node{node}/cpulist", cpulist)
            for cpu in parse_cpu_list(cpulist):
                core = f"{cpu % threads},{cpu % threads + threads}" if threads else str(cpu)
                self.write(f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", core)
        self.write("devices/system/node/has_cpu", "0-1")  # not a node
        for gpu, node in enumerate(gpu_nodes):
            self.write(f"bus/pci/devices/0000:{gpu + 10:02x}:00.0/numa_node", str(node))
            self.gpus.append(Device("H200", "sm_90", 2**37, address=f"GPU-{gpu}"))

    def write(self, name: str, content: str) -> None:
        path = self.sysfs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")

    def bound(self, ranks: int | None = None) -> tuple[str, ...]:
        return cpus_of_ranks(
            Probe("nvidia", tuple(self.gpus), "580"), ranks or len(self.gpus), self.sysfs
        )


@pytest.fixture
def allowed(monkeypatch):
    """Set the CPUs that this process may use; nvidia-smi names the GPUs' addresses.

    At first there are more CPUs than any host of these tests has.
    """

    def allow(cpus):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cpus))

    allow(range(1024))
    rows = [[f"GPU-{gpu}", f"00000000:{gpu + 10:02X}:00.0"] for gpu in range(8)]
    monkeypatch.setattr(gpu_stats, "ask_nvidia_smi", lambda fields, environment: rows)
    return allow


def test_eight_gpus_of_two_sockets_share_their_sockets_cores(tmp_path, allowed):
    """Two EPYC of 96 cores give each rank 24 cores, with both threads of a core in one rank."""
    host = Host(tmp_path, ["0-95,192-287", "96-191,288-383"], [0, 0, 0, 0, 1, 1, 1, 1], threads=192)
    shares = host.bound()
    assert (
        shares[0] == "0-23,192-215"
        and shares[3] == "72-95,264-287"
        and shares[7] == "168-191,360-383"
    )
    assert {cpu for share in shares for cpu in parse_cpu_list(share)} == set(range(384))
    assert sum(len(parse_cpu_list(share)) for share in shares) == 384


def test_gpus_in_another_order_than_their_nodes(tmp_path, allowed):
    host = Host(tmp_path, ["0-15", "16-31"], [1, 0, 1, 0])
    assert host.bound() == ("16-23", "0-7", "24-31", "8-15")
    assert host.bound(ranks=2) == ("16-31", "0-15")


@pytest.mark.parametrize(
    ("nodes", "gpu_nodes"),
    [
        (["0-63"], [0, 0]),  # one node: all CPUs are as near
        (["0-31", "32-63"], [0, -1]),  # the firmware does not say
        (["0-31", "32-63"], [0, 2]),  # a node that is not there
        (["0-63", ""], [0, 0]),  # the second node is memory without CPUs
        ([], [0, 0]),  # a kernel without NUMA
        (["0-31", "32-63"], []),
    ],
)
def test_nothing_is_bound_where_nothing_is_known_or_gained(tmp_path, allowed, nodes, gpu_nodes):
    assert Host(tmp_path, nodes, gpu_nodes).bound() == ()


def test_a_container_with_fewer_cpus(tmp_path, allowed):
    """CPUs outside the container are in no rank's list.

    Ranks that would have too few share those of their node, and no list is empty.
    """
    host = Host(tmp_path, ["0-31", "32-63"], [0, 0, 1, 1])
    allowed({*range(4, 20), *range(40, 63)})
    assert host.bound() == ("4-11", "12-19", "40-50", "51-62")
    allowed({0, 1, 2, *range(40, 60)})
    assert host.bound() == ("0-2", "0-2", "40-49", "50-59")
    allowed(range(32))  # all on one node, with GPUs on both
    assert host.bound() == ()


def test_a_gpu_that_the_driver_does_not_name_or_no_driver(tmp_path, allowed, monkeypatch):
    host = Host(tmp_path, ["0-31", "32-63"], [0, 1])
    host.gpus[1] = Device("H200", "sm_90", 2**37, address="GPU-unknown")
    assert host.bound() == ()

    def fails(fields, environment):
        raise gpu_stats.DriverError("no answer")

    monkeypatch.setattr(gpu_stats, "ask_nvidia_smi", fails)
    assert host.bound() == ()


def test_amd_cards_are_devices_in_sys_themselves(tmp_path, allowed):
    host = Host(tmp_path, ["0-15", "16-31"], [1, 0])
    folders = [tmp_path / f"bus/pci/devices/0000:{gpu + 10:02x}:00.0" for gpu in range(2)]
    cards = tuple(Device("MI300X", "gfx942", 2**37, address=str(folder)) for folder in folders)
    assert cpus_of_ranks(Probe("amd", cards), 2, host.sysfs) == ("16-31", "0-15")


def test_a_rank_numbers_gpus_as_nvidia_smi_does():
    assert rank_environment({}, {}, 1)["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


@pytest.mark.parametrize("cpulist", ["0", "0-3", "0-3,8", "1,3,5-7"])
def test_cpu_lists(cpulist):
    assert format_cpu_list(parse_cpu_list(cpulist)) == cpulist


def test_a_rank_runs_on_its_cpus_as_the_process_that_torchrun_started(tmp_path):
    mine = max(os.sched_getaffinity(0))
    (tmp_path / "rank.py").write_text(
        "import os, sys; print(os.getpid(), os.sched_getaffinity(0), sys.argv[1:], *sys.modules)"
    )
    command = [
        sys.executable,
        "-m",
        "launch.processes.ranks",
        f"4095/{mine}",
        "rank",
        "--device",
        "cuda",
    ]
    environment = os.environ | {"LOCAL_RANK": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    said, _ = process.communicate(timeout=30)
    assert (
        said.startswith(f"{process.pid} {{{mine}}} ['--device', 'cuda']")
        and "common.machine.gpu_stats" not in said
    )
    done = subprocess.run(
        command, env=environment | {"LOCAL_RANK": "0"}, capture_output=True, text=True, timeout=30
    )
    # CPU 4095 is not there: the rank runs all the same.
    assert done.returncode == 0 and "['--device', 'cuda']" in done.stdout
    assert done.stderr.startswith("note: ") and "4095" in done.stderr


def test_torchrun_starts_ranks_by_way_of_the_binding_only_where_there_are_cpus(tmp_path):
    assert ranks_command(tmp_path, 2, ["-m", "toy.train", "--seed", "1"])[-4:] == [
        "-m",
        "toy.train",
        "--seed",
        "1",
    ]
    bound = ranks_command(tmp_path, 2, ["-m", "toy.train", "--seed", "1"], cpus=("0-3", "4-7"))
    assert bound[-6:] == ["-m", "launch.processes.ranks", "0-3/4-7", "toy.train", "--seed", "1"]
