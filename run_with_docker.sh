#!/usr/bin/env bash
# ./run_and_time.sh in a container of Docker, rootless Podman or Apptainer: ./run_with_docker.sh BENCHMARK [COMMAND] [OPTIONS] [--print]
# --print shows the command and starts nothing. docs/clusters.md says more.
#   CONT              image (default: llama-training, as built by the Dockerfile; for Apptainer llama-training.sif)
#   CONTAINER_ENGINE  docker, podman or apptainer (default: the first one that is installed)
#   GPU_VENDOR        amd, nvidia or none; default: what /dev shows
#   CONTAINER_OPTIONS more options of the engine, separated by blanks, such as --cap-add=SYS_PTRACE
set -euo pipefail
root=$(cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd -P)

fail() { # what, why, what to do
    printf 'error: %s\n  why: %s\n  do:  %s\n' "$@" >&2
    exit 2
}

absolute() { # as `realpath -m` of GNU, which a Mac lacks: links resolved in the part of a path that exists
    local path=$1 rest=
    while [[ ! -d $path ]]; do
        rest=/$(basename -- "$path")$rest
        path=$(dirname -- "$path")
    done
    path=$(cd -- "$path" && pwd -P)
    path=${path%/}$rest
    printf '%s\n' "${path:-/}"
}

print=
arguments=()
for argument in "$@"; do
    if [[ $argument == --print ]]; then print=yes; else arguments+=("$argument"); fi
done
[[ ${#arguments[@]} -gt 0 ]] || fail 'no benchmark or command given' 'the container needs one to run' './run_with_docker.sh BENCHMARK [COMMAND] [OPTIONS] [--print]'

engine=${CONTAINER_ENGINE:-}
if [[ -z $engine ]]; then
    engine=$(basename -- "$(type -P docker || type -P podman || type -P apptainer || true)")
    [[ -n $engine ]] || fail 'no container engine' 'docker, podman and apptainer are not on PATH' 'install one, or use ./run_and_time.sh'
fi
vendor=${GPU_VENDOR:-}
if [[ -z $vendor ]]; then
    vendor=none
    [[ ! -e /dev/nvidiactl ]] || vendor=nvidia
    [[ ! -e /dev/kfd ]] || vendor=amd
fi

name=llama-training-$(id -u)-$$-$(date +%s) # unique: only this container is stopped and removed below

groups_of() { # numbers, because a name may mean another group in the image; names where this machine has no such device
    local path
    for path in /dev/kfd /dev/dri/renderD*; do
        if [[ -e $path ]]; then stat -c %g "$path"; fi
    done | sort -un
}

read -r -a more <<< "${CONTAINER_OPTIONS:-}"

docker_options() { # also those of Podman
    options=(
        --rm --name "$name"
        --init                 # a first process that passes on signals and reaps orphans
        --sig-proxy=false      # signals are passed on below, once; twice would mean "at once" to the launcher
        --cap-drop=ALL         # no privilege is needed, neither for the GPUs nor to drop the data from the page cache (per file, by advice)
        --security-opt=no-new-privileges
        --ulimit=memlock=-1    # pinned buffers, and memory that a network card reads
        --ulimit=stack=67108864 # 64 MB for compilers' and collectives' threads, as AMD and NVIDIA advise
    )
    # Results and kernels' caches belong to the caller, not to root.
    if [[ $engine == podman ]]; then
        options+=(--userns=keep-id --security-opt=label=disable) # the label: SELinux would hide devices and mounts
    else
        options+=("--user=$(id -u):$(id -g)")
    fi
    # The GPUs, and no other device of the host.
    case $vendor-$engine in
        amd-podman) options+=(--device=/dev/kfd --device=/dev/dri --group-add=keep-groups) ;; # rootless: the caller's groups, with crun
        amd-docker)
            options+=(--device=/dev/kfd --device=/dev/dri) # compute and render nodes; groups decide who may open them
            mapfile -t groups < <(groups_of)
            [[ ${#groups[@]} -gt 0 ]] || groups=(video render)
            options+=("${groups[@]/#/--group-add=}")
            ;;
        nvidia-podman) options+=(--device=nvidia.com/gpu=all) ;; # CDI, by `nvidia-ctk cdi generate`
        nvidia-docker) options+=(--gpus=all) ;;
    esac
    # One node needs no network but its own loopback, which the engine's default has. Several: the host's, and its InfiniBand cards.
    if [[ -n ${MASTER_ADDR:-} ]]; then
        options+=(--network=host)
        [[ ! -e /dev/infiniband ]] || options+=(--device=/dev/infiniband)
    fi
    # The ranks' collectives go through shared memory; the default of 64 MB ends in a bus error. Podman refuses a size beside the host's own.
    [[ " ${more[*]-} " == *' --ipc'* ]] || options+=(--shm-size=16g)
}

apptainer_options() { # it runs as the caller, with the host's devices, network, limits and shared memory
    options=(
        --cleanenv       # only the variables below
        --no-home
        --writable-tmpfs # what the image's code writes into the image is gone at the end
        --pwd /workspace
    )
    case $vendor in
        amd) options+=(--rocm) ;;
        nvidia) options+=(--nv) ;;
    esac
}

case $vendor in
    amd | nvidia | none) ;;
    *) fail "GPU_VENDOR=$vendor" 'known are amd, nvidia and none' 'correct or unset it' ;;
esac
case $engine in
    docker | podman) docker_options ;;
    apptainer) apptainer_options ;;
    *) fail "CONTAINER_ENGINE=$engine" 'known are docker, podman and apptainer' 'set it to one of them, or unset it' ;;
esac
options+=(${more[@]+"${more[@]}"})

# Mount directories under their own paths, so that paths in options, messages and the ledger are valid inside and outside.
mount() { # directory, ro or rw
    local path
    path=$(absolute "$1")
    [[ $path != / && $path != *[:,]* ]] || fail "cannot mount $path" 'it is the root, or has a colon or comma' 'choose another directory'
    [[ -n $print || -d $path ]] || fail "there is no directory $path" 'the engine would create it, empty and owned by root' 'make it, or correct the variable'
    if [[ $engine == apptainer ]]; then option=--bind; else option=--volume; fi
    options+=("$option" "$path:${3:-$path}:$2")
}
LOGDIR=$(absolute "${LOGDIR:-$root/results}")
export LOGDIR
[[ -n $print ]] || mkdir -p -- "$LOGDIR"
mount "$LOGDIR" rw
if [[ -n ${DATADIR:-} ]]; then
    DATADIR=$(absolute "$DATADIR")
    if [[ ${arguments[0]} == prepare || ${arguments[1]:-} == prepare ]]; then mount "$DATADIR" rw; else mount "$DATADIR" ro; fi
fi
if [[ -z ${DATADIR:-} || " ${arguments[*]} " == *' --miniature '* ]]; then
    [[ -n $print ]] || mkdir -p -- "$root/data"
    mount "$root/data" rw /workspace/data # the miniature builds its data here
fi
if [[ -n ${MODEL:-} ]]; then
    MODEL=$(absolute "$MODEL")
    mount "$MODEL" ro
fi

# These variables, by name only: a value on the command line could be read by every user of the host.
for variable in SEED NEXP DATADIR MODEL LOGDIR DGXSYSTEM DGXNGPU GPU_KIND CONT MLPERF_SUBMISSION_ORG MLPERF_SUBMISSION_PLATFORM \
    CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES MASTER_ADDR MASTER_PORT NODE_RANK \
    NCCL_DEBUG NCCL_IB_HCA NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME; do
    if [[ -n ${!variable:-} ]]; then
        if [[ $engine == apptainer ]]; then
            export "APPTAINERENV_$variable=${!variable}"
        else
            export "${variable?}"
            options+=(--env "$variable")
        fi
    fi
done

if [[ $engine == apptainer ]]; then
    image=${CONT:-llama-training.sif}
    command=(apptainer exec "${options[@]}" "$image" ./run_and_time.sh "${arguments[@]}")
else
    image=${CONT:-llama-training}
    command=("$engine" run "${options[@]}" "$image" "${arguments[@]}")
fi
if [[ -n $print ]]; then
    printf '%q ' "${command[@]}"
    echo
    exit 0
fi

# The client runs in a process group of its own, so that Ctrl-C reaches the container once, through `pass_on`.
printf 'container  %s, image %s, by %s\n' "$name" "$image" "$engine" >&2
set -m
"${command[@]}" < /dev/null &
client=$!
set +m
# shellcheck disable=SC2329 # the traps call it
pass_on() { # before the container is there, there is only the client to stop
    if [[ $engine == apptainer ]]; then # the container's first process is the client itself
        kill -s "$1" "$client" 2> /dev/null || true
    else
        "$engine" kill --signal "$1" "$name" > /dev/null 2>&1 || kill -s TERM "$client" 2> /dev/null || true
    fi
}
trap 'pass_on INT' INT
trap 'pass_on TERM' TERM
trap 'pass_on HUP' HUP
[[ $engine == apptainer ]] || trap '"$engine" rm --force "$name" > /dev/null 2>&1 || true' EXIT
while kill -0 "$client" 2> /dev/null; do # a signal interrupts `wait`, not the container
    wait "$client" || true
done
code=0
wait "$client" || code=$? # bash keeps the status of a client that has ended, also of one that ended before the loop
exit "$code"
