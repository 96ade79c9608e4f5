# The environment of a run and the code, on top of a base image with torch and the GPU's libraries.
# Nothing is cloned, compiled or patched, unless AITER is asked for.
#
# For AMD GPUs (ROCm):
#   docker build -t llama-training .
# With AITER's attention, which is faster (docs/engines.md). Nobody has reported such a build yet:
#   docker build -t llama-training --build-arg AITER=v0.1.14.post1 .
# For NVIDIA GPUs (CUDA):
#   docker build -t llama-training \
#       --build-arg BASE="$(sed -n 's/^# CUDA_BASE=//p' Dockerfile)" .
#
# The bases are pinned by digest, since a tag can be moved. The CUDA base is a "devel" image: Triton
# compiles its launchers with a C compiler at run time, and "runtime" images have none.
#
# For Arm (GB200, GB300) and for CUDA 13, there is no such image of pytorch, so torch comes from
# requirements.lock. This image was never built, and the digest of its base was not at hand. Pin the
# base before you rely on it:
#   docker build -t llama-training --build-arg TORCH=cuda \
#       --build-arg BASE="$(sed -n 's/^# CUDA_13_BASE=//p' Dockerfile)" .
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

# This includes .git, so that versions.json and the ledger name the commit. .dockerignore leaves out
# what git ignores, and git's own settings.
COPY . /workspace
WORKDIR /workspace

# Install as CI and run_and_time.sh do: .venv gets the packages that the base lacks, as pinned in
# requirements.lock, and uses those that the base has. So torch and triton are those of the base:
# PyPI's are built for CUDA, and its triton would replace ROCm's. The build fails if the base has no
# torch, or if .venv would use another torch or triton than the base's.
# With TORCH=cuda the base has no torch, and requirements.lock provides everything.
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN if [ "$TORCH" = cuda ]; then \
        apt-get update \
        && apt-get install -y --no-install-recommends gcc git python3-dev \
        && rm -rf /var/lib/apt/lists/* \
        && python3 -m launch.setup --for cuda \
        && git config --system --add safe.directory /workspace \
        && exit; \
    fi; \
    versions='import torch, triton; print(torch.__version__, torch.__file__, triton.__file__)' \
    && base_torch=$(python3 -c "$versions") \
    && python=$(python3 -m launch.environment requirements.txt) \
    && test "$base_torch" = "$("$python" -c "$versions")" \
    && git config --system --add safe.directory /workspace

# Compiled modules of AITER, which every user of the image can load. Without the argument the
# variable is empty, since a base image may bring an AITER with modules of its own.
ARG AITER=
ENV AITER_JIT_DIR=${AITER:+/opt/aiter}
RUN if [ -n "$AITER" ]; then \
        python=$(python3 -m launch.environment requirements.txt) \
        && launch/install_aiter.sh "$AITER" "$python"; \
    fi

# Any user may run the image. run_with_docker.sh runs it as the caller, who has no name and no home
# there, but torch asks for a user name, and caches of compiled kernels need a writable directory.
ENV HOME=/tmp USER=trainer
USER 1000:1000

ENTRYPOINT ["./run_and_time.sh"]
CMD ["--help"]
