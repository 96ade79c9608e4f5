"""Write the MLPerf system description of this machine.

FILE is the only file that is written. It has the keys that the official checker requires and those
that the policy adds. If FILE exists, its values are kept: only empty ones are filled in, and --set
replaces a value. An error is a value that makes an official tool fail or crash. A warning names a
key without a value that the policy asks for and no tool tests.

Exit code 0 if there are no errors and the official checker passes (warnings are allowed), 20
otherwise, 2 for wrong usage, 17 if FILE cannot be written, 18 without the official checker.
"""

# Sources: mlcommons/logging, system_desc_checker; mlcommons/policies, submission_rules.adoc,
# "System description".

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.command_line import Parser, pairs_of, program
from common.errors import CheckFailed, ConfigError, write_text
from common.gpu_kinds import KINDS
from common.machine import inventory
from common.machine.hardware import probe
from common.paths import ROOT
from common.values import gpu_kind, of_variable, spelled_as
from submission import official_tools, prerequisites
from submission.log_rules import converts_to_int
from submission.official_tools import BY_HAND, CLOSED_RULESETS

POLICY_KEYS = ("system_type", "system_type_detail", "host_network_card_count")
# In the order of the checker, which requires all of them except POLICY_KEYS.
KEYS = (
    "submitter",
    "division",
    "status",
    "system_name",
    "number_of_nodes",
    "host_processors_per_node",
    "host_processor_model_name",
    "host_processor_core_count",
    "host_processor_vcpu_count",
    "host_processor_frequency",
    "host_processor_caches",
    "host_processor_interconnect",
    "host_memory_capacity",
    "host_storage_type",
    "host_storage_capacity",
    "host_networking",
    "host_networking_topology",
    "host_memory_configuration",
    "accelerators_per_node",
    "accelerator_model_name",
    "accelerator_host_interconnect",
    "accelerator_frequency",
    "accelerator_on-chip_memories",
    "accelerator_memory_configuration",
    "accelerator_memory_capacity",
    "accelerator_interconnect",
    "accelerator_interconnect_topology",
    "cooling",
    "hw_notes",
    "framework",
    "other_software_stack",
    "operating_system",
    "sw_notes",
    *POLICY_KEYS,
)
MAY_BE_EMPTY = (  # according to the policy
    "host_processor_frequency",
    "host_processor_caches",
    "host_processor_interconnect",
    "accelerator_frequency",
    "accelerator_on-chip_memories",
    "accelerator_interconnect_topology",
    "hw_notes",
    "sw_notes",
)
# The checker joins these with commas: any type but a string raises a TypeError there.
JOINED_KEYS = (
    "submitter",
    "system_name",
    "host_processor_model_name",
    "host_processor_core_count",
    "accelerator_model_name",
    "accelerators_per_node",
    "framework",
)
# The summarizer calls int() on these.
WHOLE_NUMBERS = ("number_of_nodes", "host_processors_per_node", "accelerators_per_node")
# Value of --set status=... -> value of the policy, which is accepted as well.
STATUS = {
    "onprem": "Available on-premise",
    "cloud": "Available cloud",
    "rdi": "Research, Development, or Internal (RDI)",
    "preview": "Preview",
}
# Status of a system -> values of submission_status that its logs may have. The logs have no word
# for a preview system: they say where it is.
LOGGED_STATUS = {
    STATUS["onprem"]: ("onprem",),
    STATUS["cloud"]: ("cloud",),
    STATUS["rdi"]: ("research",),
    STATUS["preview"]: ("onprem", "cloud"),
}
# Texts that count as no value.
PLACEHOLDERS = ("", "todo", "tbd", "fixme", "unknown", "?", "xxx")
HINTS = {  # key -> what belongs there, for a warning
    "submitter": "organization, as in the logs: --submitter ORG",
    "status": f"one of {', '.join(STATUS)}",
    "cooling": "air or liquid",
    "host_memory_configuration": "number, size and kind of modules: `sudo dmidecode -t memory`",
    "host_networking": "number, kind and speed of the ports",
}


def parser() -> Parser:
    """Return the argument parser of `describe`."""
    parser = Parser(
        "describe",
        __doc__,
        [
            "describe --out results/H200_1x8.json --submitter Us --set status=onprem",
            "describe --out results/H200_1x8.json --set cooling=air",
        ],
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSON file to write or complete; its name without .json is the system ID, as in "
        "MLPERF_SUBMISSION_PLATFORM of the runs",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set a value that the machine cannot report; may be repeated",
    )
    parser.add_argument(
        "--submitter", default="", metavar="ORG", help="organization that submits the results"
    )
    parser.add_argument(
        "--ruleset",
        choices=CLOSED_RULESETS,
        default=CLOSED_RULESETS[-1],
        help="MLPerf ruleset (default: %(default)s)",
    )
    return parser


def _describe(options: argparse.Namespace) -> int:
    texts = list(options.set)
    if options.submitter:
        texts.append(f"submitter={options.submitter}")
    settings = pairs_of("--set", texts, KEYS)
    if "submitter" in settings:
        prerequisites.require_org("--submitter", settings["submitter"])
    kind = of_variable(os.environ, "GPU_KIND", gpu_kind) or ""
    gpus = probe()
    if not gpus.devices:
        print(
            "note: no GPU found, so the values are those of this host: run this on the system that"
            " is described",
            file=sys.stderr,
        )
    machine = inventory.facts(Path("/"), gpus, kind)
    code = describe(options.out, machine, settings, options.ruleset)
    for reason in refused_texts(options.out, read(options.out), os.environ):
        print(f"note: a run that is started now could not be submitted: {reason}", file=sys.stderr)
    return code


def accepted_texts(path: Path, description: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return org, status and platform -> the texts in a log that fit the description at `path`."""
    shape = f"{description['number_of_nodes']}x{description['accelerators_per_node']}"
    model = str(description["accelerator_model_name"])
    kinds = [kind for kind in KINDS if re.search(rf"\b{kind}\b", model)]
    return {
        "org": [description["submitter"]],
        "status": [*LOGGED_STATUS.get(description["status"], ())],
        "platform": [
            path.stem,
            description["system_name"],
            *(f"{shape} {kind}" for kind in kinds),  # a log's default
        ],
    }


def refused_texts(
    path: Path, description: Mapping[str, Any], environment: Mapping[str, str]
) -> list[str]:
    """Return the reasons why `package` would refuse runs of this checkout with the description."""
    reasons = prerequisites.refusal_reasons(ROOT, environment)
    for key, texts in accepted_texts(path, description).items():
        name = f"MLPERF_SUBMISSION_{key.upper()}"
        if any(texts) and environment.get(name, texts[0]) not in texts:
            reasons.append(f"{name} is {environment[name]!r}, not {' or '.join(map(repr, texts))}")
    return reasons


def describe(path: Path, machine: dict[str, str], settings: dict[str, str], ruleset: str) -> int:
    """Write the description to `path`, print what is missing, and return the exit code.

    `machine`: values that this machine reports (inventory.facts). `settings`: values from the
    command line. Raises ConfigError if `path` has an invalid name or is not a description, or if
    a setting is invalid, StorageError if it cannot be written, PreflightError without the official
    checker.
    """
    prerequisites.require_file_name("--out", path)
    description = compose(machine, read(path) if path.exists() else {}, settings)
    errors = problems(description)
    for line in errors:
        key, _, why = line.partition(": ")
        if key in settings:
            raise ConfigError(
                f"--set {key}={settings[key]}", why, f"correct the value; {path} was not written"
            )
    write_text(path, json.dumps(description, indent=4) + "\n")
    print(f"{path}: written, {_filled_in(description)}")
    for line in errors:
        print(f"error: {line}", file=sys.stderr)
    for line in missing_values(description):
        print(f"warning: {line}", file=sys.stderr)
    if errors:
        print(f"{path}: complete it by running the command again with --set", file=sys.stderr)
        return CheckFailed.exit_code
    verdict = official_tools.system_description(path, ruleset)
    print(f"{path}: official checker for {ruleset}: {'passed' if verdict.passed else 'FAILED'}")
    for complaint in verdict.complaints:
        print(f"  {complaint}", file=sys.stderr)
    return 0 if verdict.passed else CheckFailed.exit_code


def _filled_in(description: dict[str, str]) -> str:
    values = sum(not _is_placeholder(description.get(key)) for key in KEYS)
    return f"{values} of {len(KEYS)} values filled in"


def compose(
    machine: dict[str, str], earlier: dict[str, str], settings: dict[str, str]
) -> dict[str, str]:
    """Return a description with all keys, in the checker's order.

    `settings` (from the command line) take precedence over `earlier` (from the file), which takes
    precedence over `machine`. If the file and the machine disagree, a note is printed to stderr.
    """
    kept = {key: text for key, text in earlier.items() if not _is_placeholder(text)}
    description = {key: "" for key in KEYS}
    description["division"] = "closed"
    description.update(machine)
    description.update(kept)
    description.update(settings)
    status = spelled_as(str(description["status"]), (*STATUS, *STATUS.values()))
    description["status"] = STATUS.get(status, status)
    for key, text in kept.items():
        if key not in settings and machine.get(key, text) != text:
            print(
                f"note: {key} stays {text!r} as in the file; this machine reports {machine[key]!r}",
                file=sys.stderr,
            )
    return description


def problems(description: dict) -> list[str]:
    """Return one line for each value that makes an official tool fail, crash or skip its checks."""
    lines = []
    for key in KEYS:
        if key not in description and key not in POLICY_KEYS:
            lines.append(f"{key}: missing (system_desc_checker)")

    def require(key: str, holds: bool, why: str) -> None:
        if key in description and not holds:
            lines.append(f"{key}: {description[key]!r} {why}")

    for key in JOINED_KEYS:
        is_text = isinstance(description.get(key), str)
        require(key, is_text, "is not a string (system_desc_checker crashes)")
        text = str(description.get(key))
        is_plain = text.isprintable() and '"' not in text
        require(key, is_plain, "has a quote or a control character (it heads the result tables)")
    for key in WHOLE_NUMBERS:
        is_whole = converts_to_int(description.get(key))
        require(key, is_whole, "is not an integer (result_summarizer crashes)")
    known = ", ".join(f"{short} ({full})" for short, full in STATUS.items())
    require(
        "status",
        description.get("status") in STATUS.values(),
        f"is not one of {known} (system_desc_checker)",
    )
    require(
        "division",
        description.get("division") == "closed",
        "is not 'closed' (package_checker skips the seed and RCP checks); for the open division,"
        f" see {BY_HAND}",
    )
    return lines


def missing_values(description: dict) -> list[str]:
    """Return one line for each missing value that the policy asks for and no tool tests.

    Each line begins with the option that sets the value.
    """
    missing = []
    for key in KEYS:
        if key not in MAY_BE_EMPTY and key != "status" and _is_placeholder(description.get(key)):
            missing.append(key)
    # The policy asks for one of these two counts.
    counts = {"host_processor_core_count", "host_processor_vcpu_count"}
    if not counts <= {*missing}:
        missing = [key for key in missing if key not in counts]
    return [f"--set {key}=...   {HINTS.get(key, '')}".rstrip() for key in missing]


def read(path: Path) -> dict[str, str]:
    """Return the system description at `path`. Raises ConfigError if it is not a JSON object."""
    try:
        return dict(json.loads(path.read_text()).items())
    except (OSError, ValueError, RecursionError, AttributeError) as error:
        raise ConfigError(
            f"{path} is not a system description",
            getattr(error, "strerror", None) or str(error),
            "write one with ./run_and_time.sh describe",
        ) from error


def _is_placeholder(text: object) -> bool:
    return text is None or (isinstance(text, str) and text.strip().lower() in PLACEHOLDERS)


main = program(parser, _describe)

if __name__ == "__main__":
    sys.exit(main())
