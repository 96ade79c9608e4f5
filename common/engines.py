"""Engines of attention, matrix products and SwiGLU, and the choice among them on a GPU.

An engine is one implementation of an operation. By default, the fastest engine is used whose
package is installed and new enough and which passes the self-test. The self-test times them
(common/self_test/engine_times.py). Where nothing is timed, as in the launcher, the order of ENGINES
answers. The environment variables ATTENTION_ENGINE, MATMUL_ENGINE and SWIGLU_ENGINE, usually set in
a config's [env], pin an engine. If a pinned engine cannot be used, that is an error. On a CPU, and
for dtypes other than bf16 and FP8, torch computes attention and products.

SwiGLU is computed either by a separate kernel or in the epilogues of two FP8 products. Only FP8
blocks have this choice.

The module of an engine is imported only if the engine is timed or chosen. Standard library only:
the launcher reads the versions of installed packages before it imports torch.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType

from common.errors import ConfigError
from common.packages import in_container, pip_install, version_of
from common.suggestions import unknown

ATTENTION = "attention"
PRODUCTS = "products"
SWIGLU = "swiglu"
VARIABLES = {
    ATTENTION: "ATTENTION_ENGINE",
    PRODUCTS: "MATMUL_ENGINE",
    SWIGLU: "SWIGLU_ENGINE",
}
SDPA = "sdpa"  # torch's scaled_dot_product_attention
TORCH = "torch"  # torch's products
KERNEL = "kernel"  # the kernels of common/kernels/swiglu.py
REPEATED_HEADS = "repeated_heads"

NVIDIA = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
INSTINCT = ("gfx942", "gfx950")


@dataclass(frozen=True)
class Engine:
    """An implementation of an operation."""

    name: str
    gpus: tuple[str, ...]  # architectures on which it may be used; empty: all
    # Architectures on which it is before the built-in engine in the order. Elsewhere it is after.
    chosen_on: tuple[str, ...] = ()
    module: str = ""  # its module in common.kernels; "" for each operation's last, built-in engine
    package: str = ""  # "" if it needs only torch and Triton
    oldest: str = ""  # oldest accepted version of the package
    because: str = ""  # reason for `oldest`
    install: tuple[str, ...] = ()  # arguments of `pip install` for the package
    on_amd: str = ""  # instead of `install` on an AMD GPU
    in_image: str = ""  # instead of `install` in a container, which is removed at its end

    def __str__(self) -> str:
        """Return the name, with the version of the package if it is installed."""
        version = version_of(self.package) if self.package else ""
        return f"{self.name} {version}".rstrip()

    def advice(self, gpu: str) -> str:
        """Return how to get the package on this machine. `gpu`: architecture of its GPU."""
        if self.in_image and in_container():
            return self.in_image
        if self.on_amd and gpu in INSTINCT:
            return self.on_amd
        return pip_install(*self.install) if self.install else ""


HOPPER_LOCK = ("--require-hashes", "--no-deps", "-r", "requirements-hopper.lock")
TRANSFORMER_ENGINE = Engine(
    "transformer_engine",
    gpus=(*NVIDIA, *INSTINCT),
    module="transformer_engine",
    package="transformer-engine",
    oldest="2.10",
    because="general_gemm takes a workspace before it",
    install=("--no-build-isolation", "transformer-engine[pytorch]"),
    on_amd="use an image with ROCm's fork of Transformer Engine",
)

# Fastest first: as measured on an H200 (docs/results.md), and by published numbers on other GPUs.
# The last engine of each list is built in and runs everywhere.
ENGINES: dict[str, tuple[Engine, ...]] = {
    ATTENTION: (
        Engine(
            "flash_attention_4",
            gpus=("sm_90",),
            chosen_on=("sm_90",),
            module="flash_attention_4",
            package="flash-attn-4",
            oldest="4.0.0b10",
            because="older ones can corrupt dQ and dK (flash-attention#2481)",
            install=HOPPER_LOCK,
        ),
        Engine(
            "aiter",
            gpus=INSTINCT,
            chosen_on=INSTINCT,
            module="aiter_attention",
            package="amd-aiter",
            oldest="0.1.14.post1",
            because="older ones lack fixes of bf16 attention (aiter#4337)",
            install=("git+https://github.com/ROCm/aiter@v0.1.14.post1",),
            in_image="docker build -t llama-training --build-arg AITER=v0.1.14.post1 .",
        ),
        replace(TRANSFORMER_ENGINE, chosen_on=INSTINCT),
        # sm_90 is listed to compare the engine with SDPA on an H200, where it is never faster.
        Engine(
            REPEATED_HEADS,
            gpus=(*INSTINCT, "sm_90"),
            chosen_on=INSTINCT,
            module="repeated_heads_attention",
        ),
        Engine(SDPA, gpus=()),
    ),
    PRODUCTS: (
        Engine("cublaslt", gpus=NVIDIA, chosen_on=NVIDIA, module="cublaslt"),
        TRANSFORMER_ENGINE,
        Engine(TORCH, gpus=()),
    ),
    SWIGLU: (
        Engine(
            "quack",
            gpus=("sm_90",),
            chosen_on=("sm_90",),
            module="quack_swiglu",
            package="quack-kernels",
            oldest="0.6.5",
            because="the epilogues use its interface",
            install=HOPPER_LOCK,
        ),
        Engine(KERNEL, gpus=()),
    ),
}

# (operation, engine) -> why this process cannot use it: the import or the self-test failed.
_rejected: dict[tuple[str, str], str] = {}
# Operation -> name of the engine that this process uses unless one is pinned: result of `use`.
_used: dict[str, str] = {}
# (operation, GPU, pin, used) -> choice of this process. GPU: "" for dtypes that only torch has.
_chosen: dict[tuple[str, str, str, str], Choice] = {}


@dataclass(frozen=True)
class Unusable:
    """A faster engine that cannot be used. Its text says why, and how to install it."""

    name: str  # operation and engine
    reason: str
    install: str = ""  # command that installs the engine; "" if none helps

    def __str__(self) -> str:
        return f"{self.name} would be faster: {self.why}"

    @property
    def why(self) -> str:
        """The reason, and the command that helps."""
        return f"{self.reason}: {self.install}" if self.install else self.reason


@dataclass(frozen=True)
class Choice:
    """The engine to use, the faster ones that are not usable, and all that are."""

    engine: Engine
    pinned: bool
    faster: tuple[Unusable, ...] = ()  # those before the first usable one in the order
    usable: tuple[Engine, ...] = ()  # in the order; empty if an engine is pinned


def operations(stores_fp8: bool) -> tuple[str, ...]:
    """Return the operations whose engine can be chosen.

    `stores_fp8`: whether the blocks' operands are in FP8. Without FP8, only kernels compute SwiGLU.
    """
    if stores_fp8:
        return (ATTENTION, PRODUCTS, SWIGLU)
    return (ATTENTION, PRODUCTS)


def pin_of(operation: str, environment: Mapping[str, str]) -> str | None:
    """Return the name of the pinned engine, or None or "" if none is pinned."""
    # Literal names instead of VARIABLES, so that tests/tools/settings_tables.py finds them.
    if operation == ATTENTION:
        return environment.get("ATTENTION_ENGINE")
    if operation == SWIGLU:
        return environment.get("SWIGLU_ENGINE")
    return environment.get("MATMUL_ENGINE")


def choose(
    operation: str, gpu: str, environment: Mapping[str, str] | None = None, dtype: str = "bf16"
) -> Choice:
    """Return the pinned engine of `operation`, or else the first usable one of the order.

    `gpu`: architecture of the GPU, such as "sm_90"; "" for a CPU.
    `environment`: environment variables (default: os.environ).
    `dtype`: "bf16", "fp8", or another one, for which torch is used.

    Raises ConfigError if the pinned engine is unknown, does not support this GPU and dtype, is not
    installed, is too old, or was rejected by this process.
    """
    environment = os.environ if environment is None else environment
    pin = pin_of(operation, environment)
    if pin:
        return Choice(_pinned(operation, pin, gpu, dtype), pinned=True)
    faster: list[Unusable] = []
    usable: list[Engine] = []
    for engine in _order(operation, gpu, dtype):
        obstacle = _obstacle(operation, engine, gpu)
        if not obstacle:
            usable.append(engine)
        elif not usable:
            faster.append(obstacle)
    return Choice(usable[0], pinned=False, faster=tuple(faster), usable=tuple(usable))


def _order(operation: str, gpu: str, dtype: str) -> list[Engine]:
    """Return the engines that may run on `gpu`, the one that should be fastest first."""
    *packaged, built_in = ENGINES[operation]
    possible = [each for each in packaged if gpu in each.gpus and dtype in ("bf16", "fp8")]
    before = [engine for engine in possible if gpu in engine.chosen_on]
    after = [engine for engine in possible if gpu not in engine.chosen_on]
    return [*before, built_in, *after]


def _pinned(operation: str, name: str, gpu: str, dtype: str) -> Engine:
    """Return the engine called `name`. Raises ConfigError as `choose` does."""
    variable = VARIABLES[operation]
    engines = {engine.name: engine for engine in ENGINES[operation]}
    unset = f"set {variable} to another engine, or unset it to use the fastest installed one"
    if name not in engines:
        raise unknown(f"unknown engine {variable}={name}", name, engines, unset)
    engine = engines[name]
    what = f"{variable}={name} cannot be used here"
    if engine.module and (gpu not in engine.gpus or dtype not in ("bf16", "fp8")):
        where = ", ".join(engine.gpus)
        why = f"it supports bf16 and FP8 on {where}; this is {dtype} on {gpu or 'no GPU'}"
        raise ConfigError(what, why, unset)
    obstacle = _obstacle(operation, engine, gpu)
    if obstacle:
        raise ConfigError(what, obstacle.why, unset)
    return engine


def _obstacle(operation: str, engine: Engine, gpu: str) -> Unusable | None:
    """Return why the engine cannot be used, or None if it can."""
    name = f"{operation} by {engine.name}"
    version = version_of(engine.package) if engine.package else ""
    if engine.package and not version:
        return Unusable(name, f"{engine.package} is not installed", engine.advice(gpu))
    if engine.oldest and version_key(version) < version_key(engine.oldest):
        old = f"{engine.package} {version} is older than {engine.oldest}"
        return Unusable(name, f"{old}, and {engine.because}", engine.advice(gpu))
    rejected = _rejected.get((operation, engine.name), "")
    return Unusable(name, rejected) if rejected else None


def version_key(text: str) -> tuple:
    """Return a key that orders versions: "4.0.0b9" < "4.0.0b10" < "4.0.0" < "4.0.0.post1"."""
    parts = re.match(r"(\d+(?:\.\d+)*)(?:(a|b|rc)(\d+))?(?:\.post(\d+))?", text)
    if parts is None:
        return ()
    release = tuple(map(int, parts[1].split(".")))
    stage = (parts[2], int(parts[3])) if parts[2] else ("release", 0)
    return release, stage, int(parts[4] or 0)


def in_use(operation: str, gpu: str, dtype: str = "bf16") -> Choice:
    """Return the choice of this process. It is made once, and its module can be imported.

    It is the pinned engine, or else the one of `use`, or else that of `choose`. Raises ConfigError
    as `choose` does, and if a pinned engine cannot be imported.
    """
    pin = pin_of(operation, os.environ)
    used = _used.get(operation, "")
    key = (operation, gpu if dtype in ("bf16", "fp8") else "", pin or "", used)
    # An engine that cannot be imported is rejected. `choose` then returns the next one, or raises
    # ConfigError if the rejected one was pinned.
    while key not in _chosen:
        choice = choose(operation, gpu, dtype=dtype)
        for engine in choice.usable:
            if engine.name == used:
                choice = replace(choice, engine=engine)
        try:
            if choice.engine.module:
                module_of(choice.engine).require()
            _chosen[key] = choice
        except (ImportError, OSError, RuntimeError, AttributeError) as error:
            why = f"{type(error).__name__}: {error}"
            _rejected[operation, choice.engine.name] = f"it cannot be imported ({why})"
    return _chosen[key]


def module_of(engine: Engine) -> ModuleType:
    """Import an engine's module. It has `require` and the functions of the engine's operation."""
    return importlib.import_module(f"common.kernels.{engine.module}")


def use(operation: str, name: str) -> None:
    """Use the engine `name` in this process, if it is usable and no other one is pinned."""
    _used[operation] = name


def used() -> dict[str, str]:
    """Return operation -> name of the engine, for the operations that the self-test has tested."""
    return dict(_used)


def reject(operation: str, choice: Choice, why: str) -> bool:
    """Exclude the chosen engine in this process, so that the next one is used.

    Returns False, without excluding it, if the engine is pinned or is the last of its operation.
    """
    if choice.pinned or not choice.engine.module:
        return False
    _rejected[operation, choice.engine.name] = why
    _chosen.clear()
    return True


def rejections() -> list[str]:
    """Return which engines this process rejected, and why, one line each."""
    return [
        f"{operation} by {name} is not used: {why}" for (operation, name), why in _rejected.items()
    ]


def forget() -> None:
    """Forget the choices of this process and the rejected engines."""
    _rejected.clear()
    _used.clear()
    _chosen.clear()


@dataclass(frozen=True)
class EngineChoices:
    """The engines that a command chooses, for display and for the records of a run."""

    names: dict[str, str]  # operation -> engine
    versions: dict[str, str]  # operation -> engine with the version of its package
    faster: tuple[Unusable, ...]
    untimed: tuple[str, ...] = ()  # operations with several usable engines, which the ranks time

    def __str__(self) -> str:
        used = ", ".join(f"{operation} {text}" for operation, text in self.versions.items())
        if self.untimed:
            used += f" (by the order of the list; the ranks time {', '.join(self.untimed)})"
        return used

    def lines(self) -> list[str]:
        """Return lines for the screen."""
        return [f"engines    {self}", *(f"NOTE       {note}" for note in self._notes())]

    def _notes(self) -> list[str]:
        """Return why each faster engine is not used. Engines of one command share a text."""
        groups: dict[str, list[Unusable]] = {}
        for engine in self.faster:
            groups.setdefault(engine.install or str(engine), []).append(engine)
        notes = []
        for group in groups.values():
            names = " and ".join(engine.name for engine in group)
            reasons = "; ".join(engine.reason for engine in group)
            notes.append(str(Unusable(names, reasons, group[0].install)))
        return notes


def choose_engines(
    gpu: str, environment: Mapping[str, str], dtype: str, operations: Iterable[str]
) -> EngineChoices:
    """Return the engine that `choose` returns for each of `operations`.

    Raises ConfigError as `choose` does, also for a pinned engine of another operation.
    """
    for operation in VARIABLES:
        if pin_of(operation, environment):
            choose(operation, gpu, environment, dtype)
    names: dict[str, str] = {}
    versions: dict[str, str] = {}
    faster: list[Unusable] = []
    untimed: list[str] = []
    for operation in operations:
        choice = choose(operation, gpu, environment, dtype)
        names[operation] = choice.engine.name
        versions[operation] = str(choice.engine)
        faster += choice.faster
        if len(choice.usable) > 1:
            untimed.append(operation)
    return EngineChoices(names, versions, tuple(faster), tuple(untimed))


def pins(names: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that pin engines. `names`: operation -> engine."""
    return {VARIABLES[each]: name for each, name in names.items() if each in VARIABLES}
