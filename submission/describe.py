"""`python -m submission.describe --out FILE [--set KEY=VALUE ...] [--submitter ORG]`: the system description of this machine.

Writes FILE with all keys that the official checker wants and the policy's extras, every value a string. What the machine
does not tell is asked for by name. If FILE exists, its answers stay: only empty ones are filled, and --set replaces.

Exit code: 0 complete and passed by the official checker, 20 something is still missing, 2 wrong usage, 18 no official checker.
Sources: mlcommons/logging, system_desc_checker; mlcommons/policies, submission_rules.adoc, "System description".
Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from common.errors import CheckFailed, ConfigError, RunError, StorageError
from common.hardware import probe
from submission import machine, official
from submission.checker import CLOSED_RULESETS

# Key -> may be empty. In the order of the checker, which wants all of them but the last three; those are the policy's.
KEYS = {
    "submitter": False,
    "division": False,
    "status": False,
    "system_name": False,
    "number_of_nodes": False,
    "host_processors_per_node": False,
    "host_processor_model_name": False,
    "host_processor_core_count": False,
    "host_processor_vcpu_count": False,
    "host_processor_frequency": True,
    "host_processor_caches": True,
    "host_processor_interconnect": True,
    "host_memory_capacity": False,
    "host_storage_type": False,
    "host_storage_capacity": False,
    "host_networking": False,
    "host_networking_topology": False,
    "host_memory_configuration": False,
    "accelerators_per_node": False,
    "accelerator_model_name": False,
    "accelerator_host_interconnect": False,
    "accelerator_frequency": True,
    "accelerator_on-chip_memories": True,
    "accelerator_memory_configuration": False,
    "accelerator_memory_capacity": False,
    "accelerator_interconnect": False,
    "accelerator_interconnect_topology": True,
    "cooling": False,
    "hw_notes": True,
    "framework": False,
    "other_software_stack": False,
    "operating_system": False,
    "sw_notes": True,
    "system_type": False,
    "system_type_detail": False,
    "host_network_card_count": False,
}
WHOLE_NUMBERS = ("number_of_nodes", "host_processors_per_node", "accelerators_per_node")  # the summarizer calls int() on them
STATUS = {
    "onprem": "Available on-premise",
    "cloud": "Available cloud",
    "rdi": "Research, Development, or Internal (RDI)",
    "preview": "Preview",
}
NOT_MEANT = ("", "todo", "tbd", "fixme", "unknown", "?", "xxx")  # what stands where nobody has answered yet
HINTS = {
    "submitter": "the organisation, as in the logs: --submitter ORG",
    "status": f"one of {', '.join(STATUS)}",
    "cooling": "air or liquid",
    "host_memory_configuration": "number, size and kind of modules; `sudo dmidecode -t memory` knows",
    "host_networking": "number, kind and speed of the ports",
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="submission.describe", description="Write the MLPerf system description of this machine.")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the JSON; its name without .json is the system's id")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an answer that the machine cannot give")
    parser.add_argument("--submitter", default="", metavar="ORG")
    parser.add_argument("--ruleset", choices=CLOSED_RULESETS, default=CLOSED_RULESETS[-1])
    options = parser.parse_args(arguments)
    try:
        answers = _answers(options.set) | ({"submitter": options.submitter} if options.submitter else {})
        found = machine.facts(Path("/"), probe(), os.environ.get("GPU_KIND", ""))
        return describe(options.out, found, answers, options.ruleset)
    except RunError as error:
        print(error.lines(), file=sys.stderr)
        return error.exit_code


def describe(path: Path, found: dict[str, str], answers: dict[str, str], ruleset: str) -> int:
    """Write the description to `path` and say what is missing; return the exit code. Raises ConfigError, StorageError, PreflightError."""
    _check_name(path)
    description = compose(found, read(path) if path.exists() else {}, answers)
    try:
        path.write_text(json.dumps(description, indent=4) + "\n")
    except OSError as error:
        raise StorageError(f"cannot write {path}", str(error), "make the directory, or choose another one") from error
    for key in ("accelerator_model_name", "accelerators_per_node", "host_processor_model_name", "operating_system", "framework"):
        print(f"{key:<28} {description[key] or '-'}", file=sys.stderr)
    missing = problems(description)
    if missing:
        print(f"{path}: not complete; the machine does not tell, or it is not right:", file=sys.stderr)
        print("\n".join(f"  {line}" for line in missing), file=sys.stderr)
        return CheckFailed.exit_code
    verdict = official.system_description(path, ruleset)
    print(f"{path}: complete; official checker for {ruleset}: {'passed' if verdict.passed else 'FAILED'}")
    print("".join(f"  {line}\n" for line in verdict.complaints), end="", file=sys.stderr)
    return 0 if verdict.passed else CheckFailed.exit_code


def compose(found: dict[str, str], earlier: dict[str, str], answers: dict[str, str]) -> dict[str, str]:
    """All keys in the checker's order: answers win over what the file said, and that over what the machine says."""
    description = {key: "" for key in KEYS} | {"division": "closed"}
    description |= found | {key: text for key, text in earlier.items() if not _is_open(text)} | answers
    description["status"] = STATUS.get(description["status"].lower(), description["status"])
    for key in earlier:
        if not _is_open(earlier[key]) and key not in answers and found.get(key, earlier[key]) != earlier[key]:
            print(f"note: {key} stays {earlier[key]!r} as in the file; this machine says {found[key]!r}", file=sys.stderr)
    return description


def problems(description: dict) -> list[str]:
    """What keeps a description from being submitted, one line per key, with the flag that answers it."""
    lines = []
    for key, may_be_empty in KEYS.items():
        text = description.get(key)
        if not isinstance(text, str):
            lines.append(f"{key}: {'missing' if key not in description else f'{text!r} is no text'}")
        elif _is_open(text) and not may_be_empty and not _answered_by_the_other(key, description):
            lines.append(f"--set {key}=...   {HINTS.get(key, '')}".rstrip())
        elif key in WHOLE_NUMBERS and not (text.isdigit() and int(text) > 0):
            lines.append(f"{key}: {text!r} is no whole number from 1")
    if isinstance(description.get("status"), str) and description["status"] and description["status"] not in STATUS.values():
        lines.append(f"status: {description['status']!r} is none of {'; '.join(STATUS.values())}")
    if description.get("division") != "closed":
        # With `Closed` the package checker leaves out seeds and RCP and says SUCCESS.
        lines.append(f"division: {description.get('division')!r}, not 'closed' in lower case")
    return lines


def read(path: Path) -> dict[str, str]:
    """The description in `path`. Raises ConfigError if it is no JSON object."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: no system description", str(error), "make one with submission.describe") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: no system description", "it holds no JSON object", "make one with submission.describe")
    return value


def _answered_by_the_other(key: str, description: dict) -> bool:
    """The policy wants the number of cores or of vCPUs."""
    other = {"host_processor_core_count": "host_processor_vcpu_count", "host_processor_vcpu_count": "host_processor_core_count"}.get(key)
    return other is not None and not _is_open(description.get(other))


def _is_open(text: object) -> bool:
    return isinstance(text, str) and text.strip().lower() in NOT_MEANT


def _answers(pairs: list[str]) -> dict[str, str]:
    answers = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or key not in KEYS:
            raise ConfigError(f"--set {pair}", f"it is not KEY=VALUE with one of the keys {', '.join(KEYS)}", "correct the key")
        answers[key] = value.strip()
    return answers


def _check_name(path: Path) -> None:
    if path.suffix != ".json" or " " in path.name or path.name.startswith("."):
        why = "its name is the system's id: the repo checker refuses blanks and leading dots, the package checker reads *.json"
        raise ConfigError(f"--out {path}", why, "choose a name such as MI355X_1x8_pytorch.json")


if __name__ == "__main__":
    sys.exit(main())
