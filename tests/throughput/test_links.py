"""Test the links between GPUs, parsed from the output of drivers, and their rows and table."""

import sys

import pytest

from common.measure import report
from throughput import links, scaling

pytestmark = pytest.mark.quick

# Written after the tools' own output; the tabs, escape sequences and further columns are theirs.
NVIDIA = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-47,96-143\t0\t\tN/A
GPU1\tNV18\t X \tNODE\tSYS\t0-47,96-143\t0\t\tN/A
GPU2\tSYS\tNODE\t X \tSYS\t48-95,144-191\t1\t\tN/A
NIC0\tPIX\tSYS\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes \
(e.g., QPI/UPI)
"""
AMD = """\
============================ ROCm System Management Interface ============================
================================ Weight between two GPUs =================================
       GPU0         GPU1         GPU2
GPU0   0            15           30
GPU1   15           0            15
GPU2   30           15           0

================================= Hops between two GPUs ==================================
       GPU0         GPU1         GPU2
GPU0   0            1            2
GPU1   1            0            1
GPU2   2            1            0

=============================== Link Type between two GPUs ===============================
       GPU0         GPU1         GPU2
GPU0   0            XGMI         PCIE
GPU1   XGMI         0            XGMI
GPU2   PCIE         XGMI         0

======================================= Numa Nodes =======================================
GPU[0]\t\t: (Topology) Numa Node: 0
================================== End of ROCm SMI Log ===================================
"""
OF_NVIDIA = {
    (0, 1): "NV18",
    (1, 0): "NV18",
    (0, 2): "SYS",
    (2, 0): "SYS",
    (1, 2): "NODE",
    (2, 1): "NODE",
}
OF_AMD = {
    (0, 1): "XGMI",
    (1, 0): "XGMI",
    (0, 2): "PCIE",
    (2, 0): "PCIE",
    (1, 2): "XGMI",
    (2, 1): "XGMI",
}


def test_the_matrix_of_nvidia_smi_is_read_without_network_cards():
    assert links.parse_nvidia(NVIDIA) == OF_NVIDIA


def test_the_matrix_of_link_types_of_rocm_smi_is_read():
    assert links.parse_rocm(AMD) == OF_AMD


@pytest.mark.parametrize("parse", [links.parse_nvidia, links.parse_rocm])
def test_other_text_has_no_links(parse):
    assert (
        parse("") == {}
        and parse("No devices were found\n") == {}
        and parse("\tGPU0\tCPU Affinity\nGPU0\t X \t0-7\n") == {}
    )


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """Both tools print their text."""
    for vendor, text in (("nvidia", NVIDIA), ("amd", AMD)):
        (tmp_path / vendor).write_text(text)
        command = [
            sys.executable,
            "-c",
            "import sys; print(open(sys.argv[1]).read())",
            str(tmp_path / vendor),
        ]
        monkeypatch.setitem(links.COMMANDS, vendor, command)


@pytest.mark.parametrize(
    ("vendor", "environment", "expected"),
    [
        ("nvidia", {}, OF_NVIDIA),
        ("amd", {}, OF_AMD),
        ("nvidia", {"CUDA_VISIBLE_DEVICES": "2,0"}, {(0, 1): "SYS", (1, 0): "SYS"}),
        (
            "amd",
            {"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1,0"},
            {(0, 1): "XGMI", (1, 0): "XGMI"},
        ),
    ],
)
def test_links_have_the_numbers_by_which_torch_knows_the_gpus(
    driver, vendor, environment, expected
):
    count = 1 + max(gpu for pair in expected for gpu in pair)
    assert links.read_names(vendor, environment, count) == (expected, "")


def test_where_the_numbers_are_not_known_there_are_no_links_but_a_reason(driver, monkeypatch):
    names, why = links.read_names("nvidia", {}, 2)
    assert names == {} and "3 GPUs" in why
    monkeypatch.setitem(links.COMMANDS, "nvidia", ["/no/such/tool"])
    names, why = links.read_names("nvidia", {}, 3)
    assert names == {} and "/no/such/tool" in why


def test_a_pair_has_what_the_driver_says_and_what_was_measured():
    copies = [[0, 1, 365.0, True], [1, 0, 360.0, True], [1, 2, 40.0, False]]
    rows = {row["pair"]: row for row in links.rows({(0, 1): "NV18", (0, 2): "SYS"}, copies)}
    assert rows == {
        "0 to 1": {"pair": "0 to 1", "link": "NV18", "peer": "yes", "gb_per_s": 365.0},
        "0 to 2": {"pair": "0 to 2", "link": "SYS"},
        "1 to 0": {"pair": "1 to 0", "link": "unknown", "peer": "yes", "gb_per_s": 360.0},
        "1 to 2": {"pair": "1 to 2", "link": "unknown", "peer": "no", "gb_per_s": 40.0},
    }


def test_the_page_shows_each_link_and_speed():
    copies = [[i, j, 100.0 + 10 * i + j, True] for i, j in OF_NVIDIA]
    rows = links.rows(OF_NVIDIA, copies)
    _, table = report.charts_of(scaling.LINKS.plots[0], scaling.LINKS, rows, {})
    assert table["heads"] == ("GPU", "0", "1", "2")
    assert table["table"] == [
        ("0", "", "101 NV18", "102 SYS"),
        ("1", "110 NV18", "", "112 NODE"),
        ("2", "120 SYS", "121 NODE", ""),
    ]
