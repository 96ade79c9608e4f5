"""Test the system description: machines as trees of files, their values, and missing values."""

import json

import pytest
import synthetic_series

from common.engines import ENGINES
from common.errors import ConfigError
from common.gpu_kinds import GIB
from common.machine import inventory
from common.machine.hardware import Device, Probe
from submission import describe, official_tools

pytestmark = pytest.mark.quick

NVIDIA_8 = Probe(
    "nvidia", tuple(Device("NVIDIA H200", "sm_90", 141 * GIB) for _ in range(8)), "580.65"
)
AMD_8 = Probe(
    "amd",
    tuple(Device("AMD Instinct MI355X", "gfx950", 288 * GIB, 256) for _ in range(8)),
    "6.14.14",
)


def write(root, files: dict[str, str]):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def cpuinfo(
    sockets: int, cores: int, threads: int, model: str, vendor: str, flags: str = "fpu"
) -> str:
    blocks = []
    for number in range(sockets * cores * threads):
        socket = number % (sockets * cores) // cores
        lines = {
            "processor": number,
            "vendor_id": vendor,
            "model name": model,
            "physical id": socket,
            "cpu cores": cores,
            "flags": flags,
        }
        blocks.append("".join(f"{key}\t: {value}\n" for key, value in lines.items()))
    return "\n".join(blocks)


SERVER = {
    "proc/cpuinfo": cpuinfo(2, 64, 2, "AMD EPYC 9575F 64-Core  Processor", "AuthenticAMD"),
    "sys/devices/system/memory/block_size_bytes": "2000000000",
    **{f"sys/devices/system/memory/memory{n}/online": "1" for n in range(24)},
    "proc/sys/kernel/osrelease": "6.8.0-60-generic\n",
    "etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 24.04.2 LTS"\n',
    **{
        f"sys/devices/system/edac/mc/mc{n}/dimm0/{k}": v
        for n in range(24)
        for k, v in {"size": "131072", "dimm_mem_type": "DDR5"}.items()
    },
    **{
        f"sys/block/nvme{n}n1/{k}": v
        for n in range(8)
        for k, v in {"size": "7501476528", "removable": "0"}.items()
    },
    "sys/block/loop0/size": "8\n",
    "sys/block/sda/size": "1875385008\n",
    "sys/block/sda/queue/rotational": "0\n",
    **{
        f"sys/class/infiniband/mlx5_{n}/ports/1/{k}": v
        for n in range(8)
        for k, v in {"rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"}.items()
    },
    "sys/class/net/eth0/device/vendor": "0x15b3\n",
    "sys/class/net/eth0/speed": "25000\n",
    "sys/class/net/lo/speed": "-1\n",
    "sys/class/net/ib0/device/vendor": "0x15b3\n",
    "sys/class/dmi/id/sys_vendor": "Supermicro\n",
    "sys/class/dmi/id/product_name": "AS-8126GS-TNMR\n",
    "opt/rocm/.info/version": "7.0.2\n",
}
ASKED = {"submitter": "Acme", "status": "onprem", "cooling": "liquid"}


@pytest.fixture
def server(tmp_path):
    return write(tmp_path / "server", SERVER)


def test_a_server_is_described_as_it_is(server, monkeypatch):
    monkeypatch.setattr(
        inventory, "version_of", {"torch": "2.13.0", "flash-attn-4": "4.0.0b36"}.get
    )
    told = inventory.facts(server, AMD_8)
    assert told["host_processor_model_name"] == "AMD EPYC 9575F 64-Core Processor"
    assert [
        told[f"host_processor{part}"] for part in ("s_per_node", "_core_count", "_vcpu_count")
    ] == ["2", "64", "256"]
    assert (
        told["host_memory_capacity"] == "3072 GB"
        and told["host_memory_configuration"] == "24 x 128 GB DDR5"
    )
    assert (
        told["host_storage_type"] == "NVMe SSD, SATA/SAS SSD"
        and told["host_storage_capacity"] == "8 x 3.84 TB, 1 x 960 GB"
    )
    assert (
        told["host_networking"] == "8 x InfiniBand 400 Gb/sec, 1 x Ethernet 25 Gb/s"
        and told["host_network_card_count"] == "9"
    )
    assert told["operating_system"] == "Ubuntu 24.04.2 LTS, Linux 6.8.0-60-generic"
    assert (
        told["system_name"] == "Supermicro AS-8126GS-TNMR"
        and told["system_type_detail"] == "bare metal"
    )
    assert told["other_software_stack"].startswith(
        "amdgpu driver 6.14.14, ROCm 7.0.2, FlashAttention-4 4.0.0b36, Python"
    )
    libraries = {"rocm": "10.0.0", "aotriton": "0.13.0"}
    monkeypatch.setattr(inventory, "installed", lambda: libraries)
    stack = inventory.facts(server, AMD_8)["other_software_stack"]
    assert "ROCm 10.0.0, AOTriton 0.13.0," in stack
    assert all(isinstance(text, str) for text in told.values()) and set(told) <= set(describe.KEYS)


def test_the_package_of_every_engine_is_described(server, monkeypatch):
    monkeypatch.setattr(inventory, "version_of", lambda package: f"{package} of the test")
    told = inventory.facts(server, AMD_8)
    for engine in sum(ENGINES.values(), ()):
        assert f"{engine.package} of the test" in told["other_software_stack"] or not engine.package


def test_memory_that_is_offline_does_not_count(tmp_path):
    blocks = {f"sys/devices/system/memory/memory{n}/online": "1" for n in range(12)} | {
        "sys/devices/system/memory/memory12/online": "0"
    }
    root = write(tmp_path, {"sys/devices/system/memory/block_size_bytes": "80000000", **blocks})
    assert inventory.memory(root)["host_memory_capacity"] == "24 GB"


def test_a_small_virtual_machine(tmp_path):
    files = {
        "proc/cpuinfo": cpuinfo(1, 2, 1, "Some CPU", "GenuineIntel", "fpu hypervisor"),
        "sys/block/vda/size": "536870912",
    }
    told = inventory.facts(
        write(
            tmp_path, files | {"sys/class/net/eth0/device/x": "", "sys/class/net/eth0/speed": "-1"}
        ),
        Probe("none"),
    )
    assert (
        told["host_processors_per_node"] == "1" and told["system_type_detail"] == "virtual machine"
    )
    assert told["host_storage_type"] == "virtual disk" and told["host_networking"] == "1 x Ethernet"
    assert (
        "accelerator_model_name" not in told
        and "system_name" not in told
        and "operating_system" not in told
    )


def test_the_cpus_of_a_grace_system(tmp_path):
    """Its cpuinfo has no names; sockets and cores come from the topology."""
    block = "processor\t: {}\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n"
    files = {"proc/cpuinfo": "\n".join(block.format(number) for number in range(144))}
    for number in range(144):
        folder = f"sys/devices/system/cpu/cpu{number}/topology"
        files |= {
            f"{folder}/physical_package_id": str(number // 72),
            f"{folder}/core_id": str(number % 72),
        }
    told = inventory.facts(write(tmp_path, files), Probe("none"))
    assert told["host_processor_model_name"] == "Arm Neoverse V2"
    assert [
        told[f"host_processor{part}"] for part in ("s_per_node", "_core_count", "_vcpu_count")
    ] == ["2", "72", "144"]


def test_a_machine_that_tells_nothing_is_no_crash(tmp_path):
    told = inventory.facts(tmp_path, Probe("none"))
    assert told["number_of_nodes"] == "1" and "host_processor_model_name" not in told


def test_accelerators_by_kind():
    told = inventory.accelerators(AMD_8)
    assert (
        told["accelerator_model_name"] == "AMD Instinct MI355X"
        and told["accelerator_memory_capacity"] == "288 GB"
    )
    assert (
        told["accelerator_memory_configuration"] == "HBM3e"
        and "fully connected" in told["accelerator_interconnect_topology"]
    )
    told = inventory.accelerators(NVIDIA_8)
    assert told["accelerators_per_node"] == "8" and told["accelerator_interconnect"] == "NVLink 4"
    one = inventory.accelerators(Probe("nvidia", NVIDIA_8.devices[:1], "580.65"))
    assert (
        one["accelerator_interconnect"] == "N/A (one accelerator)"
        and one["accelerator_interconnect_topology"] == ""
    )


def test_an_unknown_accelerator_keeps_its_own_name_and_nothing_is_guessed():
    told = inventory.accelerators(
        Probe("nvidia", (Device("NVIDIA Z999", "sm_200", 96 * GIB),), "600")
    )
    assert told == {
        "accelerators_per_node": "1",
        "accelerator_model_name": "NVIDIA Z999",
        "accelerator_memory_capacity": "96 GB",
    }


def test_there_is_a_text_for_every_kind_of_gpu():
    from common.gpu_kinds import DESCRIPTION_KEYS, KINDS

    for name, kind in KINDS.items():
        described = dict(zip(DESCRIPTION_KEYS, kind.description, strict=True))
        assert (
            name in described["model_name"]
            and described["interconnect"]
            and described["memory_configuration"]
        )


def run(path, found, answers=None):
    return describe.describe(path, found, answers or {}, "6.1.0")


def test_what_the_machine_does_not_say_is_asked_for_by_name(server, tmp_path, capsys):
    path = tmp_path / "MI355X.json"
    # An empty status is an error of the official checker, the rest are warnings.
    assert run(path, inventory.facts(server, AMD_8)) == 20
    printed = capsys.readouterr()
    said = printed.err
    assert str(path) in printed.out and f"of {len(describe.KEYS)}" in printed.out
    assert "error: status: ''" in said and all(
        f"warning: --set {key}=" in said for key in ("submitter", "cooling")
    )
    assert "--set hw_notes" not in said and "--set host_processor_model_name" not in said
    assert list(json.loads(path.read_text())) == list(describe.KEYS)


def test_empty_answers_are_warnings_where_the_official_checker_passes(server, tmp_path, capsys):
    path = tmp_path / "MI355X.json"
    assert run(path, inventory.facts(server, AMD_8), {"status": "onprem"}) == 0
    said = capsys.readouterr()
    assert (
        "official checker for 6.1.0: passed" in said.out
        and "warning: --set cooling=" in said.err
        and "error:" not in said.err
    )


def test_complete_it_passes_without_a_warning(server, tmp_path, capsys):
    path = tmp_path / "MI355X.json"
    assert run(path, inventory.facts(server, AMD_8), ASKED | {"framework": "PyTorch 2.13.0"}) == 0
    said = capsys.readouterr()
    assert "official checker for 6.1.0: passed" in said.out and "warning" not in said.err
    description = json.loads(path.read_text())
    assert description["status"] == "Available on-premise" and description["division"] == "closed"
    assert len(description) == 36 and all(isinstance(value, str) for value in description.values())


def test_answers_in_the_file_stay(server, tmp_path, capsys):
    path = tmp_path / "MI355X.json"
    path.write_text(
        json.dumps({"cooling": "immersion", "host_storage_type": "Lustre", "system_name": "TODO"})
    )
    run(path, inventory.facts(server, AMD_8), {"submitter": "Acme"})
    description = json.loads(path.read_text())
    assert description["cooling"] == "immersion" and description["host_storage_type"] == "Lustre"
    assert (
        description["system_name"] == "Supermicro AS-8126GS-TNMR"
        and description["submitter"] == "Acme"
    )
    assert "host_storage_type stays 'Lustre'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value"), [("number_of_nodes", "many"), ("status", "sold"), ("division", "open")]
)
def test_an_invalid_answer_is_refused_before_the_file_is_written(server, tmp_path, key, value):
    path = tmp_path / "MI355X.json"
    assert run(path, inventory.facts(server, AMD_8), {"status": "onprem"}) == 0
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=f"--set {key}={value}"):
        run(path, inventory.facts(server, AMD_8), {key: value})
    assert path.read_bytes() == before


# key, value, what `problems` says; nothing where the official tools accept the value
VALUES = [
    ("status", "available", "status: 'available'"),
    ("division", "Closed", "not 'closed'"),
    ("number_of_nodes", "eight", "not an integer"),
    ("accelerators_per_node", 8, "not a string"),
    ("framework", None, "not a string"),
    ("framework", "TBD", ""),
    ("cooling", "TBD", ""),
    ("number_of_nodes", 1, ""),
    ("host_processors_per_node", 2, ""),
    ("other_software_stack", {"python": "3.12", "rocm": "7.0"}, ""),
    ("other_software_stack", [{"cuda_version": "13.0"}], ""),
    ("host_network_card_count", None, ""),
]


@pytest.mark.parametrize(("key", "value", "said"), VALUES)
def test_an_error_is_what_an_official_tool_refuses(tmp_path, key, value, said):
    description = synthetic_series.DESCRIPTION | {key: value}
    assert [said in line for line in describe.problems(description)] == ([True] if said else [])
    path = tmp_path / "system.json"
    path.write_text(json.dumps(description))
    if key not in (
        "division",
        "number_of_nodes",
    ):  # package_checker and result_summarizer read those two
        assert official_tools.system_description(path, "6.1.0").passed is (not said)


def test_a_missing_field_is_an_error_only_if_the_official_checker_requires_it():
    without = {
        key: text
        for key, text in synthetic_series.DESCRIPTION.items()
        if key not in ("sw_notes", "system_type")
    }
    assert describe.problems(without) == ["sw_notes: missing (system_desc_checker)"]
    assert describe.missing_values(without) == ["--set system_type=..."]


def test_a_good_description_has_neither_errors_nor_warnings():
    assert (
        describe.problems(synthetic_series.DESCRIPTION)
        == describe.missing_values(synthetic_series.DESCRIPTION)
        == []
    )
    without_cores = synthetic_series.DESCRIPTION | {"host_processor_core_count": ""}
    assert describe.missing_values(without_cores) == []  # the policy wants cores or vCPUs


@pytest.mark.parametrize("text", ["", "[" * 200_000, "[]", "\xff"])
def test_a_file_that_is_no_description_is_one_clear_error(tmp_path, text):
    path = tmp_path / "system.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match="system description"):
        describe.read(path)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--out", "x.txt"],
        ["--out", "a b.json"],
        ["--out", "x.JSON"],
        ["--out", "x.json", "--set", "colour=red"],
        ["--out", "x.json", "--submitter", "My Company"],
        ["--out", "x.json", "--set", "submitter=test"],
        ["--out", "x.json", "--set", "system_name=two\nlines"],
        ["--out", "x.json", "--set", 'system_name=a "quote"'],
    ],
)
def test_wrong_usage(tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(describe, "probe", lambda: Probe("none"))
    assert describe.main(arguments) == 2
    assert "error:" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_without_a_gpu_and_with_other_names_than_the_runs_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(describe, "probe", lambda: Probe("none"))
    monkeypatch.setenv("MLPERF_SUBMISSION_ORG", "Other")
    monkeypatch.setenv("MLPERF_SUBMISSION_PLATFORM", "H200")
    arguments = ["--out", str(tmp_path / "H200_1x8.json"), "--submitter", "Us"]
    assert describe.main(arguments) == 20
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note:")]
    text = "\n".join(notes)
    assert "no GPU" in text and "ORG is 'Other', not 'Us'" in text and "'H200_1x8'" in text
    monkeypatch.setattr(describe, "probe", lambda: NVIDIA_8)
    monkeypatch.setenv("MLPERF_SUBMISSION_ORG", "Us")
    monkeypatch.setenv("MLPERF_SUBMISSION_PLATFORM", "1x8 H200")
    arguments[1] = str(tmp_path / "other.json")
    describe.main([*arguments, "--set", "number_of_nodes=1"])
    text = capsys.readouterr().err
    assert "no GPU" not in text and "MLPERF_SUBMISSION" not in text


def test_this_machine(tmp_path, capsys):
    """All keys exist, all values are strings, and the exit code says whether any is missing."""
    path = tmp_path / "this.json"
    code = describe.main(["--out", str(path), "--submitter", "Acme", "--set", "status=rdi"])
    description = json.loads(path.read_text())
    assert set(describe.KEYS) == set(description) and description["host_processor_model_name"]
    assert code == (20 if describe.problems(description) else 0)
