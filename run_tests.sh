#!/usr/bin/env bash
# Run the tests, from any directory: ./run_tests.sh [arguments of pytest].
# Needs bash, python3 >= 3.11 and git.
set -euo pipefail
if [[ $(uname -s) != Linux ]]; then
    exec "$(dirname -- "${BASH_SOURCE[0]}")/run_and_time.sh" # prints what to do instead
fi
cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")"
if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    printf 'error: no python3 of version 3.11 or newer\n  why: found: %s\n  do:  %s\n' \
        "$(python3 --version 2>&1 || true)" 'install one and put it first on PATH' >&2
    exit 18
fi
python=$(python3 -m launch.environment requirements-test.txt)
# Three workers also on two cores: many tests wait for processes of their own.
exec "$python" -m pytest -q -n 3 --dist worksteal "$@"
