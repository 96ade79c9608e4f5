"""Environment variables that the project reads or passes on, and how each is used.

This is the one table. docs/settings.md is generated from it. versions.json, the comparison and the
preflight of nodes, the kept times of engines, and packaged submissions select their variables by
it. The scripts that start containers run
`python3 -I common/variables.py CONTAINER` (or POD), which prints the names of the variables to hand
over, one a line.

Standard library only and valid for Python 3.8, because a host may have only a container engine.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Flag, auto


class Use(Flag):
    """Uses of a variable besides being read."""

    NONE = 0
    CONTAINER = auto()  # run_with_docker.sh hands it to the container
    POD = auto()  # kubernetes_manifest.sh hands it to the container
    PATHS = auto()  # of a prefix: containers also get the variables that name files of the host
    RECORDED = auto()  # in versions.json
    COMPARED = auto()  # must be equal on all nodes
    PACKAGED = auto()  # must be equal in all runs of a submission, whose run_and_time.sh exports it
    NODES = auto()  # `preflight --nodes` hands it to each node
    KERNELS = auto()  # changes kernels: with another value, engines are timed again


HANDED = Use.CONTAINER | Use.POD
# Changes kernels, or the transport between GPUs.
TUNING = Use.RECORDED | Use.COMPARED | Use.PACKAGED
LIBRARY = HANDED | TUNING | Use.NODES
CONFIG = "user, or a config's [env]"

# (who sets them, use, {name: meaning}). A name that ends with "*" is a prefix of variables that
# libraries read, and that the project only passes on. The first prefix that matches applies.
DECLARED: tuple[tuple[str, Use, dict[str, str]], ...] = (
    (
        "user",
        HANDED | Use.NODES,
        {
            "DATADIR": "directory of the benchmark's data (default: `data/` in the checkout)",
            "MODEL": "directory of the weights that LoRA fine-tunes, Llama 2 70B (default: under"
            " DATADIR)",
            "LOGDIR": "directory of all results (default: `results/` in the checkout)",
            "DGXSYSTEM": "name of the config under `configs/<benchmark>/` (default: selected for"
            " the GPUs found)",
            "DGXNGPU": "number of GPUs to use on this node (default: all that are visible)",
            "MLPERF_SUBMISSION_ORG": "submitter's name in the log (default: unnamed)",
            "MLPERF_SUBMISSION_STATUS": "submission_status in the log: `onprem` (default), `cloud`,"
            " or `research` for an RDI system; a preview system is `onprem` or `cloud`",
            "MLPERF_SUBMISSION_PLATFORM": "platform's name in the log (default: number and kind of"
            " GPUs, such as `1x8 H200`)",
            # Also a misspelled name, so that the launcher in the container sees it.
            "MLPERF_SUBMISSION_*": "no meaning",
        },
    ),
    (
        "user",
        HANDED,
        {
            "NEXP": "number of good runs that a series makes (default: 1)",
            "SEED": "seed of a single run, for debugging (default: random)",
            "WANDB_PROJECT": "project of `--track wandb` (default: mlperf-llama-training)",
            "MLFLOW_TRACKING_URI": "server of `--track mlflow` (default: `mlflow.db` in the run's"
            " directory)",
            "MLFLOW_EXPERIMENT_NAME": "experiment of `--track mlflow` (default:"
            " mlperf-llama-training)",
            "TRACKIO_PROJECT": "project of `--track trackio` (default: mlperf-llama-training)",
            "NO_COLOR": "any value: no color; set by `--no-color`",
            "RUN_QUIET": "any value: only errors and results on the screen; set by `--quiet`",
        },
    ),
    (
        "user",
        HANDED | Use.NODES | Use.RECORDED | Use.PACKAGED,
        {
            "GPU_KIND": "GPU kind, for GPUs whose driver reports no known name (--gpu-kind precedes"
            " the name)",
            "ALLOW_KNOWN_ISSUES": "names of known issues that warn instead of refusing the run,"
            " separated by commas",
        },
    ),
    (
        "user",
        Use.NONE,
        {
            "CONTAINER_ENGINE": "`docker`, `podman` or `apptainer` (default: the first one on"
            " PATH)",
            "CONTAINER_OPTIONS": "further options for the container engine",
            "GPU_VENDOR": "`nvidia`, `amd` or `none` (default: detected from the host's device"
            " files)",
            "JOB_NAME": "name of the job in `kubernetes_manifest.sh` (default: llama-training)",
            "RDMA_RESOURCE": "RDMA devices of each pod of several nodes, as NAME:COUNT, such as"
            " `rdma/hca:1`, for `kubernetes_manifest.sh`",
            "PIP_FIND_LINKS": "directory of wheels that the first command installs without an"
            " index",
            "PIP_INDEX_URL": "package index; FlashAttention-4 is installed only if it answers"
            " (default: pypi.org)",
            "PATH": "folders in which nvidia-smi, amd-smi, profilers and the compiler are searched",
        },
    ),
    (
        "user",
        Use.CONTAINER,  # Kubernetes sets its own
        {
            "CONT": "container image of `run_with_docker.sh` and `run.sub`",
            "MASTER_ADDR": "host of rank 0, for several nodes",
            "MASTER_PORT": "port of the rendezvous on that host (default: 29500; in `run.sub` from"
            " the job's ID)",
            "NODE_RANK": "number of this node, for several nodes without Slurm",
        },
    ),
    (
        "user",
        Use.CONTAINER | Use.RECORDED,
        {
            "CUDA_DEVICE_ORDER": "order of NVIDIA GPUs: `PCI_BUS_ID` (default), as in nvidia-smi;"
            " any other is refused",
            "CUDA_VISIBLE_DEVICES": "NVIDIA GPUs that this process may use",
            "HIP_VISIBLE_DEVICES": "AMD GPUs that this process may use",
            "ROCR_VISIBLE_DEVICES": "AMD GPUs that this process may use",
        },
    ),
    (
        CONFIG,
        # A run's engines are compared and packaged instead.
        HANDED | Use.NODES | Use.RECORDED,
        {
            "ATTENTION_ENGINE": "engine of attention (default: the fastest one that is installed):"
            " `sdpa`, `flash_attention_4`, `aiter`, `transformer_engine` or `repeated_heads`",
            "MATMUL_ENGINE": "engine of matrix products (default: the fastest one): `torch`,"
            " `cublaslt` or `transformer_engine`",
            "SWIGLU_ENGINE": "engine of SwiGLU between FP8 products (default: the fastest one that"
            " is installed): `kernel` or `quack`",
        },
    ),
    (
        CONFIG,
        HANDED | Use.RECORDED,  # of one host
        {
            "GLOO_SOCKET_IFNAME": "network interfaces for gloo, separated by commas; one that is"
            " not there is refused",
            "AITER_JIT_DIR": "directory of AITER's compiled modules, in a container below LOGDIR"
            " (default: AITER's own)",
        },
    ),
    (
        CONFIG,
        LIBRARY,
        {
            "ZERO_STREAM_PRIORITY": "priority of the stream that reduces gradients: 0 (default), or"
            " -1 for high",
            "PYTORCH_ALLOC_CONF": "settings of torch's allocator; read to interpret a peak of"
            " reserved memory",
            "PYTORCH_CUDA_ALLOC_CONF": "the same, older name",
            "PYTORCH_HIP_ALLOC_CONF": "the same, older name on ROCm",
            "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "`0`: FlashAttention-4 compiles its kernels"
            " at each start",
            "NCCL_IB_DISABLE": "`1`: TCP instead of RDMA between nodes",
            "NCCL_NET": "network between nodes: `IB` (RDMA), `Socket` (TCP) or a plugin",
            "OMP_WAIT_POLICY": "how idle OpenMP threads wait (default in `prepare`: passive)",
        },
    ),
    (
        CONFIG,
        Use.RECORDED,  # paths of the host
        {
            "CC": "C compiler that Triton uses (default: gcc or clang)",
            "CUDNN_HOME": "folder of the cuDNN that Transformer Engine loads (default: the one of"
            " torch)",
            "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "folder of FlashAttention-4's compiled kernels"
            " (default: one in XDG_CACHE_HOME)",
            "LD_LIBRARY_PATH": "folders in which a CUDA forward-compatibility library may be",
            "PYTHONPATH": "additional import paths; the checkout precedes them",
            "QUACK_CACHE_DIR": "folder of QuACK's compiled kernels (default: one in"
            " XDG_CACHE_HOME)",
            "XDG_CACHE_HOME": "folder of caches, here of compiled kernels and cuBLASLt's choices"
            " (default: ~/.cache)",
        },
    ),
    (
        CONFIG,
        LIBRARY | Use.PATHS | Use.KERNELS,
        {
            "TORCH_ROCM_FA_PREFER_CK": "`1`: Composable Kernel for attention on ROCm; a run that"
            " would not use it is refused",
            "TORCH_ROCM_*": "torch on ROCm",
            "PYTORCH_TUNABLEOP_*": "torch's TunableOp",
            "AMDGCN_*": "Triton on AMD GPUs",
            "HIPBLASLT_*": "hipBLASLt",
        },
    ),
    (
        CONFIG,
        LIBRARY | Use.PATHS,
        {
            "NCCL_*": "NCCL, and RCCL",
            "RCCL_*": "RCCL",
            "GLOO_*": "gloo",
            "TORCH_NCCL_*": "torch's process group of NCCL and RCCL",
            "TORCH_FR_*": "torch's flight recorder of collectives",
            "PYTORCH_*": "torch's allocator",
            "HSA_*": "ROCm's runtime",
        },
    ),
    (
        CONFIG,
        LIBRARY,
        {
            "CUDA_*": "CUDA",
            "HIP_*": "HIP",
            "GPU_MAX_*": "queues of HIP",
        },
    ),
    (
        CONFIG,
        LIBRARY | Use.KERNELS,
        {
            "TORCH_*": "torch",
            "CUBLAS*": "cuBLAS and cuBLASLt",
            "CUDNN_*": "cuDNN",
            "NVTE_*": "Transformer Engine",
            "AITER_*": "AITER",
            "TRITON_*": "Triton",
            "FLASH_ATTENTION_*": "FlashAttention",
            "QUACK_*": "QuACK",
        },
    ),
    (
        CONFIG,
        TUNING,  # a container has CPUs and an allocator of its own
        {
            "TORCHINDUCTOR_*": "torch's compiler",
            "OMP_*": "OpenMP",
            "MALLOC_*": "glibc's allocator",
        },
    ),
    (
        "launcher",
        Use.NONE,
        {
            "CACHE_CLEARED": "how the page cache was cleared before the run; the source of the"
            " log's `cache_clear`",
            "LAUNCH_RUN_DIR": "the run's directory; marks every process of a run, so that all can"
            " be ended",
            "TORCH_CPP_LOG_LEVEL": "`FATAL` during the import of torch for the rendezvous between"
            " nodes",
            "TORCH_SYMM_MEM_DISABLE_MULTICAST": "`1`: copy engines do not need NVLink multicast",
        },
    ),
    (
        "torchrun",
        Use.NONE,
        {
            "RANK": "number of this process among all",
            "WORLD_SIZE": "number of processes",
            "LOCAL_RANK": "number of this process on its node",
            "LOCAL_WORLD_SIZE": "number of processes on this node",
            "TORCHELASTIC_RUN_ID": "present if torchrun started this process",
        },
    ),
    (
        "Slurm",
        Use.NONE,
        {
            "SLURM_JOB_ID": "number of the job, which determines the port of the rendezvous",
            "SLURM_JOB_NODELIST": "nodes of the job; the first one is MASTER_ADDR",
            "SLURM_NODEID": "number of this node",
            "SLURM_STEP_NUM_NODES": "nodes that srun started together: without DGXSYSTEM, those of"
            " the config",
            "SLURM_SUBMIT_DIR": "directory from which the job was submitted: the checkout",
        },
    ),
)
# Ends of the names behind a prefix whose values belong to one host. Files, folders, and versions of
# libraries, which images set:
PATH = re.compile(r"_(\w*FILE(NAME)?|\w*DIR(ECTORY)?|\w*PATH|HOME|(?<!GFX_)VERSION)$")
# Network interfaces, and what is printed:
OF_ONE_NODE = re.compile(r"_(\w*IFNAME|IB_HCA|HOSTID|COMM_ID|VISIBLE_DEVICES|DEBUG\w*)$")
# Values that seem to be a path or an address of the host.
PRIVATE = re.compile(r"[/\\~@]|\d+\.\d+\.\d+\.\d+")
SECRET = re.compile(r"(^|_)(TOKEN|KEY|SECRET|PASSWORD|CREDENTIALS?)(_|$)")


@dataclass(frozen=True)
class Variable:
    """An entry of the table: a variable that the project reads, or a prefix."""

    name: str
    set_by: str
    use: Use
    meaning: str

    @property
    def is_prefix(self) -> bool:
        """Whether the entry stands for all variables whose names begin with it."""
        return self.name.endswith("*")


TABLE = {
    name: Variable(name, set_by, use, meaning)
    for set_by, use, entries in DECLARED
    for name, meaning in entries.items()
}


def find(name: str) -> Variable | None:
    """Return the entry of the variable `name`: its own, or of its prefix. None if unknown."""
    if name in TABLE:
        return TABLE[name]
    for variable in TABLE.values():
        if variable.is_prefix and name.startswith(variable.name[:-1]):
            return variable
    return None


def use_of(name: str) -> Use:
    """Return how the variable `name` is used, NONE if it is unknown or seems to hold a secret."""
    variable = find(name)
    if variable is None or SECRET.search(name):
        return Use.NONE
    use = variable.use
    if variable.is_prefix and PATH.search(name):
        use &= ~(Use.COMPARED | Use.PACKAGED)
        if Use.PATHS not in use:
            use &= ~(HANDED | Use.NODES | Use.KERNELS)
    elif variable.is_prefix and OF_ONE_NODE.search(name):
        use &= ~(Use.COMPARED | Use.PACKAGED)
    return use


def select(use: Use, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `environment` that have this use, sorted. Empty ones are left out."""
    return {
        name: value for name, value in sorted(environment.items()) if value and use in use_of(name)
    }


def packaged(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a submission exports, without paths and addresses of the host."""
    variables = select(Use.PACKAGED, environment)
    return {name: value for name, value in variables.items() if not PRIVATE.search(value)}


if __name__ == "__main__":
    print("\n".join(select(Use[sys.argv[1]], os.environ)))
