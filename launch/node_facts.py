"""Facts that must be equal on all nodes of a run.

Every start compares them (launch/multi_node.py), and so does `preflight --nodes`. Standard library
only.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from common.machine import network
from common.machine.gpu_stats import DriverError, read_constants
from common.machine.hardware import Probe
from common.paths import ROOT
from common.training.continuation import base_record, data_record
from common.variables import Use, select
from launch import series
from launch.job import Job
from launch.run_directory import package_versions

DIGITS = 12  # of a digest, for display


def node_facts(job: Job) -> dict[str, str]:
    """Return the facts about this node as it would run `job`.

    The path of the data may differ between nodes, and the code need not be in a git repository.
    Call it before the runs, each of which clears the page cache before its clock starts: it reads
    samples of the files. Raises DataError and WeightsError if one cannot be read.
    """
    identity = series.identity_of(job.selection, job.data_dir, None, ROOT, job.benchmark)
    facts = {
        "code": identity["code_sha256"][:DIGITS],
        "config": identity["config"],
        "content of the config": identity["config_sha256"][:DIGITS],
        "device": identity["device"],
        "model": str(job.rules.shape),
    }
    facts |= machine_facts(job.run_gpus, {**job.environment, **job.config.env})
    for operation, engine in job.engines.versions.items():
        facts[f"engine of {operation}"] = engine
    return facts | _facts_of_files(job)


def machine_facts(gpus: Probe, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the facts that do not depend on a job: software, GPUs, driver and variables."""
    devices = Counter(map(str, gpus.devices))
    facts = {
        "Python": platform.python_version(),
        "GPUs": "; ".join(f"{count} x {text}" for text, count in devices.items()) or "none",
        "driver": gpus.driver or "none",
    }
    facts |= {f"package {name}": version for name, version in package_versions(ROOT).items()}
    variables = select(Use.COMPARED, environment)
    return facts | {f"variable {name}": value for name, value in variables.items()}


def hardware_facts(gpus: Probe, root: Path = Path("/")) -> dict[str, str]:
    """Return facts that should be equal, because they affect speed: firmware, clocks and links.

    `root`: of the file system. If the driver does not describe the GPUs, its message is a fact.
    """
    facts = {"kernel": platform.release()}
    try:
        constants = read_constants(gpus.vendor, [device.address for device in gpus.devices])
        facts |= {f"GPU {name}": value for name, value in constants.items()}
    except DriverError as error:
        facts["GPU firmware and clocks"] = str(error)
    for name, card in network.interfaces(root).items():
        if card["card"]:
            facts[f"interface {name}"] = f"{card['gbit_s']:g} Gb/s, MTU {card['mtu']}"
    for name, port in network.rdma_ports(root).items():
        facts[f"RDMA port {name}"] = f"{port['gbit_s']:g} Gb/s {port['link_layer']}"
    return facts


def _facts_of_files(job: Job) -> dict[str, str]:
    """Return "data NAME" or "weights NAME" -> size and sample of each file that the ranks read."""
    weights = job.rules.weights_folder(job.config, job.data_dir, job.environment)
    records = {
        "data": data_record(job.data_dir, job.rules.recorded_files(job.data_dir)),
        "weights": base_record(weights),
    }
    return {
        f"{kind} {name}": f"{size} bytes with sampled SHA-256 {sha256[:DIGITS]}"
        for kind, record in records.items()
        for name, (size, sha256) in record.items()
    }


def differences(facts: Mapping[str, str], others: Mapping[str, str]) -> list[str]:
    """Describe each difference between a node's `facts` and `others`."""
    return [
        f"{name}: {facts.get(name, 'missing')} instead of {others.get(name, 'missing')}"
        for name in dict.fromkeys([*others, *facts])
        if facts.get(name) != others.get(name)
    ]
