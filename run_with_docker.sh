#!/usr/bin/env bash
# Run ./run_and_time.sh in a container of Docker, rootless Podman or Apptainer:
#
#   ./run_with_docker.sh [--print] BENCHMARK [COMMAND] [OPTIONS]
#
# --print before BENCHMARK prints the engine's command and starts nothing. Everything else is passed
# to ./run_and_time.sh, with the variables that docs/settings.md lists. See docs/clusters.md. Needs
# bash and Python 3.8 or newer.
#
#   CONT               image (default: llama-training, as built by the Dockerfile; for Apptainer
#                      llama-training.sif)
#   CONTAINER_ENGINE   docker, podman or apptainer (default: the first one that is installed)
#   GPU_VENDOR         amd, nvidia or none (default: by the devices in /dev)
#   CONTAINER_OPTIONS  more options of the engine, separated by blanks, such as
#                      --cap-add=SYS_PTRACE
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    # Print the comment at the top of this file.
    sed -n -e '1,/^set /s/^# //p' -e '1,/^set /s/^#$//p' "${BASH_SOURCE[0]}"
    exit 0
fi
root=$(cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd -P)

fail() { # what, why, what to do
    printf 'error: %s\n  why: %s\n  do:  %s\n' "$@" >&2
    exit 2
}

make_directory() { # directory, what to do if that fails
    local message
    message=$(mkdir -p -- "$1" 2>&1) || fail "cannot create $1" "$message" "$2"
}

# Print the absolute path, with links resolved in the part that exists, like GNU's `realpath -m`,
# which a Mac lacks.
absolute() { # path
    local path=${1/#\~\//$HOME/}
    local rest=
    while [[ ! -d $path ]]; do
        rest=/$(basename -- "$path")$rest
        path=$(dirname -- "$path")
    done
    path=$(cd -- "$path" && pwd -P)
    path=${path%/}$rest
    printf '%s\n' "${path:-/}"
}

print=
if [[ ${1:-} == --print ]]; then
    print=yes
    shift
fi
arguments=("$@")
if [[ ${#arguments[@]} -eq 0 ]]; then
    fail 'no benchmark or command given' 'the container needs one to run' \
        './run_with_docker.sh [--print] BENCHMARK [COMMAND] [OPTIONS]'
fi

engine=${CONTAINER_ENGINE:-}
if [[ -z $engine ]]; then
    engine=$(basename -- "$(type -P docker || type -P podman || type -P apptainer || true)")
    if [[ -z $engine ]]; then
        fail 'no container engine found' 'docker, podman and apptainer are not on PATH' \
            'install one of them, or use ./run_and_time.sh'
    fi
fi
vendor=${GPU_VENDOR:-}
if [[ -z $vendor ]]; then
    vendor=none
    [[ ! -e /dev/nvidiactl ]] || vendor=nvidia
    [[ ! -e /dev/kfd ]] || vendor=amd
fi

# A unique name, so that only this container is stopped and removed below.
name=llama-training-$(id -u)-$$-$(date +%s)

# The groups that own AMD's devices, as numbers, because a name may mean another group in the image.
groups_of_devices() {
    local path
    for path in /dev/kfd /dev/dri/renderD*; do
        if [[ -e $path ]]; then
            stat -c %g "$path"
        fi
    done | sort -un
}

read -r -a more <<< "${CONTAINER_OPTIONS:-}"

# Set `options` for Docker and Podman.
docker_options() {
    options=(
        --rm
        --name "$name"
        --init                 # a first process that passes on signals and reaps orphans
        # Signals are passed on below, once: a second one makes the launcher kill the ranks.
        --sig-proxy=false
        # Neither the GPUs nor clearing the page cache (per file, by advice) needs a privilege.
        --cap-drop=ALL
        --security-opt=no-new-privileges
        --ulimit=memlock=-1    # for pinned buffers, and memory that a network card reads
        # 64 MB for the threads of compilers and collectives, as AMD and NVIDIA advise.
        --ulimit=stack=67108864
    )
    # Results and caches of kernels belong to the caller, not to root.
    if [[ $engine == podman ]]; then
        options+=(--userns=keep-id)
        options+=(--security-opt=label=disable) # SELinux would hide devices and mounts
    else
        options+=("--user=$(id -u):$(id -g)")
    fi
    # The GPUs, and no other device of the host.
    case $vendor-$engine in
        amd-podman)
            # Rootless, with crun: keep the caller's groups.
            options+=(--device=/dev/kfd --device=/dev/dri --group-add=keep-groups)
            ;;
        amd-docker)
            # Compute and render nodes. Their groups decide who may open them.
            options+=(--device=/dev/kfd --device=/dev/dri)
            mapfile -t groups < <(groups_of_devices)
            # By name if this machine has no such device (--print).
            [[ ${#groups[@]} -gt 0 ]] || groups=(video render)
            options+=("${groups[@]/#/--group-add=}")
            ;;
        nvidia-podman)
            options+=(--device=nvidia.com/gpu=all) # CDI, by `nvidia-ctk cdi generate`
            ;;
        nvidia-docker)
            options+=(--gpus=all)
            ;;
    esac
    # One node needs only its own loopback interface, which the engine provides. Several nodes need
    # the host's network and its InfiniBand cards.
    if [[ -n ${MASTER_ADDR:-} ]]; then
        options+=(--network=host)
        [[ ! -e /dev/infiniband ]] || options+=(--device=/dev/infiniband)
    fi
    # The ranks' collectives use shared memory. The default of 64 MB leads to a bus error. Podman
    # refuses a size together with the host's own (--ipc).
    if [[ " ${more[*]-} " != *' --ipc'* ]]; then
        options+=(--shm-size=16g)
    fi
}

# Set `options` for Apptainer, which runs as the caller, with the host's devices, network, limits
# and shared memory.
apptainer_options() {
    options=(
        --cleanenv       # only the variables below
        --no-home
        --writable-tmpfs # what the code writes into the image is lost at the end
        --pwd /workspace
    )
    case $vendor in
        amd) options+=(--rocm) ;;
        nvidia) options+=(--nv) ;;
    esac
}

case $vendor in
    amd | nvidia | none) ;;
    *) fail "unknown GPU_VENDOR: $vendor" 'known are amd, nvidia and none' 'correct or unset it' ;;
esac
case $engine in
    docker | podman) docker_options ;;
    apptainer) apptainer_options ;;
    *)
        fail "unknown CONTAINER_ENGINE: $engine" 'known are docker, podman and apptainer' \
            'set it to one of them, or unset it'
        ;;
esac
options+=(${more[@]+"${more[@]}"})

# Mount a directory, by default under its own path, so that paths in options, messages and the
# ledger are valid inside and outside the container.
mount() { # directory, ro or rw, path in the container
    local path
    local option=--volume
    path=$(absolute "$1")
    if [[ $path == / || $path == *[:,]* ]]; then
        fail "cannot mount $path" 'it is the root, or contains a colon or comma' \
            'choose another directory'
    fi
    if [[ -z $print && ! -d $path ]]; then
        fail "there is no directory $path" \
            'the engine would create it, empty and owned by root' \
            'create it, or correct the variable'
    fi
    [[ $engine != apptainer ]] || option=--bind
    options+=("$option" "$path:${3:-$path}:$2")
}
LOGDIR=$(absolute "${LOGDIR:-$root/results}")
export LOGDIR
[[ -n $print ]] || make_directory "$LOGDIR" 'set LOGDIR to a directory that you can write'
mount "$LOGDIR" rw
if [[ -n ${DATADIR:-} ]]; then
    DATADIR=$(absolute "$DATADIR")
    if [[ ${arguments[0]} == prepare || ${arguments[1]:-} == prepare ]]; then
        mount "$DATADIR" rw
    else
        mount "$DATADIR" ro
    fi
fi
if [[ -z ${DATADIR:-} || " ${arguments[*]} " == *' --miniature '* ]]; then
    [[ -n $print ]] || make_directory "$root/data" "let this user write $root"
    mount "$root/data" rw /workspace/data # the miniature's data is built here
fi
if [[ -n ${MODEL:-} ]]; then
    MODEL=$(absolute "$MODEL")
    mount "$MODEL" ro
fi

passed=$(python3 -I "$root/common/variables.py" CONTAINER) ||
    fail 'cannot tell which variables the container needs' \
        'python3 could not run common/variables.py' \
        'install Python 3.8 or newer, and put it on PATH'
# Pass them by name only: every user of the host could read a value on the command line.
for variable in $passed; do
    if [[ $engine == apptainer ]]; then
        export "APPTAINERENV_$variable=${!variable}"
    else
        options+=(--env "$variable")
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

if ! type -P "${command[0]}" > /dev/null; then
    fail "$engine is not installed" 'CONTAINER_ENGINE names it, and it is not on PATH' \
        'install it, or unset CONTAINER_ENGINE to use the engine that is installed'
fi
# The client runs in a process group of its own, so that Ctrl-C reaches the container only once, by
# `pass_on`.
printf 'container  %s, image %s, by %s\n' "$name" "$image" "$engine" >&2
set -m
"${command[@]}" < /dev/null &
client=$!
set +m
# Before the container exists, only the client can be stopped. With Apptainer, the client is the
# container's first process.
# shellcheck disable=SC2329 # the traps call it
pass_on() {
    if [[ $engine == apptainer ]]; then
        kill -s "$1" "$client" 2> /dev/null || true
    else
        "$engine" kill --signal "$1" "$name" > /dev/null 2>&1 ||
            kill -s TERM "$client" 2> /dev/null || true
    fi
}
for signal in INT TERM HUP USR1 USR2 XCPU; do
    # shellcheck disable=SC2064 # expands now
    trap "pass_on $signal" "$signal"
done
if [[ $engine != apptainer ]]; then
    trap '"$engine" rm --force "$name" > /dev/null 2>&1 || true' EXIT
fi
while kill -0 "$client" 2> /dev/null; do # a signal interrupts `wait`, not the container
    wait "$client" || true
done
# bash keeps the exit status of a client that has ended, also before or during the loop.
code=0
wait "$client" || code=$?
exit "$code"
