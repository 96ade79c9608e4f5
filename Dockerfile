# The environment of a run and the code, on top of a base image that brings torch and the GPU's libraries. Nothing is cloned,
# compiled or patched.
#
#   docker build -t llama-training .                                                                   AMD (ROCm)
#   docker build -t llama-training --build-arg BASE="$(sed -n 's/^# CUDA_BASE=//p' Dockerfile)" .      NVIDIA (CUDA)
#
# The bases are pinned by digest, since a tag can be moved. The CUDA base is a "devel" one: Triton compiles its launchers with a C compiler
# at run time, and the "runtime" images have none.
# On Arm (GB200, GB300), and for CUDA 13, there is no such image of pytorch; torch then comes from requirements.lock. Never built; its digest
# was not at hand, so pin it before you rely on it:
#   docker build -t llama-training --build-arg TORCH=cuda --build-arg BASE="$(sed -n 's/^# CUDA_13_BASE=//p' Dockerfile)" .
# CUDA_13_BASE=nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04
# CUDA_BASE=pytorch/pytorch:2.11.0-cuda12.8-cudnn9-devel@sha256:53ab3de62f6101d1e42f9be28623ab7a468a24c070d632f211ed576e30b6abd3
ARG BASE=rocm/pytorch:rocm7.2.4_ubuntu24.04_py3.12_pytorch_release_2.10.0@sha256:4449f856653602317e4101a76fce599c7fcd58ccec2e539951fce5f73083179e
FROM ${BASE}

ARG BASE
ARG TORCH=base
ARG REVISION=unknown
LABEL org.opencontainers.image.title="llama-training" \
      org.opencontainers.image.description="MLPerf Training llama31_8b and llama2_70b_lora on PyTorch and Triton" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE}"

# With .git, so that versions.json and the ledger name the commit; .dockerignore keeps out what git ignores, and git's own settings.
COPY . /workspace
WORKDIR /workspace

# The step that CI and run_and_time.sh do: what the base lacks goes, as requirements.lock pins it, into .venv, and what it has is seen through. So torch and
# triton are those of the base: PyPI's are built for CUDA, and its triton would replace ROCm's. The build fails if the base has no
# torch, or if another one than the base's would be used.
# With TORCH=cuda the base has none, and all comes from the lock.
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN if [ "$TORCH" = cuda ]; then \
        apt-get update && apt-get install -y --no-install-recommends gcc git python3-dev && rm -rf /var/lib/apt/lists/* \
        && python3 -m launch.setup --for cuda && git config --system --add safe.directory /workspace && exit; \
    fi; \
    base_torch=$(python3 -c 'import torch, triton; print(torch.__version__, torch.__file__, triton.__file__)') \
    && python=$(python3 -m launch.environment requirements.txt) \
    && test "$base_torch" = "$("$python" -c 'import torch, triton; print(torch.__version__, torch.__file__, triton.__file__)')" \
    && git config --system --add safe.directory /workspace

# Any user may run it (run_with_docker.sh takes the caller's number, which has no name and no home in here): caches of compiled kernels
# go to /tmp, and torch asks for a user name.
ENV HOME=/tmp USER=trainer
USER 1000:1000

ENTRYPOINT ["./run_and_time.sh"]
CMD ["--help"]
