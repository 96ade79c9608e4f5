"""Rules of the closed division that no official tool tests, for the log of any submitter.

RULES lists them. submission/findings.py describes rule functions and severities.

Sources:
  TR   mlcommons/training_policies, training_rules.adoc (v5.1 to v6.1)
  CC   mlcommons/logging, compliance_checker
  RCP  mlcommons/logging, rcp_checker
  SEED mlcommons/logging, package_checker/seed_checker.py
  REF  mlcommons/training, the benchmark's reference
  OWN  submission/own_log.py: conventions of the logs that this project writes
Standard library only.
"""

from __future__ import annotations

import json
import math

from common import benchmarks
from common.benchmarks import Rules
from common.records.json_lines import is_number
from common.records.mlperf_log import TOKEN, Event, Log
from common.records.run_record import gpus_of
from common.suggestions import nearest
from common.training.mllog import RESERVED_SUBSTRINGS
from submission.findings import (
    NOTE,
    WARNING_OF_OTHERS,
    Rule,
    Violations,
    on_all_records,
    on_records,
    wrong_values,
)

PRECISION_KEYS = tuple(
    f"lowest_numerical_precision_in_{part}" for part in ("linear", "attn", "comm")
)
PARALLELISM_KEYS = tuple(
    f"{kind}_parallelism" for kind in ("tensor", "pipeline", "context", "expert")
)
DISCLOSURE_KEYS = (*PRECISION_KEYS, *PARALLELISM_KEYS, "micro_batch_size", "config_filename")
SPLIT_KEYS = PARALLELISM_KEYS[:3]  # they split the GPUs among fewer replicas of the model
# Distance of two evaluations in intervals. In published logs it is 0.5 to 4. Counts in optimizer
# steps are at most 1/8, at a global batch of 8.
PLAUSIBLE_INTERVALS = (0.25, 8)

# Key that marks the invented logs of a rehearsal (submission/rehearsal.py). No submission may
# contain it.
REHEARSAL_KEY = "rehearsal"


def rules_of(log: Log, division: str | None = None) -> Rules | None:
    """Return the rules for the benchmark of `log`, or None if this project has none.

    `division`: division whose rules apply (default: the log's submission_division).
    """
    name = str(log.value("submission_benchmark"))
    named = division or str(log.value("submission_division"))
    return benchmarks.rules_of_log(name, named, log.folder)


# Evaluations.


def wrong_interval(log: Log, rules: Rules) -> Violations:
    """Find the first evaluation that is not where it is due, or one that is missing at the end."""
    batch = log.value("global_batch_size")
    counts = _evaluations(log)
    if not is_positive_int(batch) or _is_one_batch_low(counts, batch, rules):
        return
    interval = rules.eval_interval(batch)
    last = resumed_at(log)
    due = rules.first_evaluation(batch)
    if last:
        due = max(due, last // interval * interval + interval)
    for line, samples in counts:
        if samples != due:
            message = (
                f"evaluation at {samples}, {samples - last} after {last};"
                f" at a global batch of {batch} it is due at {due} (interval {interval})"
            )
            yield line, f"{message}; this {_gain(samples, due, interval, rules)}"
            return
        last = samples
        due += interval
    stop = log.first("run_stop")
    if stop and type(stop.samples) is int and stop.samples >= due:
        message = (
            f"training continued from {last} to {stop.samples} without an evaluation;"
            f" one was due at {due}"
        )
        yield stop.line, message


def _gain(samples: int, due: int, interval: int, rules: Rules) -> str:
    """Describe the advantage of an evaluation at `samples` instead of `due`."""
    if samples < due:
        return f"may stop up to {due - samples} sequences earlier"
    skipped = -(-(samples - due) // interval)
    return f"saves {skipped} evaluations of {rules.eval_samples} sequences"


def resumed_at(log: Log) -> int:
    """Return the training sequences before the checkpoint from which the run continued, or 0."""
    samples = log.value("resumed")
    return samples if is_positive_int(samples) else 0  # type: ignore[return-value]


def samples_one_batch_low(log: Log, rules: Rules) -> Violations:
    """Find a log in which the samples_count of every evaluation is one global batch too low.

    The submitter's code counted before the optimizer step.
    """
    batch = log.value("global_batch_size")
    counts = _evaluations(log)
    if is_positive_int(batch) and _is_one_batch_low(counts, batch, rules):
        line, samples = _without_early_evaluation(counts, batch, rules)[0]
        message = (
            f"samples_count {samples} and all later ones are one global batch of {batch} too low"
        )
        yield line, message


def uncounted(event: Event, rules: Rules) -> str:
    """Return a message if samples_count is missing in `event` or is not a number, else ""."""
    if is_number(event.samples):
        return ""
    return f"{event.key} without a number as samples_count in its metadata"


def _evaluations(log: Log) -> list[tuple[int, int]]:
    """Return (line, samples_count) of each evaluation with a valid samples_count.

    Consecutive records with the same samples_count are one evaluation that several processes
    logged.
    """
    counts: list[tuple[int, int]] = []
    for event in log.all("eval_accuracy"):
        samples = event.samples
        if not is_number(samples) or samples < 0 or samples != int(samples):
            continue
        is_repeated = counts and counts[-1][1] == samples
        if not is_repeated:
            counts.append((event.line, int(samples)))
    return counts


def _is_one_batch_low(counts: list[tuple[int, int]], batch: int, rules: Rules) -> bool:
    """Return whether each samples_count is one global batch less than where one is due."""
    first = rules.first_evaluation(batch) - batch
    interval = rules.eval_interval(batch)
    due = _without_early_evaluation(counts, batch, rules)
    return bool(due) and all(
        samples == first + number * interval for number, (_, samples) in enumerate(due)
    )


def _without_early_evaluation(
    counts: list[tuple[int, int]], batch: int, rules: Rules
) -> list[tuple[int, int]]:
    """Return `counts` without the extra evaluation that some submitters log before the first."""
    if counts and counts[0][1] < rules.first_evaluation(batch) - batch:
        return counts[1:]
    return counts


def implausible_count(log: Log, rules: Rules) -> Violations:
    """Find the first evaluation whose samples_count cannot be a number of training sequences.

    It decreases, or its distance from the evaluation before it is outside PLAUSIBLE_INTERVALS. The
    first evaluation may be that many times later than it is due.
    """
    batch = log.value("global_batch_size")
    if not is_positive_int(batch):
        return
    interval = rules.eval_interval(batch)
    low, high = PLAUSIBLE_INTERVALS
    last = resumed_at(log)
    for index, (line, samples) in enumerate(_evaluations(log)):
        distance = samples - last
        most = high * max(interval, rules.first_evaluation(batch) - last)
        if distance > most or (index and distance < low * interval):
            message = f"evaluation at {samples}, {distance} after {last}: not a count of sequences"
            yield line, f"{message} at an interval of {interval}"
            return
        last = samples


def stop_before_evaluation(log: Log, rules: Rules) -> Violations:
    """Find a run_stop more than a global batch below the last evaluation, as of one block only."""
    batch = log.value("global_batch_size")
    counts = _evaluations(log)
    stop = log.first("run_stop")
    if counts and stop and is_number(stop.samples) and is_positive_int(batch):
        last = counts[-1][1]
        if stop.samples < last - batch:  # type: ignore[operator]
            yield stop.line, f"run_stop at {stop.samples}, but the last evaluation is at {last}"


def late_benchmark(log: Log, rules: Rules) -> Violations:
    """Find a submission_benchmark after the first evaluation, at which the RCP checker crashes."""
    named = log.first("submission_benchmark")
    evaluated = log.first("eval_accuracy")
    if named and evaluated and named.line > evaluated.line:
        yield (
            named.line,
            f"submission_benchmark after the first evaluation in line {evaluated.line}:"
            " the RCP checker crashes",
        )


def wrong_status(log: Log, rules: Rules) -> Violations:
    """Find a run_stop whose status contradicts the evaluations, or is not success or aborted.

    The RCP checker reads the last run_stop of a log, the summarizer the first one. If the rules
    have no target, any status is accepted.
    """
    if not rules.target_loss:
        return
    reached = any(reaches(event, rules) for event in log.all("eval_accuracy"))
    for stop in log.all("run_stop"):
        status = stop.metadata.get("status")
        if (status == "success") != reached or status not in ("success", "aborted"):
            outcome = "reached" if reached else "not reached"
            message = f"status is {status!r}, but the target of {rules.target_loss} was {outcome}"
            yield stop.line, message


def after_target(log: Log, rules: Rules) -> Violations:
    """Find the first evaluation after the one that reached the target."""
    reached = next((event for event in log.all("eval_accuracy") if reaches(event, rules)), None)
    if reached is None:
        return
    for event in log.all("eval_accuracy"):
        if event.line > reached.line and event.samples != reached.samples:
            yield event.line, f"another evaluation after line {reached.line} reached the target"
            return


def reaches(event: Event, rules: Rules) -> bool:
    """Return whether the evaluation of `event` reached the target."""
    return is_number(event.value) and 0 < event.value <= rules.target_loss


# Hyperparameters and data.


def wrong_constants(log: Log, rules: Rules) -> Violations:
    """Find values that differ from those that the division fixes. 1 equals 1.0, but not True."""
    for key, wanted in rules.fixed_log_values().items():
        for event in log.all(key):
            if event.value != wanted or isinstance(event.value, bool):
                yield (
                    event.line,
                    f"{key} is {event.value!r}; the {rules.division} division requires {wanted!r}",
                )


def wrong_end_learning_rate(log: Log, rules: Rules) -> Violations:
    """Find an end learning rate that does not follow from the base learning rate."""
    base = log.value("opt_base_learning_rate")
    end = log.first("opt_end_learning_rate")
    if not is_number(base) or end is None:
        return
    wanted = rules.end_learning_rate(base)
    if wanted is None:
        return
    if not (is_number(end.value) and math.isclose(end.value, wanted, rel_tol=1e-9)):
        message = (
            f"opt_end_learning_rate is {end.value!r};"
            f" a base learning rate of {base} requires {wanted:g}"
        )
        yield end.line, message


def learning_rate_unlike_reference(log: Log, rules: Rules) -> Violations:
    """Find a base learning rate other than the reference's at this global batch."""
    batch = log.value("global_batch_size")
    rate = log.first("opt_base_learning_rate")
    wanted = rules.reference_learning_rates.get(batch) if is_positive_int(batch) else None
    if rate and wanted and is_number(rate.value) and rate.value != wanted:
        message = (
            f"base learning rate {rate.value!r};"
            f" the reference converged with {wanted:g} at a global batch of {batch}"
        )
        yield rate.line, message


def wrong_batch(log: Log, rules: Rules) -> Violations:
    """Find a global batch that is not the product of the factors that the log discloses.

    The number of GPUs comes from config.toml or from the system description. Without it, the
    batch must be a multiple of the other factors.
    """
    factors = _factors(log)
    if factors is None:
        return
    batch, steps, size, splits = factors
    gpus = gpus_of(log.folder)
    words = f"gradient_accumulation_steps {steps} x micro_batch_size {size}"
    line = log.all("global_batch_size")[0].line
    if gpus is None:
        if batch % (steps * size):
            yield line, f"global batch {batch} is not a multiple of {words}"
    elif steps * size * gpus != batch * splits:
        split = f" / {splits} (tensor x pipeline x context)" if splits > 1 else ""
        yield line, f"global batch {batch} is not {words} x {gpus} GPUs{split}"


def batch_of_one_gpu(log: Log, rules: Rules) -> Violations:
    """Find factors that are right on one GPU only, if nothing says how many GPUs there were."""
    factors = _factors(log)
    if factors is None or rules.division != "closed" or gpus_of(log.folder) is not None:
        return
    batch, steps, size, splits = factors
    if steps * size == batch * splits:
        yield (
            log.all("global_batch_size")[0].line,
            f"gradient_accumulation_steps {steps} x micro_batch_size {size} is the whole global"
            f" batch of {batch}: was there only one GPU?",
        )


def _factors(log: Log) -> tuple[int, int, int, int] | None:
    """Return global batch, accumulation steps, micro batch and the product of SPLIT_KEYS.

    None unless all of them are whole numbers from 1. Some submitters log 1.0.
    """
    keys = ("global_batch_size", "gradient_accumulation_steps", "micro_batch_size", *SPLIT_KEYS)
    numbers = []
    for key in keys:
        value = log.value(key)
        if not is_number(value) or value < 1 or value != int(value):
            return None
        numbers.append(int(value))
    batch, steps, size, *splits = numbers
    return batch, steps, size, math.prod(splits)


def is_fraction(value: object) -> bool:
    """Return whether `value` is a number from 0 to below 1."""
    return is_number(value) and 0 <= value < 1


def wrong_schedule(log: Log, rules: Rules) -> Violations:
    """Find a warm-up that is not a number of steps, and a schedule that ends before the run."""
    for event in log.all("opt_learning_rate_warmup_steps"):
        steps = event.value
        most = log.value("max_steps")
        if type(steps) is not int or steps < 0 or (is_number(most) and steps >= most):
            message = f"{event.key} is {steps!r}, not a number of steps below max_steps {most}"
            yield event.line, message
    batch = log.value("global_batch_size")
    total = log.first("opt_learning_rate_training_steps")
    counts = _evaluations(log)
    if total is None or not is_positive_int(batch) or not is_positive_int(total.value):
        return
    if counts and counts[-1][1] > total.value * batch:  # type: ignore[operator]
        message = (
            f"{total.key} {total.value} at a global batch of {batch}:"
            f" the schedule ends before the evaluation at {counts[-1][1]}"
        )
        yield total.line, message


def cache_kept(event: Event, rules: Rules) -> str:
    """Return a message unless `event` says that the cache was dropped, else "".

    A miniature may say so, because dropping the cache needs root.
    """
    if str(event.value).lower() in ("true", "1") or rules.division != "closed":
        return ""
    return f"cache_clear is {event.value!r}: allowed only if the system was restarted before"


def misnamed_disclosure(log: Log, rules: Rules) -> Violations:
    """Find keys that resemble a missing one of DISCLOSURE_KEYS, the nearest."""
    missing = undisclosed(log)
    for key, events in log.by_key.items():
        if key in DISCLOSURE_KEYS:
            continue
        if similar := nearest(key, missing):
            message = f"{key} is not a key of 6.1.0; did you mean {similar.ours}, which is missing?"
            yield events[0].line, message


def undisclosed(log: Log) -> list[str]:
    """Return the DISCLOSURE_KEYS that `log` does not have."""
    return [key for key in DISCLOSURE_KEYS if not log.all(key)]


# Seeds, and lines that the official tools misread.


def seed_identity(event: Event) -> tuple | None:
    """Return a seed's file, line and number as the seed checker compares them, or None.

    None stands for a seed that the checker cannot read. It compares int(seed): 5 equals 5.9.
    """
    metadata = event.metadata
    try:
        number = int(event.value)  # type: ignore[call-overload]
        identity = (metadata["file"], metadata["lineno"], number)
        hash(identity)  # a list cannot be compared
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return identity


def no_seed(log: Log, rules: Rules) -> Violations:
    """Find a missing seed, and seeds that the official seed checker cannot read."""
    if rules.division == "closed" and not log.all("seed"):
        yield 0, "seed is missing"
    for event in log.all("seed"):
        if seed_identity(event) is None:
            yield (
                event.line,
                f"seed is {event.value!r} at {event.metadata.get('file')!r}, line"
                f" {event.metadata.get('lineno')!r}; it must be an integer with file and lineno",
            )


def repeated_seed(log: Log, rules: Rules) -> Violations:
    """Find a seed that the same line of code logged before, as when each rank logs it."""
    first: dict[tuple, Event] = {}
    for event in log.all("seed"):
        identity = seed_identity(event)
        if identity and first.setdefault(identity, event) is not event:
            line = first[identity].line
            yield event.line, f"seed {event.value!r} again, from the same code as in line {line}"


def many_seeds(log: Log, rules: Rules) -> Violations:
    """Find a second seed in the log of one run."""
    seeds = {str(event.value): event for event in log.all("seed")}
    if len(seeds) > 1:
        yield list(seeds.values())[1].line, f"{len(seeds)} different seeds in one log"


def two_on_a_line(event: Event) -> str:
    """Return a message if another record precedes `event` on its line, else ""."""
    if TOKEN not in event.prefix:
        return ""
    return f"two records on one line: the official parser reads only the second one, {event.key}"


def misread(event: Event) -> str:
    """Return a message if the line of `event` contains a reserved word outside its key, else "".

    The RCP checker finds records by substring. Because of such a word it reads a wrong number, or
    crashes.
    """
    text = json.dumps([event.key, event.value, event.metadata])
    words = [word for word in RESERVED_SUBSTRINGS if word in text and event.key != word]
    return f"the line of {event.key} contains {' and '.join(words)}" if words else ""


def invented(event: Event, rules: Rules) -> str:
    """Return the message about the record REHEARSAL_KEY, with which no log is correct."""
    return "the log of a rehearsal is invented and cannot be submitted"


def not_finite(event: Event) -> str:
    """Return a message if the value of `event` is NaN or infinite, else ""."""
    return f"{event.key} is {event.value}" if _is_not_finite(event.value) else ""


# Tests of values.


def converts_to_int(value: object) -> bool:
    """Return whether int() accepts `value`. The seed checker and the summarizer call it."""
    try:
        int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def _is_plain_seed(value: object) -> bool:
    """Return whether `value` is a 32-bit integer, or not an integer, which `no_seed` reports."""
    return not converts_to_int(value) or (type(value) is int and 0 <= value < 2**32)


def is_positive_int(value: object) -> bool:
    """Return whether `value` is an integer from 1. True, False and 1.0 are not."""
    return type(value) is int and value >= 1


def is_positive(value: object) -> bool:
    """Return whether `value` is a number above 0."""
    return is_number(value) and value > 0


def _is_not_finite(value: object) -> bool:
    """Return whether `value` is NaN or infinite."""
    return isinstance(value, float) and not math.isfinite(value)


DISCLOSURE = "disclosure"
DISCLOSURE_SOURCE = "CC training_6.1.0/common.yaml"
HYPERPARAMETERS = "TR Hyperparameters (no tool tests it)"
RULES = (
    Rule(
        "eval_interval",
        wrong_interval,
        "TR Quality measure (the checker accepts any interval)",
        WARNING_OF_OTHERS,
    ),
    Rule(
        "samples_count",
        samples_one_batch_low,
        "TR RCP Rules: training samples until convergence",
        WARNING_OF_OTHERS,
    ),
    Rule(
        "samples_count",
        implausible_count,
        "TR RCP Rules: training samples until convergence; no published log has it",
    ),
    Rule(
        "samples_count",
        stop_before_evaluation,
        "TR RCP Rules (the tools read the last evaluation)",
        WARNING_OF_OTHERS,
    ),
    Rule("order", late_benchmark, "RCP rcp_checker.py"),
    Rule("count", on_records(uncounted, "eval_accuracy"), "CC closed_*.yaml; RCP rcp_checker.py"),
    Rule(
        "eval_value",
        wrong_values(
            lambda loss: is_positive(loss) or _is_not_finite(loss),
            "a positive number",
            "eval_accuracy",
        ),
        "CC eval_accuracy",
    ),
    Rule(
        "finite",
        on_all_records(not_finite),
        "OWN; the compliance checker ignores NaN if another evaluation passes",
        WARNING_OF_OTHERS,
    ),
    Rule(
        "status",
        wrong_status,
        "TR Run Results; RCP counts a run without success as one that did not converge",
    ),
    Rule(
        "after_target",
        after_target,
        "TR Run Results: a run may stop at the target",
        WARNING_OF_OTHERS,
    ),
    Rule("constant", wrong_constants, "TR Hyperparameters; REF"),
    Rule("end_learning_rate", wrong_end_learning_rate, HYPERPARAMETERS),
    Rule(
        "learning_rate",
        learning_rate_unlike_reference,
        "RCP Hyperparams (the rate is free: TR Hyperparameters)",
        NOTE,
    ),
    Rule(
        "batch",
        wrong_values(
            is_positive_int, "a positive integer: there is no reference", "global_batch_size"
        ),
        "RCP rcp_checker.py",
    ),
    Rule("batch", wrong_batch, "TR mandatory disclosure (6.1)", WARNING_OF_OTHERS),
    Rule("batch", batch_of_one_gpu, "TR mandatory disclosure (6.1)", NOTE),
    Rule(
        "schedule",
        wrong_values(is_positive, "a positive number", "opt_base_learning_rate"),
        HYPERPARAMETERS,
    ),
    Rule(
        "schedule",
        wrong_values(is_positive_int, "a positive integer", "opt_learning_rate_training_steps"),
        HYPERPARAMETERS,
    ),
    Rule(
        "schedule",
        wrong_values(
            is_fraction,
            "a fraction of the steps, from 0 to below 1",
            "opt_learning_rate_warmup_factor",
        ),
        HYPERPARAMETERS,
    ),
    Rule("schedule", wrong_schedule, HYPERPARAMETERS),
    Rule(
        "cache_clear",
        on_records(cache_kept, "cache_clear"),
        "TR Data State: unless the system was restarted",
        WARNING_OF_OTHERS,
    ),
    Rule(DISCLOSURE, misnamed_disclosure, DISCLOSURE_SOURCE, NOTE),
    Rule("seed", no_seed, "SEED; TR Random numbers"),
    Rule("seed", repeated_seed, "SEED", one_cause=True),
    Rule(
        "odd_seed",
        wrong_values(_is_plain_seed, "an integer of 32 bits", "seed"),
        "SEED (converts it with int())",
        WARNING_OF_OTHERS,
    ),
    Rule("many_seeds", many_seeds, "SEED (a warning there)", WARNING_OF_OTHERS),
    Rule(
        "line_format",
        on_all_records(two_on_a_line),
        "CC mlp_parser/ruleset_610.py",
        WARNING_OF_OTHERS,
        one_cause=True,
    ),
    Rule(REHEARSAL_KEY, on_records(invented, REHEARSAL_KEY), "OWN; package --rehearse"),
    Rule("reserved_word", on_all_records(misread), "RCP rcp_checker.py"),
)
