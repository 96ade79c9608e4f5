"""Test the table of environment variables, and what a run and the nodes take from it."""

import ast

import pytest

from common import variables
from common.benchmarks import load_all, names
from common.engines import VARIABLES
from common.paths import ROOT
from common.variables import TUNING, Use, select, use_of

pytestmark = pytest.mark.quick


def names_in(text: str) -> list[str]:
    return text.split()


def test_the_table_can_be_read_where_no_package_is_installed():
    """On the host of a container: by an older Python, without the project's modules."""
    source = (ROOT / "common/variables.py").read_text()
    tree = ast.parse(source, feature_version=(3, 8))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"__future__", "collections.abc", "dataclasses", "enum"}


def test_what_changes_kernels_or_transport_is_compared_and_packaged():
    of_all = names_in(
        """
        AITER_LOG_LEVEL AMDGCN_USE_BUFFER_OPS CUBLASLT_LOG_LEVEL CUDA_DEVICE_MAX_CONNECTIONS
        FLASH_ATTENTION_X GPU_MAX_HW_QUEUES HIPBLASLT_WORKSPACE_SIZE HIP_FORCE_DEV_KERNARG
        HSA_NO_SCRATCH_RECLAIM HSA_OVERRIDE_GFX_VERSION NCCL_ALGO NCCL_IB_PKEY NVTE_FUSED_ATTN
        OMP_NUM_THREADS PYTORCH_CUDA_ALLOC_CONF QUACK_X RCCL_MSCCL_ENABLE TORCH_NCCL_BLOCKING_WAIT
        TORCH_BLAS_PREFER_HIPBLASLT TRITON_F32_DEFAULT ZERO_STREAM_PRIORITY
    """
    )
    assert all(TUNING in use_of(name) for name in of_all)
    assert list(select(Use.COMPARED, dict.fromkeys(reversed(of_all), "1"))) == sorted(of_all)


@pytest.mark.parametrize(
    "name",
    names_in(
        """
    NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME NCCL_IB_HCA NCCL_HOSTID NCCL_DEBUG NCCL_DEBUG_SUBSYS
    NCCL_DEBUG_FILE NCCL_TOPO_FILE CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES TRITON_CACHE_DIR
    TORCHINDUCTOR_CACHE_DIR PYTORCH_TUNABLEOP_FILENAME CUDA_HOME CUDA_VERSION LD_LIBRARY_PATH
    CUDA_MPS_PIPE_DIRECTORY HSA_TOOLS_PATH PYTHONPATH
    """
    ),
)
def test_what_belongs_to_one_host_is_recorded_only(name):
    assert use_of(name) & TUNING == Use.RECORDED


def test_variables_of_libraries_of_kernels_time_the_engines_again():
    libraries = names_in(
        """
        AITER_X AMDGCN_USE_BUFFER_OPS CUBLAS_WORKSPACE_CONFIG HIPBLASLT_TUNING_FILE NVTE_FUSED_ATTN
        PYTORCH_TUNABLEOP_FILENAME TORCH_BLAS_PREFER_HIPBLASLT TORCH_ROCM_FA_PREFER_CK TRITON_X
        """
    )
    others = names_in("NCCL_ALGO PYTORCH_ALLOC_CONF TRITON_CACHE_DIR AITER_JIT_DIR DATADIR SEED")
    assert [*select(Use.KERNELS, dict.fromkeys(libraries + others, "1"))] == libraries


@pytest.mark.parametrize(
    "name",
    names_in(
        """
    HF_TOKEN WANDB_API_KEY PIP_INDEX_URL MLFLOW_TRACKING_URI TRITON_API_KEY NCCL_AUTH_TOKEN
    CUDA_PASSWORD AWS_SECRET_ACCESS_KEY HOME MY_NCCL_ALGO NCCLX DATADIR
    """
    ),
)
def test_secrets_and_unknown_variables_are_not_recorded(name):
    assert not use_of(name) & TUNING


def test_paths_and_addresses_of_the_host_are_not_packaged():
    public = {"NCCL_ALGO": "^LL128;Ring:tree", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    private = {
        "NCCL_TUNER_PLUGIN": "/home/jane/x.so",
        "NCCL_CONF": "~/nccl.conf",
        "NVTE_X": "s3://bucket",
        "NCCL_COMM_IP": "10.0.0.1",
        "TORCH_X": "jane@host",
        "NCCL_SOCKET_IFNAME": "eth0",
        "HF_TOKEN": "secret",
    }
    assert variables.packaged(public | private) == public


def test_each_variable_of_a_config_is_recorded_and_packaged():
    used = {
        name
        for benchmark in names()
        for config in load_all(ROOT, benchmark).values()
        for name in config.env
    }
    assert "NCCL_NVLS_ENABLE" in used
    assert [name for name in used if TUNING not in use_of(name)] == []


def test_pins_of_engines_are_recorded():
    assert {*select(Use.RECORDED, dict.fromkeys(VARIABLES.values(), "sdpa"))} == {
        *VARIABLES.values()
    }


def test_the_entry_of_a_name_is_its_own_before_its_prefix():
    assert variables.find("TORCH_CPP_LOG_LEVEL").set_by == "launcher"
    assert variables.find("TORCH_NCCL_X").name == "TORCH_NCCL_*"
    assert variables.find("TORCH_X").name == "TORCH_*"
    assert variables.find("DATADIRS") is None
