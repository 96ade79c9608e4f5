#!/usr/bin/env bash
# The command line: ./run_and_time.sh BENCHMARK [COMMAND] [OPTIONS]. --help lists the commands.
# Needs Linux, bash, python3 >= 3.11 and git. Uses the current Python if it has the packages of
# requirements.txt, otherwise .venv. --help and --version need no package and no network.
set -euo pipefail

fail() { # exit code, what, why, what to do
    printf 'error: %s\n  why: %s\n  do:  %s\n' "${@:2}" >&2
    exit "$1"
}

system=$(uname -s)
if [[ $system != Linux ]]; then
    container="docker run --rm -it -v \"\$PWD:/llama\" -w /llama python:3.12"
    case $system in
        Darwin) do="run it in a Linux container: $container ./run_and_time.sh llama31_8b" ;;
        *) do='on Windows, install WSL 2 (wsl --install), and run it there' ;;
    esac
    fail 18 "$system is not supported" 'the launcher needs /proc and the page cache of Linux' "$do"
fi
root=$(cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd -P)
if [[ $root == *:* ]]; then
    fail 2 "the path of this project contains a colon: $root" \
        'PYTHONPATH, which names it, separates paths by colons' \
        'move the project to a path without a colon'
fi
if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    fail 18 'no python3 of version 3.11 or newer' \
        "found: $(python3 --version 2>&1 || true)" \
        'install one and put it first on PATH'
fi
# If a stream is closed, the next file that is opened would take its number and get the output.
[[ -e /proc/self/fd/1 ]] || exec >/dev/null
[[ -e /proc/self/fd/2 ]] || exec 2>/dev/null
# An empty path would be the current directory. Files are UTF-8 in every locale.
path=$root:${PYTHONPATH:-}
while [[ $path == *::* || $path == *: ]]; do
    path=${path//::/:}
    path=${path%:}
done
export PYTHONPATH=$path PYTHONUTF8=1
# -P: the current directory cannot hide a module. exec: a signal to this process also ends pip.
exec python3 -P -m launch --install "$@"
