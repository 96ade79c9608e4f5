#!/usr/bin/env bash
# The command line: ./run_and_time.sh BENCHMARK [COMMAND] [OPTIONS]. --help lists the commands.
# Needs Linux, bash, python3 >= 3.11 and git. Uses the current Python if it has the packages of
# requirements.txt, otherwise .venv. --help and --version need no package and no network.
set -euo pipefail
system=$(uname -s)
if [[ $system != Linux ]]; then
    case $system in
        Darwin) do="in a Linux container: docker run --rm -it -v \"\$PWD:/llama\" -w /llama python:3.12 ./run_and_time.sh llama31_8b" ;;
        *) do='on Windows use WSL 2 (wsl --install), and start this inside it' ;;
    esac
    printf 'error: %s is not supported\n  why: the launcher needs /proc and the page cache of Linux\n  do:  %s\n' \
        "$system" "$do" >&2
    exit 18
fi
root=$(cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd -P)
if [[ $root == *:* ]]; then
    printf 'error: the path of this project has a colon: %s\n  why: PYTHONPATH, which names it, separates paths by colons\n  do:  %s\n' \
        "$root" 'move or clone it to a path without one' >&2
    exit 2
fi
if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    printf 'error: no python3 of version 3.11 or newer\n  why: found: %s\n  do:  install one and put it first on PATH\n' \
        "$(python3 --version 2>&1 || true)" >&2
    exit 18
fi
# If a stream is closed, the next file that is opened would take its place and get the output.
[[ -e /proc/self/fd/1 ]] || exec >/dev/null
[[ -e /proc/self/fd/2 ]] || exec 2>/dev/null
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
# -P: no folder of the caller hides a module. exec: a signal to this process also ends pip.
exec python3 -P -m launch --install "$@"
