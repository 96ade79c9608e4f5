"""Compare results of the same measurement, or two profiles, in table.md and page.html.

For a single result, these two files are written again. Two directories of `profile` are compared
kernel by kernel, in milliseconds and shares of the step, with the largest change first.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from common.errors import ConfigError, DataError
from common.measure import profile_comparison, report
from throughput import result


def main(options: argparse.Namespace) -> int:
    """Write the comparison of `options.folders` and return 0.

    Raises DataError if a directory has no result, and ConfigError if the measurements differ.
    """
    if all((folder / profile_comparison.PROFILE).is_file() for folder in options.folders):
        return compare_profiles(options)
    for folder in options.folders:
        if not any((folder / name).is_file() for name in (result.NAME, profile_comparison.PROFILE)):
            raise DataError(
                f"{folder} is neither a measurement nor a profile",
                f"it has no {result.NAME} and no {profile_comparison.PROFILE}",
                "name the directory that a measurement or profile printed at its end",
            )
    results = [result.read(folder) for folder in options.folders]
    kinds = sorted({data["what"] for data in results})
    if len(kinds) > 1:
        raise ConfigError(
            f"results of {' and '.join(kinds)}",
            "different measurements cannot be compared",
            "compare results of the same measurement",
        )
    if len(results) == 1 and not options.out:
        report.write(
            options.folders[0], report.title(kinds[0], results[0]), report.sections(results[0])
        )
        return 0
    folder = options.out or result.default_directory("compare")
    result.claim(folder)
    labels = named(options.folders, [data["machine"].get("kind") or "CPU" for data in results])
    report.write(
        folder,
        f"{kinds[0]}: {len(results)} results",
        report.comparison_sections(list(zip(labels, results, strict=True))),
    )
    return 0


def compare_profiles(options: argparse.Namespace) -> int:
    """Write the comparison of two directories of `profile` and return 0.

    Raises ConfigError unless there are exactly two, DataError if one cannot be read.
    """
    if len(options.folders) != 2:
        raise ConfigError(
            f"{len(options.folders)} profiles",
            "exactly two can be compared",
            "name two directories",
        )
    before, after = (profile_comparison.read(folder) for folder in options.folders)
    folder = options.out or result.default_directory("compare")
    result.claim(folder)
    report.write(
        folder,
        profile_comparison.title(before, after),
        profile_comparison.sections(before, after),
    )
    return 0


def named(folders: list[Path], kinds: list[str]) -> list[str]:
    """Return a different label for each result.

    The label is the GPU kind if all kinds differ. Otherwise it is the kind and the directory's
    name, followed by a number if these are not different either.
    """
    names = [f"{kind} {folder.resolve().name}" for kind, folder in zip(kinds, folders, strict=True)]
    for labels in (kinds, names):
        if len(set(labels)) == len(labels):
            return labels
    return [f"{name} ({number})" for number, name in enumerate(names, start=1)]
