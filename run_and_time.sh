#!/usr/bin/env bash
# The command line: ./run_and_time.sh BENCHMARK [COMMAND] [OPTIONS]. --help lists the commands.
# Needs Linux, bash, python3 >= 3.11 and git. Uses the current Python if it has the packages of
# requirements.txt, otherwise .venv. --help and --version need no package and no network.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # such as `sh run_and_time.sh`
if [[ ${BASH_SOURCE[0]:-$0} != "$0" ]]; then
    printf 'error: run_and_time.sh is a program\n  why: %s\n  do:  %s\n' \
        'sourced, it would end your shell' 'start it: ./run_and_time.sh --help' >&2
    return 2
fi
set -euo pipefail
trap 'exit 130' INT # whatever the exit code of the program that it interrupts

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
is_old='import sys; sys.exit(sys.version_info < (3, 11) and "found: " + sys.version)'
if ! problem=$(python3 -c "$is_old" 2>&1); then
    fail 18 'found no working python3 of version 3.11 or newer' "${problem%%$'\n'*}" \
        'correct this, or install one and put it first on PATH'
fi
# If a stream is closed, the next file that is opened would take its number and get the output.
# A closed stdout is replaced by one that cannot be written either.
[[ -e /proc/self/fd/1 ]] || exec 1</dev/null
[[ -e /proc/self/fd/2 ]] || exec 2>/dev/null
# An empty path would be the current directory. Files are UTF-8 in every locale.
path=$root:${PYTHONPATH:-}
while [[ $path == *::* || $path == *: ]]; do
    path=${path//::/:}
    path=${path%:}
done
export PYTHONPATH=$path PYTHONUTF8=1
# -P: the current directory cannot hide a module. exec: a signal to this process also ends pip.
# An older env cannot block signals: then a Ctrl-C while Python starts prints a traceback.
block=()
if env --block-signal=INT true 2>/dev/null; then
    block=(env --block-signal=INT)
fi
exec "${block[@]}" python3 -P -m launch.start launch --install "$@"
