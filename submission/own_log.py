"""Habits of the logs that this project writes, stricter than any rule: what RunLog cannot write, or a submission of ours must not say.

They hold for our own logs only, and there a break of one is an error: it shows that the writer is broken, or the log was changed.
A log is ours if it is a miniature's, or if its config_filename is named as the files in configs/ are.
Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from common.training.mllog import END, POINT, START
from llama31_8b import rules as llama31_8b_rules
from submission.log import TOKEN, Event, Log, is_number
from submission.log_rules import DISCLOSURE_KEYS, WARNING, Found, Rule, Rules, is_positive_int, unlike

PROJECT_ROOT = Path(__file__).resolve().parents[1]
CONFIG_NAME = re.compile(r"\w+_\d+x\d+(\+[a-z]+)*\.toml")  # MI355X_1x8.toml; launch/select_config.py adds +modified, +forced
CHANGED = ("+modified", "+forced")
INIT_WARNING_S = 1500.0  # five minutes of reserve below the limit
SMALL_SEED = 2**15  # bash's $RANDOM ends here; one honest seed of 32 bits in 130,000 does as well, so this is a warning only
WELL_KNOWN_SEEDS = frozenset({123456, 1234567, 12345678, 123456789, 1234567890, 2**31 - 1, 2**32 - 1, 0xDEADBEEF, 0xCAFEBABE})
STATUS_WORDS = ("onprem", "cloud", "research")  # mlperf_logging/mllog/constants.py

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
# Key -> attribute of Rules: what neither the compliance checker nor log_rules.UNTESTED_CONSTANTS holds to a value.
OWN_CONSTANTS = {
    "submission_division": "division",
    "max_sequence_length": "sequence_length",
    "opt_name": "opt_name",
    "opt_adamw_beta_1": "adam_beta_1",
    "opt_adamw_beta_2": "adam_beta_2",
    "opt_adamw_epsilon": "adam_epsilon",
    "target_accuracy": "target_loss",
}
INIT_KEYS = frozenset(
    {*SUBMISSION_KEYS, "seed", *COMMON_KEYS, *LLAMA31_8B_KEYS, *LLAMA2_70B_LORA_KEYS, "target_accuracy", *DISCLOSURE_KEYS}
)
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


def is_ours(log: Log) -> bool:
    name = log.value("config_filename")
    return log.value("submission_division") == "miniature" or (isinstance(name, str) and CONFIG_NAME.fullmatch(name) is not None)


def not_once(log: Log, rules: Rules) -> Found:
    own = LLAMA31_8B_KEYS if isinstance(rules, llama31_8b_rules.Rules) else LLAMA2_70B_LORA_KEYS
    clock = ("cache_clear", "init_start", "init_stop", "run_start", "run_stop")
    for key in (*clock, *SUBMISSION_KEYS, "seed", *COMMON_KEYS, *own, *DISCLOSURE_KEYS):
        found = log.all(key)
        if not found:
            yield 0, f"{key} is missing"
        for event in found[1:]:
            yield event.line, f"{key} again; it stands in line {found[0].line} already"


def prefixed(log: Log, rules: Rules) -> Found:
    for event in log.events:
        if event.prefix and TOKEN not in event.prefix:
            yield event.line, f"{event.prefix[:40]!r} before the token"


def wrong_event_type(log: Log, rules: Rules) -> Found:
    for event in log.events:
        wanted = EVENT_TYPES.get(event.key, POINT)
        if event.event_type != wanted:
            yield event.line, f"{event.key} is logged as {event.event_type!r}, not {wanted}"


def no_text(log: Log, rules: Rules) -> Found:
    for event in _events(log, SUBMISSION_KEYS):
        if not isinstance(event.value, str) or not event.value.strip():
            yield event.line, f"{event.key} is {event.value!r}, not a text"
        elif event.key == "submission_status" and event.value not in STATUS_WORDS:
            yield event.line, f"submission_status is {event.value!r}, not one of {' '.join(STATUS_WORDS)}"


def out_of_order(log: Log, rules: Rules) -> Found:
    """Initialization, clock, blocks and evaluations follow each other and close; run_stop is last."""
    state = "nothing"
    for event in log.events:
        if state == "stopped":
            yield event.line, f"{event.key} after run_stop"
        elif event.key in INIT_KEYS:
            if state != "init":
                yield event.line, f"{event.key} outside init_start .. init_stop"
        elif (state, event.key) in TRANSITIONS:
            state = TRANSITIONS[state, event.key]
        elif event.key in ("cache_clear", *EVENT_TYPES, "eval_accuracy"):
            yield event.line, f"{event.key} while the run stands at: {state}"


def back_in_time(log: Log, rules: Rules) -> Found:
    for before, event in zip(log.events, log.events[1:], strict=False):
        if event.time_ms < before.time_ms:
            yield event.line, f"{event.key} is {before.time_ms - event.time_ms} ms before the line above"


def wrong_samples(log: Log, rules: Rules) -> Found:
    """Sequences trained so far, counted after the optimizer step: whole steps, never fewer than before."""
    batch, last = log.value("global_batch_size"), 0
    for event in (event for event in log.events if event.key in COUNTED_KEYS):
        samples = event.samples
        if type(samples) is not int or samples < 0:
            yield event.line, f"{event.key} has samples_count {samples!r}"
            continue
        if is_positive_int(batch) and samples % batch:
            yield event.line, f"{event.key} at {samples}, which is no multiple of the global batch of {batch}"
        if samples < last or (samples > last and event.key != "block_stop"):
            yield event.line, f"{event.key} at {samples}, but training stands at {last}"
        last = samples


def chosen_seed(log: Log, rules: Rules) -> Found:
    for event in log.all("seed"):
        if type(event.value) is int and (0 <= event.value < SMALL_SEED or event.value in WELL_KNOWN_SEEDS):
            yield event.line, f"seed {event.value} looks chosen, or drawn from 15 bits; the system's randomness gives 32"


def changed_config(log: Log, rules: Rules) -> Found:
    """A miniature may run anywhere and be changed at will: `CPU_1x1+modified.toml` is the truth, and nobody can submit it."""
    name = log.value("config_filename")
    if rules.division == "closed" and isinstance(name, str) and any(mark in name for mark in CHANGED):
        yield line_of(log, "config_filename"), f"config_filename is {name!r}: changed with --set, or forced onto another GPU"


def unknown_config(log: Log, rules: Rules, project_root: Path) -> Found:
    name, benchmark = log.value("config_filename"), log.value("submission_benchmark")
    if rules.division != "closed" or name is None or any(mark in str(name) for mark in CHANGED):
        return
    if not isinstance(name, str) or Path(name).name != name or not (project_root / "configs" / str(benchmark) / name).is_file():
        yield line_of(log, "config_filename"), f"config_filename is {name!r}, which is no file in configs/{benchmark}/"


def wrong_batch(log: Log, rules: Rules) -> Found:
    for event in _events(log, ("gradient_accumulation_steps", "train_samples")):
        if not is_positive_int(event.value):
            yield event.line, f"{event.key} is {event.value!r}, not a whole number from 1"
    sizes = [log.value(key) for key in ("global_batch_size", "gradient_accumulation_steps", "micro_batch_size")]
    if all(is_positive_int(size) for size in sizes) and sizes[0] % (sizes[1] * sizes[2]):
        message = f"global batch {sizes[0]} is no multiple of gradient_accumulation_steps {sizes[1]} x micro_batch_size {sizes[2]}"
        yield line_of(log, "global_batch_size"), message


def wrong_schedule(log: Log, rules: Rules) -> Found:
    base = log.value("opt_base_learning_rate")
    if not (is_number(base) and base > 0):
        yield line_of(log, "opt_base_learning_rate"), f"base learning rate {base!r}"
    for event in log.all("opt_learning_rate_training_steps"):
        if not is_positive_int(event.value):
            yield event.line, f"{event.key} is {event.value!r}, not a whole number from 1"
    for event in log.all("opt_learning_rate_warmup_factor"):
        if not (is_number(event.value) and 0 <= event.value < 1):
            yield event.line, f"{event.key} is {event.value!r}, not a share of the training steps"


def long_init(log: Log, rules: Rules) -> Found:
    start, stop = log.first("init_start"), log.first("init_stop")
    seconds = (stop.time_ms - start.time_ms) / 1000 if start and stop else 0.0
    if stop and INIT_WARNING_S <= seconds < rules.init_limit_s:
        yield stop.line, f"initialization took {seconds / 60:.1f} of {rules.init_limit_s / 60:.0f} min"


def wrong_constant_of_ours(log: Log, rules: Rules) -> Found:
    for key, attribute in OWN_CONSTANTS.items():
        yield from unlike(log, key, getattr(rules, attribute), rules)


def line_of(log: Log, key: str) -> int:
    event = log.first(key)
    return event.line if event else 0


def _events(log: Log, keys: tuple[str, ...]) -> Iterator[Event]:
    return (event for key in keys for event in log.all(key))


OWN_RULES = (
    Rule("once", not_once, "OWN; CC common.yaml"),
    Rule("line_format", prefixed, "OWN (the official parser strips it)"),
    Rule("event_type", wrong_event_type, "OWN (no checker reads it)"),
    Rule("submission", no_text, "OWN; CC common.yaml"),
    Rule("order", out_of_order, "OWN; TR Run Results"),
    Rule("time", back_in_time, "OWN"),
    Rule("samples_count", wrong_samples, "OWN; TR RCP Rules"),
    Rule("chosen_seed", chosen_seed, "TR Random numbers (a constant seed is not allowed)", WARNING),
    Rule("config_filename", changed_config, "OWN; TR mandatory disclosure (6.1)"),
    Rule("batch", wrong_batch, "OWN; CC closed_common.yaml"),
    Rule("schedule", wrong_schedule, "OWN; TR Hyperparameters"),
    Rule("init_time", long_init, "OWN; TR Run Results", WARNING),
    Rule("constant", wrong_constant_of_ours, "OWN; TR Hyperparameters"),
)
