"""Time the usable engines of an operation, keep the times in a file, and choose the fastest one.

An engine's time is that of forward and backward of one layer at the sizes of the run. The engines
take turns, after LOAD_S of work that brings the clock to its value under load. Over the ranks, the
slowest one's time counts. An engine is preferred to those before it in the order of common/engines
only if it is faster by more than GAIN in each measurement.

Rank 0 keeps the times in a file for each GPU, driver, version of torch and of the packages, and
size. A later start with the same ones tests the fastest engine only, and times nothing. Each file
is written whole and belongs to one such key, so that two starts at once need no lock.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from common import engines, known_issues
from common.atomic_write import write_whole
from common.engines import Choice
from common.errors import RunError, first_line
from common.kernels.step_clock import StepClock
from common.machine.hardware import probe
from common.paths import cache_folder
from common.self_test.kernel_cases import Draw, Sizes
from common.self_test.results import Check, EngineChoice, OpResult, freed_memory
from common.sharding.processes import of_all_ranks
from common.variables import Use, select

GAIN = 0.02  # a smaller relative gain keeps the order
MEASUREMENTS = 2
ROUNDS = 5  # timed blocks of each engine in a measurement, in turns
BLOCK_S = 0.02  # duration of a block, or of one layer if that takes longer
LOAD_S = 0.1

Times = dict[str, list[float]]  # engine -> ms of one layer in each measurement


@dataclass(frozen=True)
class Operation:
    """An operation whose engine is chosen."""

    name: str
    checks: Callable[[Sizes, Draw], Iterator[Check]]
    choice: Callable[[], Choice]  # returns the engine in use
    work: Callable[[Sizes, Draw], Callable[[], object]]  # returns the work of one layer


def choose_engine(
    operation: Operation,
    sizes: Sizes,
    draw: Draw,
    test: Callable[[], list[OpResult]],
    notes: list[str],
) -> tuple[EngineChoice, dict[str, list[OpResult]]]:
    """Choose the operation's engine for this process, the same on all ranks.

    `test`: runs the checks of the engine in use.
    `notes`: problems of timing and of the file are added.

    Returns the choice, and engine -> results of the engines that were not rejected. Those of the
    chosen one are bad if it is pinned or built in and computes wrongly. If the usable engines
    differ between the ranks, nothing is timed.
    """
    first = operation.choice()
    names = [engine.name for engine in first.usable] or [first.engine.name]
    comparable = all(others == names for others in of_all_ranks(names)) and len(names) > 1
    kept: Times = {}
    key: dict = {}
    if comparable and is_rank_0():
        key = key_of(operation, first, sizes, draw.device)
        kept = read_times(key, names, notes)
    kept = of_all_ranks(kept)[0]
    candidates = names if comparable else names[:1]
    results = test_engines(operation, [fastest(kept)] if kept else candidates, test)
    passed = [name for name, found in results.items() if all(each.good for each in found)]
    times = kept
    if comparable and not kept:
        times = measured_on_all_ranks(operation, passed, sizes, draw, notes)
        if list(times) == names and is_rank_0():
            keep_times(key, times, notes)
    if not times or fastest(times) not in passed:
        times = {}
    chosen = fastest(times) if times else (passed or list(results))[0]
    engines.use(operation.name, chosen)
    for name, found in results.items():
        if passed and name not in passed:
            bad = next(each for each in found if not each.good)
            notes.append(f"{operation.name} by {name} is not used: its self-test failed: {bad}")
    why = _reason(operation.name, first, names, times)
    if times and kept:
        why += ", in an earlier start"
    return EngineChoice(chosen, why, times), results


def test_engines(
    operation: Operation, names: list[str], test: Callable[[], list[OpResult]]
) -> dict[str, list[OpResult]]:
    """Test the engines `names`, or the next ones of the order if all of these are rejected.

    Returns engine -> results of those that were not rejected, which is at least one.
    """
    results: dict[str, list[OpResult]] = {}
    remaining = list(names)
    while remaining:
        name = remaining.pop(0)
        engines.use(operation.name, name)
        choice = operation.choice()
        if choice.engine.name == name:  # else it cannot be imported
            found = test()
            bad = [each for each in found if not each.good]
            why = f"its self-test failed: {bad[0]}" if bad else ""
            if not bad or not engines.reject(operation.name, choice, why):
                results[name] = found
        if not remaining and not results:
            remaining.append(operation.choice().engine.name)
    return results


def _reason(operation: str, first: Choice, names: list[str], times: Times) -> str:
    """Return why an engine is used. `times`: {} if they did not decide."""
    if first.pinned:
        return f"pinned by {engines.VARIABLES[operation]}"
    if len(names) == 1:
        return "the only usable engine"
    if not times:
        return "the first of the list that passes its self-test, not timed"
    before = next(iter(times))
    chosen = fastest(times)
    if chosen == before:
        return f"the first of the list, and no other is more than {GAIN:.0%} faster"
    gain = min(1 - new / old for new, old in zip(times[chosen], times[before], strict=True))
    return f"{gain:.0%} faster than {before}, the first of the list"


def fastest(times: Times) -> str:
    """Return the engine that is faster by GAIN than the best one before it, each time."""
    best = next(iter(times))
    for name, new in times.items():
        if all(a < (1 - GAIN) * b for a, b in zip(new, times[best], strict=True)):
            best = name
    return best


# --- measure --------------------------------------------------------------------------------------


def measured_on_all_ranks(
    operation: Operation, names: list[str], sizes: Sizes, draw: Draw, notes: list[str]
) -> Times:
    """Return the slowest rank's times of the engines `names`, {} if they cannot be compared.

    That is if only one engine passed, if others passed on another rank, or if a rank could not time
    them.
    """
    if any(others != names for others in of_all_ranks(names)) or len(names) < 2:
        return {}
    own: Times = {}
    with freed_memory(draw.device):
        try:
            own = times_in_turns(operation, names, operation.work(sizes, draw), draw.device)
        except RunError:
            raise
        except Exception as error:  # of any class, such as one of a compiler
            notes.append(f"{operation.name} is not timed: {first_line(error)}")
    of_ranks = of_all_ranks(own)
    if not all(of_ranks):
        return {}
    times = {}
    for name in names:
        measurements = zip(*(of_rank[name] for of_rank in of_ranks), strict=True)
        times[name] = [max(of_one) for of_one in measurements]
    return times


def times_in_turns(
    operation: Operation, names: list[str], work: Callable[[], object], device: torch.device
) -> Times:
    """Return this rank's times of `work` with each engine: medians of ROUNDS blocks."""
    clock = StepClock(device)

    def block_ms(name: str, count: int) -> float:
        """Return the mean time of `count` calls in a row."""
        engines.use(operation.name, name)
        clock.restart()
        for _ in range(count):
            work()
        clock.mark()
        return clock.drain_ms()[0] / count

    counts = {}
    for name in names:
        block_ms(name, 1)  # may compile
        counts[name] = max(1, math.ceil(1e3 * BLOCK_S / block_ms(name, 1)))
    loaded = time.monotonic() + LOAD_S
    while time.monotonic() < loaded:
        for name in names:
            block_ms(name, counts[name])
    times: Times = {name: [] for name in names}
    for _ in range(MEASUREMENTS):
        rounds: Times = {name: [] for name in names}
        for _ in range(ROUNDS):
            for name in names:
                rounds[name].append(block_ms(name, counts[name]))
        for name in names:
            times[name].append(statistics.median(rounds[name]))
    return times


# --- keep -----------------------------------------------------------------------------------------


def is_rank_0() -> bool:
    """Return whether this process is rank 0, or the only one."""
    return not dist.is_initialized() or dist.get_rank() == 0


def key_of(operation: Operation, choice: Choice, sizes: Sizes, device: torch.device) -> dict:
    """Return what decides the times of the usable engines. Its values are those of JSON."""
    layer = replace(sizes, shape=replace(sizes.shape, num_layers=1))
    is_swiglu = operation.name == engines.SWIGLU
    return {
        "operation": operation.name,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "software": known_issues.installed(probe().driver),
        "engines": [str(engine) for engine in choice.usable],
        # One of SwiGLU's engines is a product and a kernel.
        "products": engines.used().get(engines.PRODUCTS, "") if is_swiglu else "",
        "variables": select(Use.KERNELS, os.environ),
        "layer": str(layer),
    }


def path_of(key: dict) -> Path:
    """Return the file of the times for `key`."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_folder("engines") / f"{key['operation']}_{digest[:16]}.json"


def read_times(key: dict, names: list[str], notes: list[str]) -> Times:
    """Return the times of the engines `names` that an earlier start kept, {} if there are none.

    A damaged file is described in `notes`.
    """
    path = path_of(key)
    try:
        record = json.loads(path.read_text())
        times = record["ms"]
        is_whole = record["key"] == key and list(times) == names
        for of_engine in times.values():
            good = [type(value) is float and 0 < value < math.inf for value in of_engine]
            is_whole = is_whole and good == MEASUREMENTS * [True]
        if not is_whole:
            raise ValueError("it lacks times, or is of another machine")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        notes.append(f"{path} cannot be used ({first_line(error)}): the engines are timed again")
        return {}
    return times


def keep_times(key: dict, times: Times, notes: list[str]) -> None:
    """Write the times for later starts. If that fails, a note says so."""
    path = path_of(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"key": key, "ms": times}, indent=1).encode())
    except OSError as error:
        notes.append(f"{path} cannot be written ({error.strerror}): each start times the engines")
