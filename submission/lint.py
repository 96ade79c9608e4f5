"""Strict checks of one MLLOG log: everything the rules of the benchmark ask for and the official checker does not test.

`lint(path)` reads the log once and hands the events to small functions, one per rule. A finding names the line, the rule
and where the rule is written down. Constants come from the benchmark's rules.py; nothing of the training code is used.

Where rules stand:
  TR   mlcommons/training_policies, training_rules.adoc (v5.1 to v6.1)
  CC   mlcommons/logging, compliance_checker/training_6.1.0/*.yaml
  RCP  mlcommons/logging, rcp_checker
  SEED mlcommons/logging, package_checker/seed_checker.py
  LOG  common/training/mllog.py of this project
Standard library only.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from common.training.mllog import END, POINT, RESERVED_SUBSTRINGS, START, TOKEN
from llama2_70b_lora import rules as llama2_70b_lora_rules
from llama31_8b import rules as llama31_8b_rules

Rules = llama31_8b_rules.Rules | llama2_70b_lora_rules.Rules

PROJECT_ROOT = Path(__file__).resolve().parents[1]
INIT_WARNING_S = 1500.0  # five minutes of reserve below the limit
NUMBER_FORMATS = ("fp64", "fp32", "tf32", "fp16", "fp8", "mxfp6", "nvfp4", "mxfp4", "bfloat16", "int8", "uint8", "int4", "uint4")
SMALL_SEED = 2**15  # bash's $RANDOM ends here; one honest seed of 32 bits in 130,000 does as well, so this is a warning only
WELL_KNOWN_SEEDS = frozenset({123456, 1234567, 12345678, 123456789, 1234567890, 2**31 - 1, 2**32 - 1, 0xDEADBEEF, 0xCAFEBABE})
CHANGED = ("+modified", "+forced")  # what launch/select_config.py adds to the name of a config that was not used as it stands
DIVISIONS = ("closed", "miniature")
STATUS_WORDS = ("onprem", "cloud", "research")

PRECISION_KEYS = tuple(f"lowest_numerical_precision_in_{part}" for part in ("linear", "attn", "comm"))
PARALLELISM_KEYS = tuple(f"{kind}_parallelism" for kind in ("tensor", "pipeline", "context", "expert"))
DISCLOSURE_KEYS = (*PRECISION_KEYS, *PARALLELISM_KEYS, "micro_batch_size", "config_filename")
DISCLOSURE_SOURCE = "CC common.yaml (6.1.0); TR mandatory disclosure"
SUBMISSION_KEYS = tuple(f"submission_{part}" for part in ("benchmark", "org", "division", "status", "platform"))
COMMON_KEYS = (
    *("global_batch_size", "gradient_accumulation_steps", "max_sequence_length", "train_samples", "eval_samples"),
    *("opt_name", "opt_base_learning_rate", "opt_gradient_clip_norm"),
    *("opt_adamw_beta_1", "opt_adamw_beta_2", "opt_adamw_epsilon", "opt_adamw_weight_decay"),
)
LLAMA31_8B_KEYS = (
    *("max_steps", "opt_end_learning_rate"),
    *("opt_learning_rate_warmup_steps", "opt_learning_rate_decay_steps", "opt_learning_rate_decay_schedule"),
)
LLAMA2_70B_LORA_KEYS = (
    *("opt_learning_rate_training_steps", "opt_learning_rate_warmup_factor"),
    *("lora_rank", "lora_alpha", "lora_dropout"),
)
HYPERPARAMETER_KEYS = (*COMMON_KEYS, *LLAMA31_8B_KEYS, *LLAMA2_70B_LORA_KEYS, "target_accuracy")
INIT_KEYS = frozenset({*SUBMISSION_KEYS, "seed", *HYPERPARAMETER_KEYS, *DISCLOSURE_KEYS})
ONCE_KEYS = ("cache_clear", "init_start", *SUBMISSION_KEYS, "seed", "init_stop", "run_start", "run_stop")
EVENT_TYPES = {
    **{f"{interval}_start": START for interval in ("init", "run", "block", "eval")},
    **{f"{interval}_stop": END for interval in ("init", "run", "block", "eval")},
}
COUNTED_KEYS = ("block_start", "block_stop", "eval_start", "eval_accuracy", "eval_stop", "run_stop")
# (where the run stands, key) -> where it stands then. What is not here is out of order.
TRANSITIONS = {
    ("nothing", "cache_clear"): "nothing",
    ("nothing", "init_start"): "init",
    ("init", "init_stop"): "ready",
    ("ready", "run_start"): "running",
    ("running", "block_start"): "block",
    ("block", "block_stop"): "running",
    ("running", "eval_start"): "eval",
    ("eval", "eval_accuracy"): "evaluated",
    ("evaluated", "eval_stop"): "running",
    ("eval", "eval_stop"): "evaluation broken off",
    ("evaluation broken off", "run_stop"): "stopped",
    ("running", "run_stop"): "stopped",
}


@dataclass(frozen=True)
class Event:
    line: int  # of the file, from 1
    time_ms: int
    event_type: str
    key: str
    value: object
    metadata: dict

    @property
    def samples(self):
        return self.metadata.get("samples_count")


@dataclass(frozen=True)
class Finding:
    line: int  # 0: the log as a whole
    rule: str
    message: str
    source: str
    warning: bool = False


class Log:
    """The events of a log in their order, and by key."""

    def __init__(self, events: list[Event]):
        self.events = events
        self.by_key: dict[str, list[Event]] = {}
        for event in events:
            self.by_key.setdefault(event.key, []).append(event)

    def all(self, key: str) -> list[Event]:
        return self.by_key.get(key, [])

    def first(self, key: str) -> Event | None:
        return self.all(key)[0] if self.all(key) else None

    def value(self, key: str):
        """The first value of `key`, or None."""
        event = self.first(key)
        return event.value if event else None

    def number(self, key: str) -> float | None:
        value = self.value(key)
        return value if _is_number(value) else None


Findings = Iterator[Finding]


def lint(path: Path, division: str | None = None, project_root: Path | None = PROJECT_ROOT) -> list[Finding]:
    """All findings of the log at `path`, by line. `division` asks for the rules of that division whatever the log says.

    `project_root`: where configs/<benchmark>/ is looked for; None leaves that out. Raises OSError if `path` cannot be read.
    """
    events, findings = parse(path)
    log = Log(events)
    for general_rule in GENERAL_RULES:
        findings += general_rule(log)
    findings += check_config_filename(log, project_root)
    benchmark, division = log.value("submission_benchmark"), division or log.value("submission_division")
    # The one place where a benchmark's rules come in.
    closed = division == "closed"
    if benchmark == llama31_8b_rules.BENCHMARK and division in DIVISIONS:
        findings += llama31_8b_findings(log, llama31_8b_rules.CLOSED if closed else llama31_8b_rules.MINIATURE)
    elif benchmark == llama2_70b_lora_rules.BENCHMARK and division in DIVISIONS:
        findings += llama2_70b_lora_findings(log, llama2_70b_lora_rules.CLOSED if closed else llama2_70b_lora_rules.MINIATURE)
    else:
        line = _line(log.first("submission_division") or log.first("submission_benchmark"))
        findings.append(Finding(line, "benchmark", f"no rules here for {benchmark!r} in division {division!r}", "CC closed_common.yaml"))
    return sorted(findings, key=lambda finding: finding.line)


def parse(path: Path) -> tuple[list[Event], list[Finding]]:
    """Events of the MLLOG lines of `path`; other lines are not looked at. What cannot be an event is a finding."""
    events, findings = [], []
    # latin-1 and splitting at newlines only: as the official parser reads
    for number, line in enumerate(path.read_bytes().decode("latin-1").split("\n"), start=1):
        if TOKEN.strip() not in line:
            continue
        try:
            events.append(_event(number, line))
        except (ValueError, KeyError, TypeError) as error:
            message = f"not one event and nothing else: {error}"
            findings.append(Finding(number, "line_format", message, "CC mlp_parser/ruleset_610.py; LOG"))
    return events, findings


def _event(number: int, line: str) -> Event:
    if not line.startswith(TOKEN):
        raise ValueError("text before the token")
    record = json.loads(line[len(TOKEN) :])
    event = Event(number, record["time_ms"], record["event_type"], record["key"], record["value"], record["metadata"])
    if type(event.time_ms) is not int or type(event.key) is not str or type(event.metadata) is not dict:
        raise ValueError("time_ms, key or metadata has the wrong type")
    return event


# Rules that hold for every log.


def check_counts(log: Log) -> Findings:
    for key in ONCE_KEYS:
        yield from _exactly_once(log, key, "SEED" if key == "seed" else "CC common.yaml; LOG")
    for key in ("block_start", "block_stop", "eval_start", "eval_accuracy", "eval_stop"):
        if not log.all(key):
            yield Finding(0, "missing", f"{key} is missing", "CC common.yaml")


def check_disclosure(log: Log) -> Findings:
    """The nine keys that 6.1 makes mandatory, with the words and ranges it allows."""
    source = DISCLOSURE_SOURCE
    for key in DISCLOSURE_KEYS:
        yield from _exactly_once(log, key, source)
    for event in _events(log, PRECISION_KEYS):
        if event.value not in NUMBER_FORMATS:
            yield Finding(event.line, "disclosure", f"{event.key} is {event.value!r}, not one of {' '.join(NUMBER_FORMATS)}", source)
    for event in _events(log, (*PARALLELISM_KEYS, "micro_batch_size")):
        if not _is_positive_int(event.value):
            yield Finding(event.line, "disclosure", f"{event.key} is {event.value!r}, not a whole number from 1", source)


def check_event_types(log: Log) -> Findings:
    for event in log.events:
        wanted = EVENT_TYPES.get(event.key, POINT)
        if event.event_type != wanted:
            yield Finding(
                event.line, "event_type", f"{event.key} is logged as {event.event_type!r}, not {wanted}", "LOG (no checker reads it)"
            )


def check_submission(log: Log) -> Findings:
    for event in _events(log, SUBMISSION_KEYS):
        if not isinstance(event.value, str) or not event.value.strip():
            yield Finding(event.line, "submission", f"{event.key} is {event.value!r}, not a text", "CC common.yaml")
        elif event.key == "submission_status" and event.value not in STATUS_WORDS:
            message = f"submission_status is {event.value!r}, not one of {' '.join(STATUS_WORDS)}"
            yield Finding(event.line, "submission", message, "mlperf_logging/mllog/constants.py")


def check_order(log: Log) -> Findings:
    """Initialization, clock, blocks and evaluations follow each other and close; run_stop is last."""
    state = "nothing"
    for event in log.events:
        if state == "stopped":
            yield Finding(event.line, "after_run_stop", f"{event.key} after run_stop", "TR Run Results; LOG")
        elif event.key in INIT_KEYS:
            if state != "init":
                yield Finding(event.line, "order", f"{event.key} outside init_start .. init_stop", "LOG")
        elif (state, event.key) in TRANSITIONS:
            state = TRANSITIONS[state, event.key]
        elif event.key in ("cache_clear", *EVENT_TYPES, "eval_accuracy"):
            yield Finding(event.line, "order", f"{event.key} while the run stands at: {state}", "TR Run Results; CC common.yaml")


def check_times(log: Log) -> Findings:
    for before, event in zip(log.events, log.events[1:], strict=False):
        if event.time_ms < before.time_ms:
            yield Finding(event.line, "time", f"{event.key} is {before.time_ms - event.time_ms} ms before the line above", "LOG")


def check_seed(log: Log) -> Findings:
    for event in log.all("seed"):
        if type(event.value) is not int or not 0 <= event.value < 2**32:
            yield Finding(event.line, "seed", f"seed is {event.value!r}, not a whole number of 32 bits", "SEED; TR Random numbers")
        elif event.value < SMALL_SEED or event.value in WELL_KNOWN_SEEDS:
            message = f"seed {event.value} looks chosen, or drawn from 15 bits; the system's randomness gives 32"
            yield Finding(event.line, "seed", message, "TR Random numbers (a constant seed is not allowed)", warning=True)
        if not isinstance(event.metadata.get("file"), str) or type(event.metadata.get("lineno")) is not int:
            yield Finding(event.line, "seed", "seed without file and lineno in its metadata", "SEED")


def check_finite(log: Log) -> Findings:
    for event in log.events:
        if isinstance(event.value, float) and not math.isfinite(event.value):
            source = "LOG (the compliance checker ignores NaN if another evaluation passes)"
            yield Finding(event.line, "finite", f"{event.key} is {event.value}", source)


def check_reserved(log: Log) -> Findings:
    """The RCP checker finds events by substring: elsewhere in a line such a word makes it read a wrong number, or crash."""
    for event in log.events:
        text = json.dumps([event.key, event.value, event.metadata])
        for word in RESERVED_SUBSTRINGS:
            if word in text and event.key != word:
                yield Finding(event.line, "reserved_word", f"the line of {event.key} contains {word}", "RCP rcp_checker.py")


def check_samples_count(log: Log) -> Findings:
    """Sequences trained so far, counted after the optimizer step: whole steps, never fewer than before."""
    source = "TR RCP Rules (samples); RCP rcp_checker.py"
    global_batch_size, last = log.value("global_batch_size"), 0
    for event in _events_in_order(log, COUNTED_KEYS):
        samples = event.samples
        if type(samples) is not int or samples < 0:
            yield Finding(event.line, "samples_count", f"{event.key} has samples_count {samples!r}", source)
            continue
        if _is_positive_int(global_batch_size) and samples % global_batch_size:
            message = f"{event.key} at {samples}, which is no multiple of the global batch of {global_batch_size}"
            yield Finding(event.line, "samples_count", message, source)
        if samples < last or (samples > last and event.key != "block_stop"):
            yield Finding(event.line, "samples_count", f"{event.key} at {samples}, but training stands at {last}", source)
        last = samples


def check_config_filename(log: Log, project_root: Path | None) -> Findings:
    event, benchmark = log.first("config_filename"), log.value("submission_benchmark")
    # A miniature may run anywhere and be changed at will: `CPU_1x1+modified.toml` is the truth, and nobody can submit it.
    if event is None or log.value("submission_division") == "miniature":
        return
    name, source = event.value, "TR mandatory disclosure (6.1)"
    if isinstance(name, str) and any(mark in name for mark in CHANGED):
        message = f"config_filename is {name!r}: changed with --set, or forced onto another GPU; no config of a submission"
        yield Finding(event.line, "config_filename", message, source)
    elif project_root is None:
        return
    elif not isinstance(name, str) or Path(name).name != name or not (project_root / "configs" / str(benchmark) / name).is_file():
        message = f"config_filename is {name!r}, which is no file in configs/{benchmark}/"
        yield Finding(event.line, "config_filename", message, source)


# Rules that every benchmark has, with values of its own.


def check_keys(log: Log, keys: tuple[str, ...], source: str) -> Findings:
    for key in keys:
        yield from _exactly_once(log, key, source)


def check_constants(log: Log, division: str, fixed: dict[str, int | float | str], source: str) -> Findings:
    """What the division fixes, by value."""
    for event in _events(log, tuple(fixed)):
        if not _same_number_or_text(event.value, fixed[event.key]):
            yield Finding(event.line, "constant", f"{event.key} is {event.value!r}, {division} fixes {fixed[event.key]!r}", source)


def common_constants(rules: Rules) -> dict[str, int | float | str]:
    return {
        "submission_division": rules.division,
        "max_sequence_length": rules.sequence_length,
        "eval_samples": rules.eval_samples,
        "opt_name": rules.opt_name,
        "opt_adamw_beta_1": rules.adam_beta_1,
        "opt_adamw_beta_2": rules.adam_beta_2,
        "opt_adamw_epsilon": rules.adam_epsilon,
        "opt_adamw_weight_decay": rules.weight_decay,
        "opt_gradient_clip_norm": rules.gradient_clip_norm,
        "target_accuracy": rules.target_loss,
    }


def check_batch(log: Log, rules: Rules) -> Findings:
    for event in _events(log, ("global_batch_size", "gradient_accumulation_steps", "train_samples")):
        if not _is_positive_int(event.value):
            yield Finding(event.line, "batch", f"{event.key} is {event.value!r}, not a whole number from 1", "CC closed_common.yaml")
    sizes = [log.value(key) for key in ("global_batch_size", "gradient_accumulation_steps", "micro_batch_size")]
    if all(_is_positive_int(size) for size in sizes) and sizes[0] % (sizes[1] * sizes[2]):
        message = f"global batch {sizes[0]} is no multiple of gradient_accumulation_steps {sizes[1]} x micro_batch_size {sizes[2]}"
        yield Finding(_line(log.first("global_batch_size")), "batch", message, "LOG")


def check_base_learning_rate(log: Log, rules: Rules) -> Findings:
    base = log.number("opt_base_learning_rate")
    if base is None or base <= 0:
        yield Finding(_line(log.first("opt_base_learning_rate")), "learning_rate", f"base learning rate {base!r}", "TR Hyperparameters")


def check_cache_clear(log: Log, rules: Rules) -> Findings:
    """A miniature may say honestly that nothing was dropped: it needs no root."""
    for event in log.all("cache_clear"):
        if event.value is not True and (rules.division == "closed" or event.value is not False):
            source = "TR Data State (the checker takes any value)"
            yield Finding(event.line, "cache_clear", f"cache_clear is {event.value!r}: the page cache was not dropped", source)


def check_init_time(log: Log, rules: Rules) -> Findings:
    start, stop = log.first("init_start"), log.first("init_stop")
    if not start or not stop:
        return
    seconds = (stop.time_ms - start.time_ms) / 1000
    if seconds >= rules.init_limit_s:
        message = f"initialization took {seconds / 60:.1f} min, the limit is {rules.init_limit_s / 60:.0f} min"
        yield Finding(stop.line, "init_time", message, "TR Run Results; CC common.yaml")
    elif seconds >= INIT_WARNING_S:
        message = f"initialization took {seconds / 60:.1f} of {rules.init_limit_s / 60:.0f} min"
        yield Finding(stop.line, "init_time", message, "TR Run Results", warning=True)


def check_evaluations(log: Log, rules: Rules) -> Findings:
    """The first evaluation where the rules want it, then one after every interval, none left out."""
    global_batch_size = log.value("global_batch_size")
    if not _is_positive_int(global_batch_size):
        return
    interval, due, last = rules.eval_interval(global_batch_size), rules.first_evaluation(global_batch_size), 0
    source = "TR Quality measure (the checker takes any interval)"
    for event in log.all("eval_accuracy"):
        if not _is_number(event.value) or event.value <= 0:
            yield Finding(event.line, "eval_value", f"eval_accuracy is {event.value!r}, not a positive number", "CC eval_accuracy")
        if type(event.samples) is not int:
            continue  # check_samples_count says so
        if event.samples != due:
            wanted = f"the interval is {interval}" if last else f"the first one is due at {due}"
            yield Finding(
                event.line, "eval_interval", f"evaluation at {event.samples}, {event.samples - last} after {last}; {wanted}", source
            )
        last, due = event.samples, event.samples + interval
    stop = log.first("run_stop")
    if stop and type(stop.samples) is int and stop.samples >= due:
        yield Finding(stop.line, "eval_interval", f"training went on from {last} to {stop.samples} with no evaluation", source)


def check_status(log: Log, rules: Rules) -> Findings:
    """success if and only if the last evaluation reached the target, and nothing was trained or evaluated after it did."""
    source = "TR Run Results (the compliance checker takes any status)"
    reached = None
    for event in _events_in_order(log, ("block_start", "eval_start", "eval_accuracy", "run_stop")):
        if event.key == "run_stop":
            wanted = "success" if reached else "aborted"
            if event.metadata.get("status") != wanted:
                facts = f"the target of {rules.target_loss} was {'' if reached else 'not '}reached"
                yield Finding(event.line, "status", f"status is {event.metadata.get('status')!r}, but {facts}", source)
        elif reached:
            message = f"{event.key} after the target was reached in line {reached.line}"
            yield Finding(event.line, "after_target", message, "TR Run Results; LOG")
        elif event.key == "eval_accuracy" and _is_number(event.value) and 0 < event.value <= rules.target_loss:
            reached = event


GENERAL_RULES: tuple[Callable[[Log], Findings], ...] = (
    check_counts,
    check_disclosure,
    check_event_types,
    check_submission,
    check_order,
    check_times,
    check_seed,
    check_finite,
    check_reserved,
    check_samples_count,
)
SHARED_RULES: tuple[Callable[[Log, Rules], Findings], ...] = (
    check_batch,
    check_base_learning_rate,
    check_cache_clear,
    check_init_time,
    check_evaluations,
    check_status,
)


def shared_findings(log: Log, rules: Rules) -> Findings:
    for shared_rule in SHARED_RULES:
        yield from shared_rule(log, rules)


# Rules of llama31_8b, closed or miniature.


def llama31_8b_findings(log: Log, rules: llama31_8b_rules.Rules) -> Findings:
    source = "TR Hyperparameters; CC closed_llama31_8b.yaml"
    yield from check_keys(log, (*COMMON_KEYS, *LLAMA31_8B_KEYS), source)
    constants = common_constants(rules) | {"opt_learning_rate_decay_schedule": rules.decay_schedule, "max_steps": rules.max_steps}
    yield from check_constants(log, rules.division, constants, source)
    yield from check_decay(log, rules)
    yield from shared_findings(log, rules)


def check_decay(log: Log, rules: llama31_8b_rules.Rules) -> Findings:
    """End = 0.1 x base, decay steps = max_steps - warm-up steps, and warm-up before decay."""
    base, end = log.number("opt_base_learning_rate"), log.first("opt_end_learning_rate")
    if base and end and not (_is_number(end.value) and math.isclose(end.value, rules.end_learning_rate(base), rel_tol=1e-9)):
        message = f"opt_end_learning_rate is {end.value!r}, not {rules.end_learning_rate_ratio} x {base}"
        yield Finding(end.line, "learning_rate", message, "TR Hyperparameters (no checker tests it)")
    warmup, decay = log.first("opt_learning_rate_warmup_steps"), log.first("opt_learning_rate_decay_steps")
    if not warmup or not decay:
        return
    if type(warmup.value) is not int or warmup.value < 0 or decay.value != rules.decay_steps(warmup.value):
        message = f"opt_learning_rate_decay_steps is {decay.value!r}, not {rules.max_steps} - {warmup.value!r} warm-up steps"
        yield Finding(decay.line, "decay_steps", message, "CC closed_llama31_8b.yaml")
    if decay.line < warmup.line:
        yield Finding(decay.line, "decay_steps", "the decay steps stand before the warm-up steps", "CC closed_llama31_8b.yaml")


# Rules of llama2_70b_lora, closed or miniature.


def llama2_70b_lora_findings(log: Log, rules: llama2_70b_lora_rules.Rules) -> Findings:
    """Of these constants the official checker tests the rank only."""
    source = "TR Hyperparameters; CC closed_llama2_70b_lora.yaml"
    yield from check_keys(log, (*COMMON_KEYS, *LLAMA2_70B_LORA_KEYS), source)
    constants = common_constants(rules) | {
        "train_samples": rules.train_samples,
        "lora_rank": rules.lora_rank,
        "lora_alpha": rules.lora_alpha,
        "lora_dropout": rules.lora_dropout,
    }
    yield from check_constants(log, rules.division, constants, source)
    yield from check_cosine(log)
    yield from shared_findings(log, rules)


def check_cosine(log: Log) -> Findings:
    source = "TR Hyperparameters"
    for event in log.all("opt_learning_rate_training_steps"):
        if not _is_positive_int(event.value):
            yield Finding(event.line, "learning_rate", f"{event.key} is {event.value!r}, not a whole number from 1", source)
    for event in log.all("opt_learning_rate_warmup_factor"):
        if not (_is_number(event.value) and 0 <= event.value < 1):
            yield Finding(event.line, "learning_rate", f"{event.key} is {event.value!r}, not a share of the training steps", source)


# Small questions.


def _exactly_once(log: Log, key: str, source: str) -> Findings:
    found = log.all(key)
    if not found:
        yield Finding(0, "missing", f"{key} is missing", source)
    for event in found[1:]:
        yield Finding(event.line, "repeated", f"{key} again; it stands in line {found[0].line} already", source)


def _events(log: Log, keys: tuple[str, ...]) -> Iterator[Event]:
    return (event for key in keys for event in log.all(key))


def _events_in_order(log: Log, keys: tuple[str, ...]) -> Iterator[Event]:
    return (event for event in log.events if event.key in keys)


def _line(event: Event | None) -> int:
    return event.line if event else 0


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_positive_int(value: object) -> TypeGuard[int]:
    return type(value) is int and value >= 1


def _same_number_or_text(value: object, wanted: object) -> bool:
    """1 and 1.0 are the same, True and 1 or "1" and 1 are not."""
    return value == wanted and isinstance(value, str) == isinstance(wanted, str) and not isinstance(value, bool)
