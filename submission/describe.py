"""`./run_and_time.sh describe --out FILE [--set KEY=VALUE ...] [--submitter ORG]`

The command writes the system description of this machine to FILE. It has the keys that the official
checker requires and those that the policy adds. If FILE exists, its answers are kept: only empty
values are filled in, and --set replaces a value. An error is a value that makes an official tool
fail or crash. A warning names a key that the policy asks for and no tool tests, such as an empty
value.

Exit code: 0 no error and the official checker passes (warnings allowed), 20 otherwise, 2 wrong
usage, 18 no official checker.
Sources: mlcommons/logging, system_desc_checker; mlcommons/policies, submission_rules.adoc, "System
description".
Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from common import inventory
from common.command_line import Parser, program
from common.errors import CheckFailed, ConfigError
from common.hardware import probe
from submission import official_tools, terminal
from submission.log_rules import converts_to_int
from submission.official_tools import CLOSED_RULESETS

POLICY_KEYS = ("system_type", "system_type_detail", "host_network_card_count")
KEYS = (  # in the checker's order, which requires all of them except POLICY_KEYS
    *(
        "submitter",
        "division",
        "status",
        "system_name",
        "number_of_nodes",
        "host_processors_per_node",
        "host_processor_model_name",
    ),
    *(
        f"host_processor_{fact}"
        for fact in ("core_count", "vcpu_count", "frequency", "caches", "interconnect")
    ),
    *(
        "host_memory_capacity",
        "host_storage_type",
        "host_storage_capacity",
        "host_networking",
        "host_networking_topology",
    ),
    *(
        "host_memory_configuration",
        "accelerators_per_node",
        "accelerator_model_name",
        "accelerator_host_interconnect",
    ),
    *(
        "accelerator_frequency",
        "accelerator_on-chip_memories",
        "accelerator_memory_configuration",
        "accelerator_memory_capacity",
    ),
    *("accelerator_interconnect", "accelerator_interconnect_topology", "cooling", "hw_notes"),
    *("framework", "other_software_stack", "operating_system", "sw_notes", *POLICY_KEYS),
)
MAY_BE_EMPTY = (  # according to the policy
    *(
        "host_processor_frequency",
        "host_processor_caches",
        "host_processor_interconnect",
        "accelerator_frequency",
    ),
    *("accelerator_on-chip_memories", "accelerator_interconnect_topology", "hw_notes", "sw_notes"),
)
JOINED_KEYS = (  # the checker joins these with commas: any type but a string raises a TypeError
    *("submitter", "system_name", "host_processor_model_name", "host_processor_core_count"),
    *("accelerator_model_name", "accelerators_per_node", "framework"),
)
# The summarizer calls int() on these.
WHOLE_NUMBERS = (
    "number_of_nodes",
    "host_processors_per_node",
    "accelerators_per_node",
)
STATUS = {
    "onprem": "Available on-premise",
    "cloud": "Available cloud",
    "rdi": "Research, Development, or Internal (RDI)",
    "preview": "Preview",
}
# Placeholders for a value that has not been filled in yet.
NOT_MEANT = (
    "",
    "todo",
    "tbd",
    "fixme",
    "unknown",
    "?",
    "xxx",
)
HINTS = {
    "submitter": "the organisation, as in the logs: --submitter ORG",
    "status": f"one of {', '.join(STATUS)}",
    "cooling": "air or liquid",
    "host_memory_configuration": "number, size and kind of modules; `sudo dmidecode -t memory` knows",
    "host_networking": "number, kind and speed of the ports",
}


def parser(benchmark: str = "") -> Parser:
    example = "describe --out H200_1x8.json --submitter Us --set status=onprem"
    parser = Parser("describe", "Write the MLPerf system description of this machine.", [example])
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help="the JSON; its name without .json is the system's id",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an answer that the machine cannot give",
    )
    parser.add_argument("--submitter", default="", metavar="ORG", help="who submits")
    parser.add_argument(
        "--ruleset",
        choices=CLOSED_RULESETS,
        default=CLOSED_RULESETS[-1],
        help="of the round; default: the newest",
    )
    return parser


def _describe(options: argparse.Namespace) -> int:
    answers = terminal.pairs(
        "--set", options.set + [f"submitter={options.submitter}"] * bool(options.submitter), KEYS
    )
    return describe(
        options.out,
        inventory.facts(Path("/"), probe(), os.environ.get("GPU_KIND", "")),
        answers,
        options.ruleset,
    )


def describe(path: Path, found: dict[str, str], answers: dict[str, str], ruleset: str) -> int:
    """Write the description to `path`, print what is missing and return the exit code.

    `found`: facts of this machine, as from inventory.facts. `answers`: values from the command
    line. Raises ConfigError if `path` has an invalid name or does not hold a description,
    StorageError if it cannot be written, PreflightError without the official checker.
    """
    if path.suffix != ".json" or " " in path.name or path.name.startswith("."):
        why = "its name is the system's id: the repo checker refuses blanks and leading dots, the package checker reads *.json"
        raise ConfigError(f"--out {path}", why, "choose a name such as MI355X_1x8_pytorch.json")
    description = compose(found, read(path) if path.exists() else {}, answers)
    terminal.write(path, json.dumps(description, indent=4) + "\n")
    for severity, lines in (("error", problems(description)), ("warning", questions(description))):
        print("".join(f"{severity}: {line}\n" for line in lines), end="", file=sys.stderr)
    if problems(description):
        return CheckFailed.exit_code
    verdict = official_tools.system_description(path, ruleset)
    print(f"{path}: official checker for {ruleset}: {'passed' if verdict.passed else 'FAILED'}")
    print("".join(f"  {line}\n" for line in verdict.complaints), end="", file=sys.stderr)
    return 0 if verdict.passed else CheckFailed.exit_code


def compose(
    found: dict[str, str], earlier: dict[str, str], answers: dict[str, str]
) -> dict[str, str]:
    """Return all keys in the checker's order, with a note on stderr for each conflict.

    `answers` (command line) take precedence over `earlier` (the file), and those over `found` (the
    machine).
    """
    description = {key: "" for key in KEYS} | {"division": "closed"}
    description |= (
        found | {key: text for key, text in earlier.items() if not _is_open(text)} | answers
    )
    description["status"] = STATUS.get(str(description["status"]).lower(), description["status"])
    for key in earlier:
        if (
            not _is_open(earlier[key])
            and key not in answers
            and found.get(key, earlier[key]) != earlier[key]
        ):
            print(
                f"note: {key} stays {earlier[key]!r} as in the file; this machine says {found[key]!r}",
                file=sys.stderr,
            )
    return description


def problems(description: dict) -> list[str]:
    """Return one line for each value that makes an official tool fail, crash or skip its checks."""
    tests = [
        (
            key,
            isinstance(description.get(key), str),
            "is not a string (system_desc_checker breaks off)",
        )
        for key in JOINED_KEYS
    ]
    tests += [
        (
            key,
            converts_to_int(description.get(key)),
            "is not a whole number (result_summarizer breaks off)",
        )
        for key in WHOLE_NUMBERS
    ]
    status, division = description.get("status"), description.get("division")
    tests.append(
        (
            "status",
            status in STATUS.values(),
            f"is none of {'; '.join(STATUS.values())} (system_desc_checker)",
        )
    )
    tests.append(
        (
            "division",
            division == "closed",
            "is not 'closed' (package_checker skips the seed and RCP checks)",
        )
    )
    lines = [
        f"{key}: missing (system_desc_checker)"
        for key in KEYS
        if key not in description and key not in POLICY_KEYS
    ]
    return lines + [
        f"{key}: {description[key]!r} {why}"
        for key, holds, why in tests
        if key in description and not holds
    ]


def questions(description: dict) -> list[str]:
    """Return one line for each missing value that the policy asks for and no tool tests.

    Each line begins with the option that sets the value.
    """
    unanswered = [
        key
        for key in KEYS
        if key not in (*MAY_BE_EMPTY, "status") and _is_open(description.get(key))
    ]
    # The policy asks for only one of these.
    counts = {
        "host_processor_core_count",
        "host_processor_vcpu_count",
    }
    return [
        f"--set {key}=...   {HINTS.get(key, '')}".rstrip()
        for key in unanswered
        if key not in counts or counts <= {*unanswered}
    ]


def read(path: Path) -> dict[str, str]:
    """Return the system description in `path`. Raises ConfigError if it is not a JSON object."""
    try:
        return dict(json.loads(path.read_text()).items())
    except (OSError, ValueError, RecursionError, AttributeError) as error:
        raise ConfigError(
            f"{path}: it holds no system description",
            str(error),
            "./run_and_time.sh describe makes one",
        ) from None


def _is_open(text: object) -> bool:
    return text is None or (isinstance(text, str) and text.strip().lower() in NOT_MEANT)


main = program(parser, _describe)

if __name__ == "__main__":
    sys.exit(main())
