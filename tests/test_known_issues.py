"""Test that entries of the known issues are well-formed and match the right versions and GPUs."""

import re
from dataclasses import replace

import pytest

from common import known_issues
from common.errors import PreflightError
from common.gpu_kinds import KINDS
from launch.preflight.host import judge_known_issues

pytestmark = pytest.mark.quick

GOOD = {
    "MI300X": {
        "torch": "2.13.0+rocm7.2",
        "triton": "3.7.1",
        "rocm": "7.2",
        "aotriton": "0.12.0",
        "driver": "6.16.13",
    },
    # the image of the Dockerfile
    "MI355X": {
        "torch": "2.10.0+rocm7.2.4.lw.git3d3aa833",
        "triton": "3.6.0+rocm7.2.4.git4ed88892",
        "rocm": "7.2.4",
        "aotriton": "0.11.2",
        "driver": "6.16.13",
    },
    "H200": {"torch": "2.13.0+cu130", "triton": "3.7.1", "cuda": "13.0", "driver": "580.95.05"},
}
# from a public report (gfx950, rocm-7.12-bf16-nan); before torch-2.10-rocm-backward
OLD_TORCH = {"torch": "2.9.1+gitff65f5b"}
# (kind, what differs from GOOD, the issues that are shown, whether one refuses)
MET = [
    ("MI355X", {"rocm": "10.0.0"}, ["rocm-10.0-attention-backward"], False),
    ("MI355X", {"rocm": "10.0.1"}, ["rocm-10.0-attention-backward"], False),
    ("MI355X", {"rocm": "10.0.0", "aiter": "0.1.20.post1"}, [], False),
    ("MI300X", {}, ["torch-2.10-rocm-backward", "aotriton-0.11-gfx942-backward"], False),
    (
        "MI325X",
        OLD_TORCH,
        ["aotriton-0.11-gfx942-backward", "rocm-7.1-mi325x-fp8"],
        False,
    ),
    ("MI300X", {"aotriton": "0.12.0"} | OLD_TORCH, [], False),
    ("MI300X", {"aotriton": ""} | OLD_TORCH, [], False),
    ("MI300X", {"aiter": "0.1.14.post1"} | OLD_TORCH, [], False),
    ("MI355X", {"torch": "2.10.0+git0e0ddc8", "rocm": "7.12.60610"}, ["rocm-7.12-bf16-nan"], True),
    (
        "MI350X",
        {"torch": "2.9.1+gitff65f5b", "rocm": "7.13.26183-444cadec35"},
        ["rocm-7.12-bf16-nan"],
        True,
    ),
    # seen on gfx950 only
    ("MI300X", {"rocm": "7.13.26183-444cadec35", "aotriton": ""} | OLD_TORCH, [], False),
    (
        "MI355X",
        {"torch": "2.14.0.dev20260805+rocm7.14", "rocm": "7.14.60850"},
        ["rocm-7.14-gradient-norm"],
        True,
    ),
    ("MI355X", {"triton": "3.7.0+amd.rocm7.0.0.git89002410"}, ["triton-gfx950-bf16-nan"], True),
    ("MI355X", {"triton": "3.7.1"}, [], False),
    (
        "MI300X",
        {"triton": "3.8.0+git10f6be36", "aotriton": ""},
        ["triton-3.8.0-gfx942-spills", "torch-2.10-rocm-backward"],
        False,
    ),
    (
        "MI325X",
        {"rocm": "7.1.25424", "aotriton": ""} | OLD_TORCH,
        ["rocm-7.1-mi325x-fp8"],
        False,
    ),
    ("H200", {"triton": "3.8.0"}, ["triton-3.8.0-hopper-fp8"], False),
]


def versions_of(kind: str, changed: dict[str, str]) -> dict[str, str]:
    base = "H200" if KINDS[kind].vendor == "nvidia" else "MI355X"
    return GOOD[base] | changed


def test_every_entry_is_well_formed():
    issues = known_issues.ISSUES
    architectures = {kind.arch for kind in KINDS.values()} | {"sm_100", "gfx1250"}
    assert len({issue.name for issue in issues}) == len(issues)
    for issue in issues:
        assert issue.verdict in ("refuse", "warn", "suspect") and issue.symptom and issue.cure, (
            issue.name
        )
        assert re.match(r"https://(github|docs\.nvidia)\.com/\S+$", issue.source), issue.name
        assert set(issue.gpus) <= architectures | KINDS.keys(), issue.name
        assert all(
            op.startswith(("attention", "bf16 product", "FP8 product", "triton"))
            for op in issue.ops
        ), issue.name
        assert not issue.text or issue.ops, f"{issue.name}: only the self-test's lines are searched"
        re.compile(issue.text)
        assert issue.verdict != "suspect" or issue.ops, f"{issue.name} would never be shown"
        for _, text in issue.ranges:
            known_issues.within("1.0", text)


@pytest.mark.parametrize("kind", GOOD)
def test_what_is_said_to_work_meets_nothing_but_the_slow_backward(kind):
    names = ["torch-2.10-rocm-backward"] if kind == "MI300X" else []
    assert [issue.name for issue in known_issues.shown(KINDS[kind], GOOD[kind], {})] == names
    assert len(known_issues.notes(KINDS[kind], GOOD[kind], {})) == len(names)
    assert known_issues.refusals(KINDS[kind], GOOD[kind], {}) == []
    assert judge_known_issues(KINDS[kind], GOOD[kind], {}).verdict == ("warn" if names else "ok")


@pytest.mark.parametrize(
    ("kind", "changed", "names", "refuses"), MET, ids=lambda value: str(value)[:40]
)
def test_versions_meet_their_issues(kind, changed, names, refuses):
    versions = versions_of(kind, changed)
    assert [issue.name for issue in known_issues.shown(KINDS[kind], versions, {})] == names
    row = judge_known_issues(KINDS[kind], versions, {})
    assert row.verdict == ("refuse" if refuses else "warn" if names else "ok")
    assert all(name in row.value for name in names)
    errors = known_issues.refusals(KINDS[kind], versions, {})
    assert bool(errors) == refuses
    if refuses:
        assert isinstance(errors[0], PreflightError) and "wrongly" in errors[0].what
        assert names[0] in errors[0].why and "https://" in errors[0].why
        assert f"ALLOW_KNOWN_ISSUES={names[0]}" in errors[0].do
        allowed = {"ALLOW_KNOWN_ISSUES": f"other,{names[0]}"}
        for environment in ({}, allowed):
            assert names[0] in known_issues.notes(KINDS[kind], versions, environment)[0]
        left = known_issues.refusals(KINDS[kind], versions, allowed)
        assert len(left) == len(errors) - 1


def test_an_architecture_without_a_kind_meets_its_issues():
    unknown = replace(KINDS["MI355X"], name="MI455X", arch="gfx1250")
    for triton, names in (("3.7.1", []), ("3.8.0", ["triton-3.8-gfx1250"]), ("3.9.0", [])):
        errors = known_issues.refusals(unknown, {"triton": triton}, {})
        assert [str(error.why).partition(":")[0] for error in errors] == names


def test_an_unknown_newer_version_only_warns(monkeypatch):
    for old in ("10.0", "10.0.1", "7.2.4"):
        assert known_issues.newer({"rocm": old}) == {}
    assert known_issues.newer({"rocm": "10.1.0a20260901", "torch": "3"}).keys() == {"rocm", "torch"}
    versions = versions_of("MI355X", {"triton": "4.1.0"})
    (note,) = known_issues.notes(KINDS["MI355X"], versions, {})
    assert "triton 4.1.0" in note and "newer" in note
    assert judge_known_issues(KINDS["MI355X"], versions, {}).verdict == "warn"
    open_ended = known_issues.KnownIssue(
        "never-fixed",
        "refuse",
        "wrong",
        "none",
        "https://github.com/x",
        ("gfx950",),
        (("triton", ">=3.0"),),
    )
    monkeypatch.setattr(known_issues, "ISSUES", [open_ended])
    monkeypatch.setattr(known_issues, "NEWEST", {"triton": "3.9"})
    assert [issue.verdict for issue in known_issues.matching(KINDS["MI355X"], versions)] == ["warn"]
    assert [
        issue.verdict for issue in known_issues.matching(KINDS["MI355X"], {"triton": "3.9.2"})
    ] == ["refuse"]
    assert known_issues.matching(KINDS["MI355X"], {}) == [], (
        "a version that is not known meets no range"
    )


@pytest.mark.parametrize(
    ("version", "text", "inside"),
    [
        ("3.7.0+amd.rocm7.0", ">=3.7, <3.7.1", True),
        ("3.7", ">=3.7.0, <3.7.1", True),
        ("3.7.1", ">=3.7, <3.7.1", False),
        ("7.2.53211-e1a6bc5663", ">=7.1, <7.2", False),
        ("7.12.1", ">=7.2", True),  # numbers, not letters
        ("580.95.05", "<580", False),
        ("git1234", ">=0", False),
        ("", ">=0", False),
        ("", "absent", True),
        ("0.1.14", "absent", False),
    ],
)
def test_ranges(version, text, inside):
    assert known_issues.within(version, text) == inside


NOT_FINITE = "not finite (minimum 30 dB)"
CRASH = "PassManager::run failed (minimum 40 dB)"


@pytest.mark.parametrize(
    ("kind", "op", "line", "named", "not_named"),
    [
        ("MI325X", "attention backward dQ", NOT_FINITE, "ck-16-bit-atomics", "hipblaslt-workspace"),
        ("MI355X", "attention", NOT_FINITE, "aotriton-large-bf16", "ck-16-bit-atomics"),
        (
            "MI300X",
            "triton RoPE backward",
            CRASH,
            "triton-3.6-pointer-choice",
            "triton-amd-four-stages",
        ),
        ("H200", "triton RMS norm", NOT_FINITE, "ptxas-12-hopper", "triton-3.8.0-hopper-fp8"),
        ("MI300X", "triton adapter down", CRASH, "triton-amd-four-stages", "aotriton-large-bf16"),
        (
            "MI300X",
            "FP8 product qkv wgrad",
            "HIPBLAS_STATUS_NOT_SUPPORTED",
            "hipblaslt-workspace",
            "hipblaslt-solution-320617",
        ),
        (
            "MI300X",
            "FP8 product qkv wgrad",
            NOT_FINITE,
            "hipblaslt-solution-320617",
            "hipblaslt-workspace",
        ),
    ],
)
def test_suspects_are_named_only_for_their_ops_and_errors(kind, op, line, named, not_named):
    names = {
        issue.name
        for issue in known_issues.suspects([(op, line)], KINDS[kind], versions_of(kind, {}))
    }
    assert named in names and not_named not in names


def test_wrong_numbers_are_not_taken_for_a_crash():
    failures = [("triton RoPE backward", "12.3 dB (minimum 40 dB)")]
    issues = known_issues.suspects(failures, KINDS["MI300X"], versions_of("MI300X", {}))
    assert not [issue.name for issue in issues if "PassManager" in issue.text]


# Versions of torch, its hip and rocm, and AOTriton, from environments in public reports. `rocm`
# exists since pytorch#168097.
BUILDS = [
    ("2.10.0+rocm7.2.4.lw.git3d3aa833", "7.2.53211", "7.2.4", "0.11.2", "7.2.4"),
    ("2.10.0+rocm7.2.2.git23d69b29", "7.2.53211", None, None, "7.2.2"),
    ("2.9.1+gitff65f5b", "7.2.53211-e1a6bc5663", None, "0.11.1", "7.2.53211-e1a6bc5663"),
    ("2.12.0+rocm10.0.0", "7.15.26333", "10.0.0", "0.13.0", "10.0.0"),
    ("2.13.0+rocm10.0.0", "7.15.26333", None, None, "10.0.0"),
]


@pytest.mark.parametrize(("torch_version", "hip", "rocm", "aotriton", "expected"), BUILDS)
def test_versions_are_found_without_importing_torch(
    tmp_path, monkeypatch, torch_version, hip, rocm, aotriton, expected
):
    torch = tmp_path / "torch"
    (torch / "lib").mkdir(parents=True)
    (torch / "__init__.py").write_text("raise RuntimeError('imported')")
    lines = [f"__version__ = '{torch_version}'", "cuda: Optional[str] = None"]
    lines.append(f"hip: Optional[str] = '{hip}'")
    if rocm:
        lines.append(f"rocm: Optional[str] = '{rocm}'")
    (torch / "version.py").write_text("\n".join(lines) + "\n")
    if aotriton:
        (torch / f"lib/libaotriton_v2.so.{aotriton}").touch()
        (torch / "lib/libaotriton_v2.so").symlink_to(f"libaotriton_v2.so.{aotriton}")
    packages = {"torch": torch_version, "pytorch-triton-rocm": "3.6.0", "amd-aiter": "0.1.5"}

    def version(name):
        if name not in packages:
            raise known_issues.importlib.metadata.PackageNotFoundError(name)
        return packages[name]

    monkeypatch.setattr(known_issues.importlib.metadata, "version", version)
    spec = known_issues.importlib.util.spec_from_file_location("torch", torch / "__init__.py")
    monkeypatch.setattr(known_issues.importlib.util, "find_spec", lambda name: spec)
    versions = {
        "torch": torch_version,
        "triton": "3.6.0",
        "aiter": "0.1.5",
        "rocm": expected,
        "driver": "6.16.13",
    }
    if aotriton:
        versions["aotriton"] = aotriton
    assert known_issues.installed("6.16.13") == versions
