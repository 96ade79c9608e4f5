"""Lint Dockerfile, run_with_docker.sh and run.sub, and test what they print for each GPU.

Neither a container engine nor Slurm is needed. A stand-in on PATH plays the engine to test signals,
exit codes, and that only the own container is stopped.
"""

import fnmatch
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml
from toy import wait_until

from common.paths import ROOT
from launch import cli

kubernetes_validate = pytest.importorskip("kubernetes_validate")

SCRIPTS = [
    "run_and_time.sh",
    "run_tests.sh",
    "run_with_docker.sh",
    "run.sub",
    "kubernetes_manifest.sh",
    "launch/install_aiter.sh",
    ".ci/run",
    *(path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/gpu/**/*.sh")),
]
KUBERNETES = "1.31"  # version of the schema
# Of the developer's environment. Other variables could reach the container.
KEPT = ("PATH", "HOME", "TMPDIR")


def tool(name: str) -> str:
    """A linter of requirements-test.txt, beside the Python that runs this."""
    path = shutil.which(
        name, path=os.pathsep.join((sysconfig.get_path("scripts"), os.environ["PATH"]))
    )
    assert path, f"{name} is missing: see requirements-test.txt"
    return path


@pytest.mark.parametrize("script", SCRIPTS)
def test_shell_scripts_are_clean(script):
    for command in (["bash", "-n"], [tool("shellcheck")]):
        done = subprocess.run([*command, script], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_shell_script_is_looked_at():
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    starts = {
        name: (ROOT / name).open("rb").readline() for name in tracked if (ROOT / name).is_file()
    }
    assert {
        name for name, line in starts.items() if line.startswith(b"#!") and b"bash" in line
    } <= set(SCRIPTS)


@pytest.mark.parametrize("option", ["-h", "--help"])
@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("run_with_docker.sh", ("--print", "CONTAINER_ENGINE")),
        ("kubernetes_manifest.sh", ("DGXSYSTEM", "JOB_NAME")),
        ("run.sub", ("sbatch -N", "LOGDIR")),
    ],
)
def test_help_needs_neither_an_engine_nor_variables(script, words, option):
    command = ["bash", str(ROOT / script), option]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr
    assert all(word in done.stdout for word in (f"{script} ", *words))
    assert "#" not in done.stdout.replace("    # print", ""), "neither code nor comment signs"
    assert not done.stdout.startswith("\n")


# --- the image ------------------------------------------------------------------------------------


def instructions() -> list[str]:
    lines = [
        line
        for line in (ROOT / "Dockerfile").read_text().splitlines()
        if not line.lstrip().startswith("#")
    ]
    return [line for line in "\n".join(lines).replace("\\\n", " ").splitlines() if line.strip()]


def test_the_dockerfile_is_clean():
    done = subprocess.run(
        [tool("hadolint"), "Dockerfile"], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def install_steps(text: str) -> list[str]:
    """Calls of launch.environment, and of anything else that could install."""
    steps = re.findall(r"python3 -m (launch\.environment) (\S+?)[) ]", text)
    return [" ".join(step) for step in steps] + re.findall(
        r"\b(?:pip3?|apt|apt-get|conda|curl|wget|uv|dpkg|make) (?:-\S+ )*\S+", text
    )


def test_the_image_is_built_by_the_steps_that_ci_runs():
    ci = (ROOT / ".ci/run").read_text()
    assert "./run_and_time.sh" in ci and not install_steps((ROOT / "run_and_time.sh").read_text())
    steps = install_steps("\n".join(instructions()))
    assert steps[0] == f"launch.environment {cli.ALL}" and {
        step.split()[0] for step in steps[1:]
    } <= {"apt-get", "launch.environment"}


def test_a_base_without_torch_gets_the_locked_one_only_where_it_is_asked_for():
    """Otherwise a base that lost ROCm's torch would get one for CUDA."""
    step, _ = [line for line in instructions() if line.startswith("RUN")]
    asked, _, otherwise = step.partition(" fi;")
    assert (
        'if [ "$TORCH" = cuda ]' in asked
        and "launch.setup --for cuda" in asked
        and "launch.setup" not in otherwise
    )
    assert "ARG TORCH=base" in instructions()
    base = re.search(
        r"^# CUDA_13_BASE=nvidia/cuda:13\.\S+-devel-\S+$",
        (ROOT / "Dockerfile").read_text(),
        re.MULTILINE,
    )
    assert base, "a devel image: Triton needs a C compiler"


STUB_GIT = """#!/bin/sh
for last; do :; done
[ "$FAIL" = fetch ] && exit 128
printf '[build-system]\\nrequires = ["ninja"]\\n' > "$last/pyproject.toml"
"""
STUB_PYTHON = """#!/bin/sh
case "$*" in
    "-m pip"*--requirement*) [ "$FAIL" != needs ] ;;
    "-m pip"*) [ "$FAIL" = package ] && exit 1; touch "$STATE/installed" ;;
    "-c import numpy"*) if [ "$FAIL" = keep ] && [ -e "$STATE/installed" ]; then echo 2; fi ;;
    "- "*module_fmha_v3_bwd) [ "$FAIL" != compile ] ;;
    "-c import torch, module_fmha_v3_fwd") [ "$FAIL" != load ] ;;
esac
"""


@pytest.mark.parametrize(
    ("fail", "words"),
    [
        ("", ""),
        ("fetch", "fetch the tag v9"),
        ("needs", "what AITER's build needs"),
        ("package", "install the package amd-aiter"),
        ("keep", "keep the image's numpy, torch and triton"),
        ("compile", "compile module_fmha_v3_bwd"),
        ("load", "load the compiled module_fmha_v3_fwd"),
    ],
)
def test_a_failed_step_of_aiter_ends_with_a_line_that_names_the_argument(tmp_path, fail, words):
    for name, script in (("git", STUB_GIT), ("python", STUB_PYTHON)):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    modules = tmp_path / "modules"
    done = subprocess.run(
        ["bash", str(ROOT / "launch/install_aiter.sh"), "v9", str(tmp_path / "python")],
        env=environment(
            PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
            AITER_JIT_DIR=modules,
            TMPDIR=tmp_path,
            STATE=tmp_path,
            FAIL=fail,
        ),
        capture_output=True,
        text=True,
    )
    assert (done.returncode != 0) == bool(fail), done.stderr
    assert not list(tmp_path.glob("tmp.*")), "the sources are removed"
    if fail:
        last = done.stderr.splitlines()[-1]
        assert last.startswith("error: --build-arg AITER=v9: could not") and words in last
    else:
        assert [path.name for path in modules.iterdir()] == ["build"]


def test_the_image_has_no_aiter_unless_it_is_asked_for():
    lines = instructions()
    assert "ARG AITER=" in lines and "ENV AITER_JIT_DIR=${AITER:+/opt/aiter}" in lines
    (step,) = [line for line in lines if "install_aiter" in line]
    assert step.startswith('RUN if [ -n "$AITER" ]')


def test_the_image_has_a_pinned_base_an_ordinary_user_and_nothing_foreign():
    text, lines = "\n".join(instructions()), instructions()
    assert lines[0].startswith("ARG BASE=rocm/pytorch:rocm") and lines[1] == "FROM ${BASE}"
    bases = [
        lines[0].partition("=")[2],
        *re.findall(r"^# CUDA_BASE=(.+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE),
    ]
    assert len(bases) == 2 and all(
        re.fullmatch(r"\S+:\S*\d+\.\d+\.\d+\S*@sha256:[0-9a-f]{64}", base) for base in bases
    )
    assert not re.search(
        r"clone|patch|chmod|sudo|token|secret|password|https?://", text, re.IGNORECASE
    )
    user = next(line.split()[1] for line in lines if line.startswith("USER"))
    assert int(user.partition(":")[0]) > 0 and lines.index(f"USER {user}") < next(
        i for i, line in enumerate(lines) if "ENTRYPOINT" in line
    )


def test_the_image_says_what_it_is_and_of_which_commit_and_base():
    labels = dict(
        re.findall(r'org\.opencontainers\.image\.([a-z.]+)="([^"]+)"', " ".join(instructions()))
    )
    assert labels.keys() == {"title", "description", "licenses", "revision", "base.name"}
    assert (labels["revision"], labels["base.name"], labels["licenses"]) == (
        "${REVISION}",
        "${BASE}",
        "Apache-2.0",
    )
    assert {f"ARG {labels['revision'][2:-1]}=unknown", "ARG BASE"} <= set(instructions())


def test_the_workflow_builds_the_image():
    job = (ROOT / ".github/workflows/ci.yml").read_text().partition("\n  image:")[2]
    for image_argument in re.findall(r"--build-arg ([A-Z]+)=", job):
        assert any(line.startswith(f"ARG {image_argument}") for line in instructions())
    assert "docker build -t llama-training" in job and "./run_with_docker.sh llama31_8b" in job
    pinned = dict(
        re.findall(r"^(torch|triton)==(\S+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    )
    assert dict(re.findall(r"(torch|triton)==([\d.]+)", job)) == pinned, "its base for CPUs"


def test_the_build_sees_what_git_tracks_and_nothing_it_ignores():
    patterns = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    ignored = {line for line in (ROOT / ".gitignore").read_text().splitlines() if line}
    assert ignored <= {pattern.removeprefix("**/") for pattern in patterns}
    assert {".git/config", ".git/hooks"} <= set(patterns), "may hold secrets, and programs"
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    hidden = [
        name
        for name in tracked
        for pattern in patterns
        if fnmatch.fnmatch(name, pattern.rstrip("/"))
        or any(fnmatch.fnmatch(f"{p}", pattern.rstrip("/")) for p in Path(name).parents)
    ]
    assert not hidden, "the image's commit would be called dirty"


# --- run_with_docker.sh ---------------------------------------------------------------------------


def environment(**variables) -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key in KEPT} | {
        key: str(value) for key, value in variables.items()
    }


def printed(*arguments, script="run_with_docker.sh", **variables) -> list[str]:
    command = ["bash", str(ROOT / script), "--print", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(**variables), cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout)


def container(vendor, engine, *arguments, **variables) -> list[str]:
    return printed(
        "llama31_8b", *arguments, GPU_VENDOR=vendor, CONTAINER_ENGINE=engine, **variables
    )


def devices(words):
    return [
        word for word in words if word.startswith(("--device", "--gpus", "--group-add", "--user"))
    ]


def test_more_options_reach_the_engine(tmp_path):
    """AMD's recipes need more options if RCCL cannot share memory between processes."""
    wanted = ["--cap-add=SYS_PTRACE", "--security-opt=seccomp=unconfined", "--ipc=host"]
    words = container("amd", "docker", CONTAINER_OPTIONS=" ".join(wanted))
    image = words.index("llama-training")
    assert [
        word for word in words[:image] if word in wanted
    ] == wanted and "--shm-size=16g" not in words
    words = container("amd", "podman", CONTAINER_OPTIONS=wanted[0])
    assert (
        wanted[0] in words
        and "--shm-size=16g" in words
        and words.index("--cap-drop=ALL") < words.index(wanted[0])
    )
    assert "--shm-size=16g" in container("amd", "docker") and "" not in container("amd", "docker")


def test_paths_are_resolved_without_gnu_tools(tmp_path):
    """A Mac's realpath knows no -m: there the script starts the miniature in a container."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "realpath").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin" / "realpath").chmod(0o755)
    (tmp_path / "real" / "logs").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    for logdir, found in (
        ("link/logs", "real/logs"),
        ("link/../link/new/er", "real/new/er"),
        ("new", "new"),
    ):
        words = container("none", "docker", LOGDIR=f"{tmp_path}/{logdir}", PATH=path)
        assert f"{tmp_path.resolve()}/{found}:{tmp_path.resolve()}/{found}:rw" in words


def test_amd_with_docker():
    words = devices(container("amd", "docker"))
    assert words[:3] == [
        f"--user={os.getuid()}:{os.getgid()}",
        "--device=/dev/kfd",
        "--device=/dev/dri",
    ]
    assert len(words) > 3 and all(word.startswith("--group-add=") for word in words[3:])
    if not Path("/dev/kfd").exists() and not list(Path("/dev").glob("dri/renderD*")):
        assert words[3:] == ["--group-add=video", "--group-add=render"]


def test_amd_with_rootless_podman():
    words = devices(container("amd", "podman"))
    assert words == [
        "--userns=keep-id",
        "--device=/dev/kfd",
        "--device=/dev/dri",
        "--group-add=keep-groups",
    ]


def test_nvidia():
    assert devices(container("nvidia", "docker")) == [
        f"--user={os.getuid()}:{os.getgid()}",
        "--gpus=all",
    ]
    assert devices(container("nvidia", "podman")) == [
        "--userns=keep-id",
        "--device=nvidia.com/gpu=all",
    ]


def test_without_a_gpu_no_device():
    assert devices(container("none", "podman")) == ["--userns=keep-id"]


@pytest.mark.parametrize("vendor", ["amd", "nvidia", "none"])
@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_no_more_rights_than_needed(vendor, engine):
    words = container(vendor, engine, MLPERF_SUBMISSION_ORG="Us", MASTER_ADDR="host7")
    assert {
        "--cap-drop=ALL",
        "--security-opt=no-new-privileges",
        "--shm-size=16g",
        "--ulimit=memlock=-1",
        "--rm",
        "--init",
    } <= set(words)
    assert not [
        word
        for word in words
        if re.search(r"privileged|unconfined|cap-add|SYS_|docker\.sock|--pid|--ipc|--uts", word)
    ]
    mounts = [words[i + 1] for i, word in enumerate(words) if word == "--volume"]
    assert mounts == [f"{ROOT}/results:{ROOT}/results:rw", f"{ROOT}/data:/workspace/data:rw"]
    assert "Us" not in words, "values are not for everybody's eyes"


def names_in(text: str) -> set[str]:
    return set(text.split())


# Variables that containers got before the table of common/variables.py, and one of each prefix.
IN_KUBERNETES = names_in(
    """
    SEED NEXP DATADIR MODEL LOGDIR DGXSYSTEM DGXNGPU GPU_KIND ATTENTION_ENGINE MATMUL_ENGINE
    SWIGLU_ENGINE ZERO_STREAM_PRIORITY ALLOW_KNOWN_ISSUES NO_COLOR RUN_QUIET OMP_WAIT_POLICY
    GPU_MAX_HW_QUEUES WANDB_PROJECT MLFLOW_EXPERIMENT_NAME MLFLOW_TRACKING_URI TRACKIO_PROJECT
    FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED MLPERF_SUBMISSION_ORG MLPERF_SUBMISSION_PLATFORM
    MLPERF_SUBMISSION_STATUS MLPERF_SUBMISSION_MISSPELLED NCCL_IB_HCA NCCL_SOCKET_IFNAME
    NCCL_TOPO_FILE NCCL_DEBUG RCCL_MSCCL_ENABLE GLOO_SOCKET_IFNAME TORCH_NCCL_TRACE_BUFFER_SIZE
    TORCH_NCCL_DEBUG_INFO_TEMP_FILE TORCH_FR_BUFFER_SIZE TORCH_ROCM_FA_PREFER_CK PYTORCH_ALLOC_CONF
    PYTORCH_TUNABLEOP_FILENAME HSA_NO_SCRATCH_RECLAIM HSA_TOOLS_PATH HSA_OVERRIDE_GFX_VERSION
    AMDGCN_USE_BUFFER_OPS HIPBLASLT_WORKSPACE_SIZE HIPBLASLT_TUNING_FILE NCCL_VERSION
    """
)
IN_DOCKER = IN_KUBERNETES | names_in(
    """
    CONT CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES MASTER_ADDR MASTER_PORT
    NODE_RANK
    """
)
NEW = names_in(
    """
    NVTE_FUSED_ATTN AITER_LOG_LEVEL TRITON_F32_DEFAULT HIP_FORCE_DEV_KERNARG QUACK_DEBUG
    CUDA_DEVICE_MAX_CONNECTIONS CUBLAS_WORKSPACE_CONFIG CUDNN_LOGLEVEL_DBG FLASH_ATTENTION_X
    TORCH_BLAS_PREFER_HIPBLASLT AITER_JIT_DIR
    """
)
# Of the host, of its container engine, secrets, and what nobody knows.
OF_THE_HOST = names_in(
    """
    CONTAINER_ENGINE CONTAINER_OPTIONS GPU_VENDOR JOB_NAME PATH LD_LIBRARY_PATH PYTHONPATH CC
    RDMA_RESOURCE
    PIP_FIND_LINKS PIP_INDEX_URL XDG_CACHE_HOME QUACK_CACHE_DIR CUDNN_HOME TRITON_CACHE_DIR
    FLASH_ATTENTION_CUTE_DSL_CACHE_DIR CUDA_HOME CUDA_PATH HIP_PATH TORCH_HOME CUDA_VERSION
    TORCHINDUCTOR_CACHE_DIR HF_TOKEN WANDB_API_KEY TRITON_API_KEY NVTE_SECRET
    MY_NCCL_ALGO OMP_NUM_THREADS
    """
)


def settable(tmp_path, names) -> dict[str, str]:
    """A value for each name that the scripts accept. PATH and the engine keep theirs."""
    values = dict.fromkeys(names - {"PATH", "CONTAINER_ENGINE", "CONTAINER_OPTIONS"}, "1")
    values |= {name: str(tmp_path) for name in ("DATADIR", "MODEL", "LOGDIR")}
    return values | {"GPU_VENDOR": "amd", "DGXSYSTEM": "MI355X_1x8", "CONT": "image:1"}


def test_a_user_s_variables_reach_the_container(tmp_path):
    values = settable(tmp_path, IN_DOCKER | NEW | OF_THE_HOST)
    for empty in ({}, {"NCCL_IB_HCA": ""}):
        words = printed("llama31_8b", CONTAINER_ENGINE="docker", **values | empty)
        names = {words[i + 1] for i, word in enumerate(words) if word == "--env"}
        assert names == (IN_DOCKER | NEW) - empty.keys()


def test_a_user_s_variables_reach_the_pod(tmp_path):
    job = manifest(**settable(tmp_path, IN_DOCKER | NEW | OF_THE_HOST))
    (launcher,) = job["spec"]["template"]["spec"]["containers"]
    assert {each["name"] for each in launcher["env"]} == IN_KUBERNETES | NEW


@pytest.mark.parametrize("script", ["run_with_docker.sh", "kubernetes_manifest.sh"])
def test_a_host_without_python_is_told(script, tmp_path):
    (tmp_path / "python3").write_text("#!/bin/sh\nexit 127\n")
    (tmp_path / "python3").chmod(0o755)
    values = settable(tmp_path, IN_DOCKER) | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [str(ROOT / script), *(["--print"] * (script == "run_with_docker.sh")), "llama31_8b"],
        env=environment(**values, CONTAINER_ENGINE="docker"),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "") and "Python 3.8" in done.stderr


def test_print_behind_the_benchmark_is_that_of_the_launcher():
    assert container("amd", "docker", "--print")[-2:] == ["llama31_8b", "--print"]


def test_network_of_the_host_for_several_nodes_only():
    assert "--network=host" not in container("amd", "docker")
    assert "--network=host" in container("amd", "docker", MASTER_ADDR="host7", NODE_RANK="1")


def test_mounts_and_variables(tmp_path):
    places = {"DATADIR": tmp_path / "a b", "MODEL": tmp_path / "m", "LOGDIR": tmp_path / "out"}
    words = container(
        "amd",
        "docker",
        **places,
        NEXP=3,
        SEED=7,
        CONT="image:1",
        DGXSYSTEM="MI300X_1x8",
        HF_TOKEN="hf_secret",
    )
    mounts = [words[i + 1] for i, word in enumerate(words) if word == "--volume"]
    a, m, out = places.values()
    assert mounts == [f"{out}:{out}:rw", f"{a}:{a}:ro", f"{m}:{m}:ro"]
    names = [words[i + 1] for i, word in enumerate(words) if word == "--env"]
    assert {"SEED", "NEXP", "DATADIR", "MODEL", "LOGDIR", "DGXSYSTEM", "CONT"} <= set(
        names
    ) and "HF_TOKEN" not in names
    assert not [name for name in names if "=" in name]
    assert words[-2:] == ["image:1", "llama31_8b"]
    prepare = container("amd", "docker", "prepare", "verify", **places)
    assert (
        f"{a}:{a}:rw" in prepare
        and f"{m}:{m}:ro" in prepare
        and prepare[-3:] == ["llama31_8b", "prepare", "verify"]
    )


@pytest.mark.parametrize(("vendor", "option"), [("amd", "--rocm"), ("nvidia", "--nv")])
def test_apptainer(vendor, option, tmp_path):
    """Values of variables are not on the command line, and the paths are those of the host."""
    variables = {"DATADIR": tmp_path, "HF_TOKEN": "never-shown", "CONT": "image.sif"}
    words = container(vendor, "apptainer", **variables)
    assert words[:2] == ["apptainer", "exec"]
    assert option in words
    assert f"{tmp_path}:{tmp_path}:ro" in words
    assert words[-3:] == ["image.sif", "./run_and_time.sh", "llama31_8b"]
    assert not [word for word in words if "never-shown" in word]


def manifest(*arguments, **variables) -> dict:
    known = {"CONT": "registry/image:1", "DATADIR": "/data", "LOGDIR": "/out"} | variables
    done = subprocess.run(
        [str(ROOT / "kubernetes_manifest.sh"), "llama31_8b", *arguments],
        env=environment(**known),
        capture_output=True,
        text=True,
        check=True,
    )
    return yaml.safe_load(done.stdout)


def test_a_kubernetes_job_of_one_node():
    job = manifest("--set", 'env={A="b"}', DGXSYSTEM="H200_1x8", NEXP=10)
    kubernetes_validate.validate(job, KUBERNETES, strict=True)
    (launcher,) = job["spec"]["template"]["spec"]["containers"]
    assert launcher["args"] == ["llama31_8b", "--set", 'env={A="b"}']
    assert launcher["resources"]["limits"] == {"nvidia.com/gpu": 8}
    values = {each["name"]: each.get("value") for each in launcher["env"]}
    assert values == {"NEXP": "10", "DATADIR": "/data", "LOGDIR": "/out", "DGXSYSTEM": "H200_1x8"}
    read_only = {each["name"]: each.get("readOnly") for each in launcher["volumeMounts"]}
    assert read_only == {"shm": None, "datadir": True, "logdir": False}


def test_a_manifest_keeps_every_character_of_a_value():
    text = 'C:\\model "A"\nsecond line'
    job = manifest(DGXSYSTEM="H200_1x8", MLPERF_SUBMISSION_PLATFORM=text)
    (launcher,) = job["spec"]["template"]["spec"]["containers"]
    values = {each["name"]: each["value"] for each in launcher["env"]}
    assert values["MLPERF_SUBMISSION_PLATFORM"] == text


def test_a_kubernetes_job_set_of_two_nodes():
    job_set = manifest(DGXSYSTEM="MI355X_2x8")
    assert job_set["kind"] == "JobSet"
    (replicated,) = job_set["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"}}
    kubernetes_validate.validate(job | replicated["template"], KUBERNETES, strict=True)
    spec = replicated["template"]["spec"]
    assert (spec["completions"], spec["completionMode"]) == (2, "Indexed")
    (launcher,) = spec["template"]["spec"]["containers"]
    assert launcher["resources"]["limits"] == {"amd.com/gpu": 8}
    assert launcher["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    values = {each["name"]: each.get("value", each.get("valueFrom")) for each in launcher["env"]}
    assert values["MASTER_ADDR"] == "llama-training-node-0-0.llama-training"
    assert "job-completion-index" in str(values["NODE_RANK"])


def test_pods_of_several_nodes_get_rdma_and_may_lock_memory():
    for name, nodes in (("rdma/hca", 2), ("nvidia.com/hostdev", 4)):
        job_set = manifest(DGXSYSTEM=f"MI355X_{nodes}x8", RDMA_RESOURCE=f"{name}:8")
        (replicated,) = job_set["spec"]["replicatedJobs"]
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"}}
        kubernetes_validate.validate(job | replicated["template"], KUBERNETES, strict=True)
        (launcher,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
        assert launcher["resources"]["limits"] == {"amd.com/gpu": 8, name: 8}
        assert launcher["securityContext"] == {
            "runAsUser": 0,  # Linux takes added capabilities from other users
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]},
        }
    job = manifest(DGXSYSTEM="MI355X_1x8", RDMA_RESOURCE="rdma/hca:8")
    (launcher,) = job["spec"]["template"]["spec"]["containers"]
    assert launcher["resources"]["limits"] == {"amd.com/gpu": 8}
    assert "add" not in launcher["securityContext"]["capabilities"]


@pytest.mark.parametrize(
    "variables",
    [
        {"RDMA_RESOURCE": "rdma/hca", "DGXSYSTEM": "H200_2x8"},
        {"RDMA_RESOURCE": "rdma/hca:0", "DGXSYSTEM": "H200_2x8"},
        {"RDMA_RESOURCE": 'a"b:1', "DGXSYSTEM": "H200_2x8"},
        {"DGXSYSTEM": "H200"},
        {"CONT": ""},
        {"DATADIR": "data"},
        {"MODEL": "data/model"},
        {"GPU_VENDOR": "intel"},
    ],
)
def test_a_manifest_needs_its_facts(variables):
    known = {"CONT": "i", "DATADIR": "/d", "LOGDIR": "/o", "DGXSYSTEM": "H200_1x8"} | variables
    done = subprocess.run(
        [str(ROOT / "kubernetes_manifest.sh"), "llama31_8b"],
        env=environment(**known),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert next(iter(variables)) in done.stderr
    assert not done.stdout


def test_all_that_a_manifest_lacks_is_named_at_once():
    values = environment(MODEL="m", GPU_VENDOR="intel")
    script = str(ROOT / "kubernetes_manifest.sh")
    done = subprocess.run([script], env=values, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    lacking = ("benchmark", "DGXSYSTEM", "CONT", "DATADIR", "LOGDIR", "MODEL", "GPU_VENDOR")
    assert len(errors) == len(done.stderr.splitlines()) / 3 == len(lacking)
    assert all(word in line for word, line in zip(lacking, errors, strict=True))


@pytest.mark.parametrize(
    ("arguments", "variables", "words"),
    [
        ([], {}, "no benchmark"),
        (["llama31_8b"], {"GPU_VENDOR": "intel"}, "known are amd, nvidia"),
        (["llama31_8b"], {"CONTAINER_ENGINE": "lxc"}, "docker, podman and apptainer"),
        (["llama31_8b"], {"DATADIR": "/"}, "cannot mount /"),
        (["llama31_8b"], {"DATADIR": "/no/such/directory"}, "there is no directory"),
        (["llama31_8b"], {"LOGDIR": "/proc/no/such"}, "do:  set LOGDIR"),
    ],
)
def test_what_cannot_be_run(tmp_path, arguments, variables, words):
    known = {"GPU_VENDOR": "none", "CONTAINER_ENGINE": "docker", "LOGDIR": tmp_path} | variables
    done = subprocess.run(
        [str(ROOT / "run_with_docker.sh"), *arguments],
        env=environment(**known),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and words in done.stderr and not done.stdout


def test_an_engine_that_is_not_installed_is_named(tmp_path):
    (tmp_path / "python3").symlink_to(sys.executable)
    for name in ("bash", "basename", "date", "dirname", "id", "mkdir", "readlink", "sort", "stat"):
        (tmp_path / name).symlink_to(shutil.which(name))
    known = {"GPU_VENDOR": "none", "CONTAINER_ENGINE": "podman", "LOGDIR": tmp_path / "out"}
    done = subprocess.run(
        [shutil.which("bash"), str(ROOT / "run_with_docker.sh"), "llama31_8b"],
        env=environment(**known, PATH=tmp_path),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "podman is not installed" in done.stderr


ENGINE = """#!/usr/bin/env bash
echo "$*" >> "$PLAY/calls"
case $1 in
    run)
        if [[ -n ${CODE:-} ]]; then echo out; echo err >&2; exit "$CODE"; fi
        setsid bash -c '
            trap "exit 42" TERM
            trap "exit 43" INT
            trap "exit 44" USR1
            echo $$ > "$PLAY/pid"
            while :; do sleep 0.05; done'
        exit $?
        ;;
    kill) kill -s "$3" "$(cat "$PLAY/pid")" ;;
esac
"""


def engine(tmp_path, **variables) -> subprocess.Popen:
    """Stand-in for docker whose container waits for a signal, or ends at once with CODE."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/docker").write_text(ENGINE)
    (tmp_path / "bin/docker").chmod(0o755)
    (tmp_path / "data").mkdir()
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    places = {
        "DATADIR": tmp_path / "data",
        "LOGDIR": tmp_path / "out",
        "PLAY": tmp_path,
        "GPU_VENDOR": "none",
        "PATH": path,
    }
    command = [str(ROOT / "run_with_docker.sh"), "llama31_8b"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        command, env=environment(**places, **variables), start_new_session=True, **pipes
    )


def calls(tmp_path) -> list[list[str]]:
    return [line.split() for line in (tmp_path / "calls").read_text().splitlines()]


def test_exit_code_and_streams_are_those_of_the_container(tmp_path):
    process = engine(tmp_path, CODE=20)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (20, "out\n") and "err" in err
    run, remove = calls(tmp_path)
    assert remove == ["rm", "--force", run[run.index("--name") + 1]], (
        "its own container, and only this one"
    )


@pytest.mark.parametrize(
    ("number", "name", "code"),
    [(signal.SIGTERM, "TERM", 42), (signal.SIGINT, "INT", 43), (signal.SIGUSR1, "USR1", 44)],
)
def test_signals_reach_the_container_once(tmp_path, number, name, code):
    process = engine(tmp_path)
    wait_until((tmp_path / "pid").exists)
    os.killpg(process.pid, number)  # as Ctrl-C does: all that stand in the foreground
    process.communicate(timeout=20)
    assert process.returncode == code
    own = calls(tmp_path)[0][calls(tmp_path)[0].index("--name") + 1]
    assert calls(tmp_path)[1:] == [["kill", "--signal", name, own], ["rm", "--force", own]]


# --- run.sub --------------------------------------------------------------------------------------


def test_slurm_without_a_container():
    words = printed("llama31_8b", "--max-failures", "1", script="run.sub")
    assert words[:2] == ["MASTER_ADDR=FIRST_HOST", "MASTER_PORT=29500"]
    assert words[3:] == [
        "srun",
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=1",
        f"--chdir={ROOT}",
        "./run_and_time.sh",
        "llama31_8b",
        "--max-failures",
        "1",
    ]


def test_slurm_with_an_image(tmp_path):
    words = printed(
        "llama31_8b",
        script="run.sub",
        CONT="/images/x.sqsh",
        DATADIR="/d",
        MODEL="/m",
        LOGDIR=tmp_path,
    )
    assert "--container-image=/images/x.sqsh" in words and "--container-workdir=/workspace" in words
    assert (
        f"--container-mounts={tmp_path}:{tmp_path},/d:/d:ro,/m:/m:ro" in words
        and "--no-container-mount-home" in words
    )


SRUN = 'echo "$MASTER_ADDR $MASTER_PORT $* NODE_RANK=$NODE_RANK"; exit 14'


def slurm(tmp_path, *arguments, srun=SRUN):
    """run.sub within a job of two nodes, with stand-ins for Slurm's commands."""
    for name, text in {
        "scontrol": "printf 'n07\\nn11\\n'",
        "srun": srun,
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    job = {
        "SLURM_JOB_ID": 12345,
        "SLURM_JOB_NODELIST": "n[07,11]",
        "SLURM_SUBMIT_DIR": ROOT,
        "LOGDIR": tmp_path,
        "NODE_RANK": 0,  # left from a start by hand
    }
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", str(ROOT / "run.sub"), *arguments],
        env=environment(**job, PATH=path),
        capture_output=True,
        text=True,
    )


def test_the_first_host_is_node_0_and_the_exit_code_is_sruns(tmp_path):
    done = slurm(tmp_path, "llama31_8b")
    assert done.returncode == 14 and done.stdout.startswith("n07 30190 --ntasks-per-node=1"), (
        done.stderr
    )
    assert done.stdout.endswith("NODE_RANK=\n"), "else all nodes would be node 0"


def test_the_signal_before_the_time_limit_reaches_srun(tmp_path):
    text = (ROOT / "run.sub").read_text()
    assert "#SBATCH --signal=B:USR1@" in text, "B: only the batch shell gets it"
    done = slurm(tmp_path, "llama31_8b", srun="echo $PPID")
    assert done.stdout.split() == [str(os.getpid())], "srun must have taken the shell's place"


def test_slurm_needs_a_job(tmp_path):
    command = ["bash", str(ROOT / "run.sub"), "llama31_8b"]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "not in a Slurm job" in done.stderr
    done = subprocess.run(command, env=environment(), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "run_and_time.sh" in done.stderr
