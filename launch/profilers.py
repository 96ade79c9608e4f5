"""`profile --with TOOL`: one rank under a vendor's profiler: nsys, ncu or rocprofv3.

Documentation of their options:

- nsys: docs.nvidia.com/nsight-systems/UserGuide
- ncu: docs.nvidia.com/nsight-compute/NsightComputeCli
- rocprofv3: rocm.docs.amd.com/projects/rocprofiler-sdk, "Using rocprofv3"

Standard library only.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError, PreflightError
from common.suggestions import unknown


@dataclass(frozen=True)
class Tool:
    """Command line and results of one profiler.

    In `options`, DIR stands for the directory of the results, and OUT for the path of the result
    without its suffix.
    """

    options: str
    result: str  # names of the result files in DIR
    opens: str  # command or site that opens the result
    source: str  # where the tool can be installed from
    last: str = ""  # word between the options and the program
    needs: str = ""  # requirements besides the tool itself
    one_rank: bool = False  # whether it works only with a single rank


TOOLS = {
    "nsys": Tool(
        "profile --trace=cuda,nvtx,cublas,cudnn --sample=none --cpuctxsw=none "
        "--capture-range=cudaProfilerApi --capture-range-end=stop --output=OUT",
        result="nsys.nsys-rep",
        opens="nsys-ui FILE, or nsys stats FILE",
        source="developer.nvidia.com/nsight-systems, or the package nsight-systems-cli of NVIDIA's "
        "CUDA repository",
    ),
    "ncu": Tool(
        "--profile-from-start off --nvtx --target-processes all --set detailed --export OUT",
        result="ncu.ncu-rep",
        opens="ncu-ui FILE, or ncu --import FILE",
        source="the CUDA Toolkit (nsight-compute), or developer.nvidia.com/nsight-compute",
        needs="the right to read counters: root, or the driver's option "
        "NVreg_RestrictProfilingToAdminUsers=0",
        one_rank=True,
    ),
    "rocprofv3": Tool(
        "--kernel-trace --memory-copy-trace --rccl-trace --marker-trace --stats --output-format "
        "pftrace csv --output-directory DIR --output-file rocprofv3",
        result="rocprofv3_results.pftrace, rocprofv3_kernel_stats.csv",
        opens="ui.perfetto.dev",
        source="ROCm's package rocprofiler-sdk, in /opt/rocm/bin",
        last="--",
    ),
}


def require(request: str, ranks: int, installed: bool = True) -> None:
    """Check that the requested profiler can be used.

    `request`: a tool's name, optionally followed by options for it, quoted as in a shell. Raise
    ConfigError for an unknown tool, and for a tool that cannot watch one of several ranks. With
    `installed`, raise PreflightError if the tool is not on PATH.
    """
    try:
        name = (shlex.split(request) or [""])[0]
    except ValueError as error:  # a quote is not closed
        raise ConfigError(
            f"--with {request}: {error}",
            "the tool and its options are split into words like a shell command",
            "close the quote",
        ) from None
    if name not in TOOLS:
        raise unknown(f"--with {name}: unknown profiler", name, TOOLS)
    if TOOLS[name].one_rank and ranks > 1:
        why = (
            "it runs each kernel several times, and a repeated NCCL kernel waits for the other "
            "ranks forever"
        )
        raise ConfigError(
            f"{name} cannot profile one of {ranks} ranks",
            why,
            "use --config with a config for one GPU, and --layers to make it fit",
        )
    if installed and not shutil.which(name):
        raise PreflightError(
            f"{name} is not on PATH",
            "--with starts rank 0 under it",
            f"install it: {TOOLS[name].source}",
        )


def wrapped(command: list[str], request: str, out: Path) -> list[str]:
    """Return torchrun's `command` with rank 0 under the profiler.

    torchrun starts a shell for each rank. The shell is replaced by the profiler if RANK is 0, and
    by the program otherwise.
    """
    name, *more = shlex.split(request)
    tool = TOOLS[name]
    paths = {"OUT": str(out / name), "DIR": str(out)}
    options = []
    for word in tool.options.split():
        # In one pass, since the path itself may contain OUT or DIR.
        options.append(re.sub("OUT|DIR", lambda match: paths[match[0]], word))
    profiler = shlex.join([name, *options, *more, *tool.last.split()])
    script = f'if [ "$RANK" = 0 ]; then exec {profiler} "$@"; else exec "$@"; fi'
    start = command.index("--nproc-per-node") + 2  # the program follows this option
    return [
        *command[:start],
        "--no-python",
        "sh",
        "-c",
        script,
        "sh",
        sys.executable,
        *command[start:],
    ]


def guide(request: str, out: Path) -> str:
    """Return the line that says where the result is and what opens it."""
    tool = TOOLS[shlex.split(request)[0]]
    line = f"profile    {out}: {tool.result}; open with {tool.opens}"
    if tool.needs:
        line += f"; needs {tool.needs}"
    return line
