"""Measures of this repository's size: `python3 tests/house.py` prints them; tests/test_layout.py holds them to limits.

    python3 tests/house.py            lines, config keys, combinations of execution paths; standard library only
    python3 tests/house.py --list     and each combination, with the configs that take it or the reason why none does
    python3 tests/house.py --files    and each file that is counted
    python3 tests/house.py --trace    and the files that execute in one training step of the 8B's miniature (needs torch, 30 s)

Exits with 1 if a config key is neither a path nor listed as none, or if a combination that no config takes has no reason.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ("llama31_8b", "llama2_70b_lora")
# Imported only where a config or a shape asks for it, each on a line of its own.
OPTIONAL = {
    "ATTENTION_ENGINE (optional packages)": (
        "common/kernels/aiter_attention.py",
        "common/kernels/attention_engines.py",
        "common/kernels/flash_attention_4.py",
    ),
    'MATMUL_ENGINE = "cublaslt"': ("common/kernels/cublaslt.py",),
    "block_format (research)": ("common/kernels/block_formats.py", "common/model/block_scaling.py"),
    'reduce_scatter = "copy_engine"': ("common/sharding/reduce_scatter.py", "common/sharding/symmetric_memory.py"),
    "norms of query and key heads (Qwen3)": ("common/kernels/qk_norm.py", "common/model/qk_norm.py"),
    "the self-test before the clock": ("common/known_issues.py", "common/training/kernel_cases.py", "common/training/self_test.py"),
    "--save": ("common/model/checkpoint_writer.py", "llama31_8b/save.py"),
    "a failure: full memory, or a hang": ("common/training/evidence.py",),
    "--checkpoint or --continue": ("common/training/checkpoint.py", "common/training/continuation.py"),
}
LIMITS = {
    "imported by a rank of llama31_8b": 5_000,
    "imported by both": 7_500,
    "outside tests and throughput": 20_880,
    "throughput": 4_540,
    "launch": 1_900,
    "pages of runs": 700,  # with the templates, but for uPlot, which is not ours
    "files in a step": 17,
    "keys": 21,
}
# Where the project wants to be; a limit above its aim only ever falls.
AIMS = LIMITS | {"outside tests and throughput": 16_500, "files in a step": 12}

# The keys that choose an execution path, and values that stand for all of theirs (layers: none or some).
PATHS: dict[str, tuple] = {
    "fp8": ("", "torch"),
    "block_format": ("", "mxfp4"),
    "healing": ("", "step 1"),
    "recompute_layers": (0, 1),
    "reduce_scatter": ("nccl", "copy_engine"),
    "moment_precision": ("fp32", "bf16"),
    "frozen_base": ("sharded", "replicated", "replicated_both"),
    "offload_layers": (0, 1),
}
SIZES = {
    *("gpu", "nodes", "gpus_per_node", "global_batch_size", "micro_batch_size", "eval_micro_batch_size", "max_samples"),
    *("opt_base_learning_rate", "opt_learning_rate_warmup_steps", "opt_learning_rate_training_steps"),
    *("hang_timeout_s", "miniature", "env"),
}
# Why a value may be combined with what no config combines it with. Every legal combination that is not shipped differs from the
# nearest shipped one in values of this table only.
REASONS: dict[tuple[str, object], str] = {
    ("fp8", ""): "bf16: the control to tell whether FP8 causes a fault (docs/troubleshooting.md), and for GPUs without FP8",
    ("fp8", "torch"): "FP8 with less or more memory than the shipped configs take",
    (
        "block_format",
        "mxfp4",
    ): "research: the numerics of formats of newer GPUs, emulated on any; `package` refuses it (docs/number_formats.md)",
    ("healing", "step 1"): "research: the later return from a block format to FP8 or bf16, as AMD's v6.0 LoRA makes it",
    ("recompute_layers", 0): "nothing is recomputed wherever memory allows it",
    ("recompute_layers", 1): "trades speed for memory where a GPU is full (docs/troubleshooting.md, exit code 12)",
    ("reduce_scatter", "nccl"): "the only way where GPUs cannot reach each other's memory, and between nodes",
    ("reduce_scatter", "copy_engine"): "0.8 % faster within a node of NVIDIA GPUs, in any precision",
    ("moment_precision", "fp32"): "Adam moments as the reference keeps them",
    ("moment_precision", "bf16"): "half the memory of Adam's moments, wherever memory is short",
    ("frozen_base", "sharded"): "LoRA on GPUs of 80 GB",
    ("frozen_base", "replicated"): "LoRA where a GPU has room for the base, but not for its transpose",
    ("frozen_base", "replicated_both"): "LoRA where a GPU has room for the base and its transpose",
    ("offload_layers", 0): "no activation offload where the GPU has room, or the host has none",
    ("offload_layers", 1): "activation offload where the GPU is short of memory and the host is not",
}

CPU_REASON = "on a CPU without Triton the tests try every path that a GPU may take"


# ---- lines


def lines(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_files(name: str) -> list[Path]:
    """The files that `import name` executes, packages first; empty if the module is not ours."""
    parts, found = name.split("."), []
    for end in range(1, len(parts) + 1):
        place = ROOT.joinpath(*parts[:end])
        if place.is_dir():
            found += [place / "__init__.py"] * (place / "__init__.py").is_file()
        elif place.with_suffix(".py").is_file():
            found.append(place.with_suffix(".py"))
        else:
            return found if end > 1 else []
    return found


def imported_names(path: Path) -> Iterator[str]:
    """Every module that `path` names in an import, also inside functions, except under TYPE_CHECKING."""
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            nodes += node.orelse
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            nodes += ast.iter_child_nodes(node)


def imported_files(entry: str, skip: tuple[str, ...] = ()) -> set[Path]:
    """The files of this repository that `entry`, a path relative to its root, imports directly or through others; itself included."""
    found: set[Path] = set()
    queue = [ROOT / entry, *module_files(entry.removesuffix(".py").replace("/", "."))]
    while queue:
        path = queue.pop()
        if path not in found and relative(path) not in skip:
            found.add(path)
            queue += [file for name in imported_names(path) for file in module_files(name)]
    return found


def source_files() -> list[Path]:
    """Every Python file outside tests: those of the rooms, which are packages, and those beside them."""
    rooms = sorted(path.parent for path in ROOT.glob("*/__init__.py") if path.parent.name != "tests")
    return sorted([*ROOT.glob("*.py"), *(path for room in rooms for path in room.rglob("*.py"))])


def room(name: str) -> list[Path]:
    return [path for path in source_files() if path.relative_to(ROOT).parts[0] == name]


def pages_files() -> list[Path]:
    """What makes the pages of runs: how they are drawn, of what, and the templates."""
    templates = [path for path in (ROOT / "pages" / "templates").iterdir() if not path.name.startswith("uPlot")]
    return [*room("pages"), *(ROOT / "submission" / f"{name}.py" for name in ("report", "run_page", "series_page")), *templates]


# ---- config keys and combinations of execution paths


@dataclass(frozen=True)
class Combination:
    """Values of the path keys that the config's checks accept, on one node of 8 GPUs (Triton) or on a CPU (reference engine)."""

    benchmark: str
    device: str  # "GPU" or "CPU"
    values: tuple[tuple[str, object], ...]  # (path key, value)
    configs: tuple[str, ...]  # shipped configs that take it
    differs: tuple[tuple[str, object], ...]  # from the nearest shipped combination of this device; empty if shipped

    @property
    def unexplained(self) -> list[tuple[str, object]]:
        return [pair for pair in self.differs if pair not in REASONS and self.device == "GPU"]

    def __str__(self) -> str:
        path = " ".join(f"{key}={_text(key, value)}" for key, value in self.values)
        why = "; ".join(REASONS.get(pair, f"NO REASON for {pair[0]} = {pair[1]!r}") for pair in self.differs)
        return f"{self.benchmark} {self.device}: {path}\n    {', '.join(self.configs) or (why if self.device == 'GPU' else CPU_REASON)}"


def _text(key: str, value: object) -> str:
    return ("some" if value else "none") if key.endswith("_layers") else str(value).lower() or "none"


def config_class(benchmark: str) -> type:
    return importlib.import_module(f"{benchmark}.rules").Config


def config_keys() -> list[str]:
    """The union of both benchmarks' keys."""
    return sorted({field.name for benchmark in BENCHMARKS for field in fields(config_class(benchmark))})


def unknown_keys() -> list[str]:
    """Keys that this file does not know: each must be a path or a size."""
    return [key for key in config_keys() if key not in PATHS and key not in SIZES]


def combinations(benchmark: str) -> list[Combination]:
    """Every combination that the config's own checks accept."""
    from common import config as configs

    kind = config_class(benchmark)
    keys = [key for key in PATHS if key in {field.name for field in fields(kind)}]
    loaded = {path.stem: configs.load(path, kind) for path in sorted((ROOT / "configs" / benchmark).glob("*.toml"))}
    found = []
    for device, base in (("GPU", vars(loaded["H200_1x8"])), ("CPU", vars(loaded["CPU_1x1"]))):
        shipped: dict[tuple, list[str]] = {}
        for name, config in loaded.items():
            if (config.gpu == "CPU") == (device == "CPU"):
                values = (getattr(config, key) for key in keys)
                shipped.setdefault(tuple((key, _class_of(key, value)) for key, value in zip(keys, values, strict=True)), []).append(name)
        for values in itertools.product(*([(key, value) for value in PATHS[key]] for key in keys)):
            if values in shipped or _legal(kind, base | dict(values)):
                nearest = min((tuple(pair for pair in values if pair not in near) for near in shipped), key=len)
                found.append(Combination(benchmark, device, values, tuple(shipped.get(values, ())), nearest))
    return found


def _class_of(key: str, value: Any) -> Any:
    """The value of PATHS that stands for `value`."""
    return min(value, 1) if key.endswith("_layers") else value


def _legal(kind: type, table: dict) -> bool:
    from common import config as configs
    from common.errors import ConfigError

    try:
        configs.from_table(dict(table), kind, "tests/house.py")
    except ConfigError:
        return False
    return True


# ---- the files of one step


def trace_step(data: Path | None = None) -> dict[str, list[str]]:
    """File -> its functions that execute from the data file to the optimizer's update, in the third step of the 8B's miniature.

    `data`: of the miniature, where it has been built already.
    Traced are `train_step` of the main thread, and all that the thread `prefetch` does to read batches. Modules of this repository only.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        if data:
            (place / "data").symlink_to(data)
        else:
            command = [sys.executable, "-m", "llama31_8b.prepare", "miniature", "--data-dir", str(place / "data")]
            subprocess.run(command, check=True, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
        (place / "run" / "ranks").mkdir(parents=True)
        (place / "run" / "config.toml").write_text((ROOT / "configs" / "llama31_8b" / "CPU_1x1.toml").read_text())
        command = [sys.executable, str(Path(__file__).resolve()), "--trace-worker", folder]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if not (place / "trace.json").exists():
            raise SystemExit(f"error: the traced run wrote no trace\n  why: it ended with {done.returncode}\n{done.stderr[-3000:]}")
        return json.loads((place / "trace.json").read_text())


def trace_worker(folder: Path) -> None:
    """Run the miniature under a profiler until its third step has ended, write what executed, and end the process."""
    import runpy

    functions: dict[str, set[str]] = {}
    steps = 0
    inside = False
    loop = str(ROOT / "common" / "training" / "loop.py")

    def note(frame) -> None:
        name = frame.f_code.co_filename
        if name.startswith(str(ROOT)) and "/tests/" not in name and "/.venv/" not in name:
            functions.setdefault(name, set()).add(frame.f_code.co_qualname)

    def main_thread(frame, event: str, argument) -> None:
        nonlocal steps, inside
        if frame.f_code.co_name == "train_step" and frame.f_code.co_filename == loop:
            if event == "call":
                steps, inside = steps + 1, True
            elif event == "return":
                inside = False
                if steps == 5:  # of which two were synthetic warm-up
                    sys.setprofile(None)
                    called = {relative(Path(name)): sorted(names) for name, names in sorted(functions.items())}
                    (folder / "trace.json").write_text(json.dumps(called))
                    os._exit(0)
        if inside and steps >= 3 and event == "call":
            note(frame)

    def other_thread(frame, event: str, argument) -> None:
        if event == "call" and threading.current_thread().name == "prefetch":
            note(frame)

    threading.setprofile(other_thread)
    sys.setprofile(main_thread)
    arguments = ["--run-dir", folder / "run", "--data-dir", folder / "data", "--config-name", "CPU_1x1", "--seed", "1", "--device", "cpu"]
    sys.argv = ["llama31_8b.train", *map(str, arguments)]
    sys.path[0] = str(ROOT)
    runpy.run_module("llama31_8b.train", run_name="__main__")


# ---- output


def ranks_files() -> list[set[Path]]:
    """What a rank of each benchmark imports, without what is optional."""
    return [imported_files(f"{benchmark}/train.py", skip=tuple(itertools.chain(*OPTIONAL.values()))) for benchmark in BENCHMARKS]


def measures() -> dict[str, int]:
    """What the limits are for, without the trace."""
    ranks = ranks_files()
    return {
        "imported by a rank of llama31_8b": lines(list(ranks[0])),
        "imported by both": lines(list(ranks[0] | ranks[1])),
        "outside tests and throughput": lines(source_files()) - lines(room("throughput")),
        "throughput": lines(room("throughput")),
        "launch": lines(room("launch")),
        "pages of runs": lines(pages_files()),
        "keys": len(config_keys()),
    }


def print_files(title: str, paths: set[Path] | list[Path], list_files: bool, aim: int = 0) -> None:
    aims = f", aim {aim:,}" if aim else ""
    count = sum(path.stat().st_size > 0 for path in paths)  # most __init__.py are empty
    print(f"{title:<52}{lines(list(paths)):>7,} lines in {count} files{aims}")
    if list_files:
        for path in sorted(paths):
            print(f"{lines([path]):>59,} {relative(path)}")


def print_lines(list_files: bool) -> None:
    ranks = ranks_files()
    print_files("imported by a rank of llama31_8b", ranks[0], list_files, AIMS["imported by a rank of llama31_8b"])
    for why, names in OPTIONAL.items():
        print_files(f"  and by one with {why}", [ROOT / name for name in names], list_files)
    print_files("imported by a rank of llama2_70b_lora", ranks[1], list_files)
    print_files("imported by both", ranks[0] | ranks[1], list_files, AIMS["imported by both"])
    measured = room("throughput")
    print_files("all Python outside tests", source_files(), list_files)
    print_files("  but for throughput", set(source_files()) - set(measured), False, AIMS["outside tests and throughput"])
    for name in sorted({path.relative_to(ROOT).parts[0] for path in source_files()}):
        print_files(f"  {name}", room(name), False)


def print_combinations(list_all: bool) -> bool:
    """True if each combination is shipped or has a reason."""
    found = [combination for benchmark in BENCHMARKS for combination in combinations(benchmark)]
    for benchmark in BENCHMARKS:
        mine = [combination for combination in found if combination.benchmark == benchmark]
        taken = sum(bool(combination.configs) for combination in mine)
        print(f"{'legal combinations of paths, ' + benchmark:<52}{len(mine):>7}, {taken} shipped, {len(mine) - taken} with a reason")
    bad = [combination for combination in found if combination.unexplained]
    for combination in found if list_all else bad:
        print(combination)
    return not bad


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="every combination of execution paths")
    parser.add_argument("--files", action="store_true", help="every file that is counted")
    parser.add_argument("--trace", action="store_true", help="the files of one training step; needs torch")
    parser.add_argument("--trace-worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.trace_worker:
        trace_worker(options.trace_worker)
    print_lines(options.files)
    print(f"{'config keys of both benchmarks':<52}{len(config_keys()):>7}, aim {AIMS['keys']}")
    for key in unknown_keys():
        print(f"unknown key {key}: add it to PATHS or SIZES in tests/house.py")
    explained = print_combinations(options.list)
    if options.trace:
        step = trace_step()
        kernels = [name for name in step if name.startswith("common/kernels/")]
        print(f"{'files that execute in one step of llama31_8b':<52}{len(step):>7}, aim {AIMS['files in a step']}")
        print(f"{'  of which kernels, one operation each':<52}{len(kernels):>7}")
        for name, functions in step.items():
            print(f"{'':>60}{name}: {', '.join(functions)}")
    return 0 if explained and not unknown_keys() else 1


if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # this file's folder would come first otherwise
    sys.exit(main(sys.argv[1:]))
