"""The choice of engines: what is installed, too old, rejected or pinned, on every GPU."""

from types import SimpleNamespace

import pytest

from common import engines
from common.engines import ATTENTION, PRODUCTS, SWIGLU, choose, in_use, reject, version_key
from common.errors import ConfigError

pytestmark = pytest.mark.quick

GOOD = {
    "flash-attn-4": "4.0.0b36",
    "amd-aiter": "0.1.14.post1",
    "transformer-engine": "2.20.2",
    "quack-kernels": "0.6.5",
}


@pytest.fixture
def installed(monkeypatch):
    """Packages of this machine: name -> version. Every module can be imported."""
    packages = {}
    monkeypatch.setattr(engines, "version_of", lambda name: packages.get(name, ""))
    monkeypatch.setattr(engines, "module_of", lambda engine: SimpleNamespace(require=lambda: None))
    for variable in engines.VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)
    return packages


@pytest.mark.parametrize(
    ("gpu", "attention", "products", "swiglu"),
    [
        ("sm_90", "flash_attention_4", "cublaslt", "quack"),
        ("sm_100", "sdpa", "cublaslt", "kernel"),
        ("gfx942", "aiter", "torch", "kernel"),
        ("gfx950", "aiter", "torch", "kernel"),
        ("gfx90a", "sdpa", "torch", "kernel"),
        ("", "sdpa", "torch", "kernel"),
    ],
)
def test_the_fastest_engine_of_each_gpu(installed, gpu, attention, products, swiglu):
    installed |= GOOD
    assert choose(ATTENTION, gpu, {}).engine.name == attention
    assert choose(PRODUCTS, gpu, {}).engine.name == products
    assert choose(SWIGLU, gpu, {}).engine.name == swiglu


@pytest.mark.parametrize(
    ("gpu", "names"),
    [
        ("gfx942", ["aiter", "transformer_engine", "repeated_heads"]),
        ("sm_90", ["flash_attention_4", "sdpa"]),
    ],
)
def test_without_a_package_the_next_one_is_used_and_what_installs_it_is_said(installed, gpu, names):
    installed |= GOOD
    packages = {engine.name: engine for engine in engines.ENGINES[ATTENTION]}
    for said, name in enumerate(names):
        choice = choose(ATTENTION, gpu, {})
        assert choice.engine.name == name and len(choice.faster) == said
        for passed, faster in zip(names[:said], choice.faster, strict=True):
            assert packages[passed].advice(gpu) in str(faster)
        installed.pop(packages[name].package, None)


def test_engines_with_commands_of_their_own_have_notes_of_their_own(installed):
    described = engines.choose_engines("gfx942", {}, "bf16", [ATTENTION, PRODUCTS])
    notes = described.lines()[1:]
    assert len(notes) == len(described.faster) == 2
    for note, name in zip(notes, ("aiter", "transformer_engine"), strict=True):
        assert name in note


@pytest.mark.parametrize("inside", [False, True])
def test_advice_can_be_followed_where_it_is_printed(installed, monkeypatch, inside):
    monkeypatch.setattr(engines, "in_container", lambda: inside)
    aiter, fork = map(str, choose(ATTENTION, "gfx942", {}).faster)
    assert ("pip install" in aiter) != inside and ("--build-arg AITER=v0" in aiter) == inside
    assert "ROCm's fork" in fork and "pip" not in fork, "PyPI's is for NVIDIA"
    with pytest.raises(ConfigError, match="transformer_engine") as caught:
        choose(ATTENTION, "sm_90", {"ATTENTION_ENGINE": "transformer_engine"})
    assert "pip install" in caught.value.why


def test_a_rejected_engine_has_a_note_of_its_own(installed):
    installed |= GOOD
    assert reject(ATTENTION, in_use(ATTENTION, "sm_90"), "self-test failed: 3.0 dB")
    assert reject(SWIGLU, in_use(SWIGLU, "sm_90"), "self-test failed: 4.0 dB")
    described = engines.choose_engines("sm_90", {}, "fp8", [ATTENTION, SWIGLU])
    first, second = described.lines()[1:]
    assert "3.0 dB" in first and "4.0 dB" in second


@pytest.mark.parametrize(
    ("package", "version", "gpu", "good"),
    [
        ("flash-attn-4", "4.0.0b9", "sm_90", False),
        ("flash-attn-4", "4.0.0b10", "sm_90", True),
        ("flash-attn-4", "4.0.0", "sm_90", True),
        ("amd-aiter", "0.1.14", "gfx942", False),
        ("amd-aiter", "0.1.9.post1", "gfx950", False),
        ("amd-aiter", "0.1.14.post1", "gfx942", True),
        ("amd-aiter", "0.1.15.dev3+gabc", "gfx942", True),
        ("transformer-engine", "2.4.0+rocm", "gfx942", False),
        ("transformer-engine", "2.12.0.dev0+rocm", "gfx942", True),
    ],
)
def test_versions_with_known_faults_are_not_used(installed, package, version, gpu, good):
    installed[package] = version
    choice = choose(ATTENTION, gpu, {})
    assert (choice.engine.package == package) == good
    assert good or any(version in str(faster) for faster in choice.faster)


def test_versions_are_ordered():
    ordered = ["4.0.0b9", "4.0.0b10", "4.0.0rc1", "4.0.0", "4.0.0.post1", "4.0.1b1", "4.10"]
    assert sorted(ordered, key=version_key) == ordered
    assert version_key("unknown") < version_key("0.0.1a1")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("operation", [ATTENTION, PRODUCTS])
def test_other_dtypes_are_computed_by_torch(installed, operation, dtype):
    installed |= GOOD
    for gpu in ("sm_90", "gfx942"):
        choice = choose(operation, gpu, {}, dtype)
        assert not choice.engine.module and not choice.faster


@pytest.mark.parametrize(
    ("operation", "name", "gpu", "dtype", "packages", "word"),
    [
        (ATTENTION, "fa5", "sm_90", "bf16", GOOD, "flash_attention_4"),
        (ATTENTION, "aiter", "sm_90", "bf16", GOOD, "sm_90"),
        (ATTENTION, "flash_attention_4", "", "bf16", GOOD, "no GPU"),
        (ATTENTION, "flash_attention_4", "sm_90", "float16", GOOD, "float16"),
        (ATTENTION, "flash_attention_4", "sm_90", "bf16", {}, "not installed"),
        (ATTENTION, "aiter", "gfx942", "bf16", {"amd-aiter": "0.1.13"}, "0.1.13"),
        (PRODUCTS, "cublaslt", "gfx942", "bf16", GOOD, "gfx942"),
        (PRODUCTS, "cutlass", "sm_90", "bf16", GOOD, "cublaslt"),
        (SWIGLU, "quack", "sm_100", "fp8", GOOD, "sm_90"),
        (SWIGLU, "quack", "sm_90", "fp8", {"quack-kernels": "0.6.4"}, "0.6.4"),
        (SWIGLU, "triton", "sm_90", "fp8", GOOD, "quack"),
    ],
)
def test_a_pinned_engine_that_cannot_be_used_is_an_error(
    installed, operation, name, gpu, dtype, packages, word
):
    installed |= packages
    variable = engines.VARIABLES[operation]
    with pytest.raises(ConfigError) as caught:
        choose(operation, gpu, {variable: name}, dtype)
    assert word in caught.value.why and variable in caught.value.do


def test_a_pinned_engine_is_used_where_it_is_not_the_fastest(installed, monkeypatch):
    installed |= GOOD
    monkeypatch.setenv("ATTENTION_ENGINE", "transformer_engine")
    monkeypatch.setenv("MATMUL_ENGINE", "torch")
    assert in_use(ATTENTION, "sm_90").engine.name == "transformer_engine"
    assert in_use(PRODUCTS, "sm_90").engine.name == "torch"


def test_a_rejected_engine_gives_way_and_the_reason_is_kept(installed):
    installed |= GOOD
    assert reject(ATTENTION, in_use(ATTENTION, "sm_90"), "self-test failed: 3.0 dB")
    choice = in_use(ATTENTION, "sm_90")
    assert choice.engine.name == "sdpa" and "3.0 dB" in str(choice.faster[0])
    assert not reject(ATTENTION, choice, "torch's own stays")
    assert in_use(PRODUCTS, "sm_90").engine.name == "cublaslt"


def test_a_pinned_engine_is_not_rejected(installed, monkeypatch):
    installed |= GOOD
    monkeypatch.setenv("ATTENTION_ENGINE", "flash_attention_4")
    assert not reject(ATTENTION, in_use(ATTENTION, "sm_90"), "self-test failed")
    assert in_use(ATTENTION, "sm_90").engine.name == "flash_attention_4"


@pytest.mark.parametrize("pin", [False, True])
def test_an_engine_that_cannot_be_imported(installed, monkeypatch, pin):
    installed |= GOOD

    def require():
        raise ImportError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(engines, "module_of", lambda engine: SimpleNamespace(require=require))
    if pin:
        monkeypatch.setenv("ATTENTION_ENGINE", "flash_attention_4")
        with pytest.raises(ConfigError) as caught:
            in_use(ATTENTION, "sm_90")
        assert "libcudart" in caught.value.why
        return
    choice = in_use(ATTENTION, "sm_90")
    assert choice.engine.name == "sdpa" and "libcudart" in str(choice.faster[0])
