#!/usr/bin/env bash
# Install AITER and compile the modules that common/kernels/aiter_attention.py loads, for gfx942 and
# gfx950. The Dockerfile calls it if there is a build argument AITER:
#
#   AITER_JIT_DIR=DIR launch/install_aiter.sh TAG PYTHON
#
# TAG: of github.com/ROCm/aiter. DIR: where AITER looks for compiled modules. No GPU is needed. The
# modules are AMD's assembly and four source files each. Nothing of CK is fetched or generated.
set -euo pipefail
tag=$1
python=$2
export AITER_USE_SYSTEM_TRITON=1 # keep the triton of the image
export ENABLE_CK=0 PREBUILD_KERNELS=0
export GPU_ARCHS='gfx942;gfx950'

step='make a directory'
# shellcheck disable=SC2329 # the trap calls it
explain() {
    local code=$?
    rm -rf "${source:-}"
    if [[ $code != 0 ]]; then
        echo "error: --build-arg AITER=$tag: could not $step (exit code $code, see above);" \
            "without this argument the image is built without AITER" >&2
    fi
}
trap explain EXIT

source=$(mktemp -d)
mkdir -p "$AITER_JIT_DIR/build"
versions='import numpy, torch, triton; print(numpy.__version__, torch.__version__, triton.__version__)'

step="fetch the tag $tag of github.com/ROCm/aiter"
git clone --quiet --depth 1 --branch "$tag" https://github.com/ROCm/aiter "$source"

step="install what AITER's build needs"
before=$("$python" -c "$versions")
"$python" - "$source/pyproject.toml" > "$source/needed.txt" << 'END'
import sys, tomllib
with open(sys.argv[1], "rb") as file:
    print("\n".join(tomllib.load(file)["build-system"]["requires"]))
END
"$python" -m pip install --no-cache-dir --quiet --requirement "$source/needed.txt"

step='install the package amd-aiter'
"$python" -m pip install --no-cache-dir --quiet --no-build-isolation "$source"

step="keep the image's numpy, torch and triton"
[[ $before == "$("$python" -c "$versions")" ]]

# The first one is loaded by `import aiter`.
for module in module_aiter_core module_fmha_v3_fwd module_fmha_v3_bwd; do
    step="compile $module"
    # AITER_AOT_IMPORT: import the build system alone, without a GPU.
    (cd / && AITER_AOT_IMPORT=1 "$python" - "$module") << 'END'
import inspect, sys
from aiter.jit import core
found = core.get_args_of_build(sys.argv[1])
known = inspect.signature(core.build_module).parameters
arguments = {name: value for name, value in found.items() if name in known}
core.build_module(**arguments | {"md_name": sys.argv[1]})
END
    step="load the compiled $module"
    (cd "$AITER_JIT_DIR" && "$python" -c "import torch, $module")
done

step='make the modules readable for all users'
rm -rf "$AITER_JIT_DIR"/build/*
chmod -R a+rX "$AITER_JIT_DIR"
