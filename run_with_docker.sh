#!/usr/bin/env bash
# ./run_and_time.sh in a container, with Docker or rootless Podman: ./run_with_docker.sh BENCHMARK [COMMAND] [OPTIONS] [--print]
# --print shows the command and starts nothing. docs/clusters.md says more.
#   CONT              the image; default llama-training, as built by the Dockerfile
#   CONTAINER_ENGINE  docker or podman; default: the one that is installed, docker first
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
    engine=$(basename -- "$(type -P docker || type -P podman || true)")
    [[ -n $engine ]] || fail 'no container engine' 'neither docker nor podman is on PATH' 'install one, or use ./run_and_time.sh'
fi
vendor=${GPU_VENDOR:-}
if [[ -z $vendor ]]; then
    vendor=none
    [[ ! -e /dev/nvidiactl ]] || vendor=nvidia
    [[ ! -e /dev/kfd ]] || vendor=amd
fi

name=llama-training-$(id -u)-$$-$(date +%s) # unique: only this container is stopped and removed below
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
case $engine in
    docker) options+=("--user=$(id -u):$(id -g)") ;;
    podman) options+=(--userns=keep-id --security-opt=label=disable) ;; # the label: SELinux would hide devices and mounts
    *) fail "CONTAINER_ENGINE=$engine" 'only docker and podman are known' 'set it to one of them, or unset it' ;;
esac

# The GPUs, and no other device of the host.
groups_of() { # numbers, because a name may mean another group in the image; names where this machine has no such device
    local path
    for path in /dev/kfd /dev/dri/renderD*; do
        if [[ -e $path ]]; then stat -c %g "$path"; fi
    done | sort -un
}
case $vendor in
    amd)
        options+=(--device=/dev/kfd --device=/dev/dri) # compute and render nodes; groups decide who may open them
        if [[ $engine == podman ]]; then
            options+=(--group-add=keep-groups) # rootless: only the groups that the caller is in, with crun
        else
            mapfile -t groups < <(groups_of)
            [[ ${#groups[@]} -gt 0 ]] || groups=(video render)
            options+=("${groups[@]/#/--group-add=}")
        fi
        ;;
    nvidia)
        if [[ $engine == podman ]]; then
            options+=(--device=nvidia.com/gpu=all) # CDI, by `nvidia-ctk cdi generate`
        else
            options+=(--gpus=all)
        fi
        ;;
    none) ;;
    *) fail "GPU_VENDOR=$vendor" 'known are amd, nvidia and none' 'correct or unset it' ;;
esac

# One node needs no network but its own loopback, which the engine's default has. Several: the host's, and its InfiniBand cards.
if [[ -n ${MASTER_ADDR:-} ]]; then
    options+=(--network=host)
    [[ ! -e /dev/infiniband ]] || options+=(--device=/dev/infiniband)
fi

read -r -a more <<< "${CONTAINER_OPTIONS:-}"
# The ranks' collectives go through shared memory; the default of 64 MB ends in a bus error. Podman refuses a size beside the host's own.
[[ " ${more[*]-} " == *' --ipc'* ]] || options+=(--shm-size=16g)
options+=(${more[@]+"${more[@]}"})

# Mount directories under their own paths, so that paths in options, messages and the ledger are valid inside and outside.
mount() { # directory, ro or rw
    local path
    path=$(absolute "$1")
    [[ $path != / && $path != *[:,]* ]] || fail "cannot mount $path" 'it is the root, or has a colon or comma' 'choose another directory'
    [[ -n $print || -d $path ]] || fail "there is no directory $path" 'the engine would create it, empty and owned by root' 'make it, or correct the variable'
    options+=(--volume "$path:${3:-$path}:$2")
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
        export "${variable?}"
        options+=(--env "$variable")
    fi
done

command=("$engine" run "${options[@]}" "${CONT:-llama-training}" "${arguments[@]}")
if [[ -n $print ]]; then
    printf '%q ' "${command[@]}"
    echo
    exit 0
fi

# The client runs in a process group of its own, so that Ctrl-C reaches the container once, through `pass_on`.
printf 'container  %s, image %s, by %s\n' "$name" "${CONT:-llama-training}" "$engine" >&2
set -m
"${command[@]}" < /dev/null &
client=$!
set +m
# shellcheck disable=SC2329 # the traps call it
pass_on() { # before the container is there, there is only the client to stop
    "$engine" kill --signal "$1" "$name" > /dev/null 2>&1 || kill -s TERM "$client" 2> /dev/null || true
}
trap 'pass_on INT' INT
trap 'pass_on TERM' TERM
trap 'pass_on HUP' HUP
trap '"$engine" rm --force "$name" > /dev/null 2>&1 || true' EXIT
while kill -0 "$client" 2> /dev/null; do # a signal interrupts `wait`, not the container
    wait "$client" || true
done
code=0
wait "$client" || code=$? # bash keeps the status of a client that has ended, also of one that ended before the loop
exit "$code"
