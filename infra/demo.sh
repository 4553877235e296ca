#!/usr/bin/env bash
# A tiny vision model, behind the whole of Trivet, is asked a question about a picture. `make demo` installs before it.
#
# Environment:
#   KEEP=1               leave it running
#   TOPOLOGY=e_p_d       another topology than pd: agg, e_pd or e_p_d
#   PROMPT='What ...?'   another question
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly trivet=.venv/bin/trivet python=.venv/bin/python work=.trivet
readonly model=$work/tiny-model picture=$work/red-circle.png topology=${TOPOLOGY:-pd}
readonly prompt=${PROMPT:-What is in this image?}
# What suits two CPU cores and a model of a million parameters.
readonly engine=(
    --dtype float32 --max-model-len 2048 --max-num-seqs 16 --max-num-batched-tokens 2048 --enforce-eager
    --skip-mm-profiling --block-size 32 --kv-cache-memory-bytes 268435456 --limit-mm-per-prompt '{"image": 4, "video": 1}'
)
# A container has 64 MB of shared memory unless it was given more.
export TRIVET_MULTIMODAL_EMBEDDING_CACHE_CAPACITY_GB=${TRIVET_MULTIMODAL_EMBEDDING_CACHE_CAPACITY_GB:-0.02}
export TRIVET_TENSORS__MEDIA_GB=${TRIVET_TENSORS__MEDIA_GB:-0.01}

say() { echo "demo: $*"; }

step() { # WHAT COMMAND...
    local what=$1 began=$SECONDS
    shift
    say "$what ..."
    "$@"
    say "$what: done in $((SECONDS - began)) s"
}

port() { # WISHED: that port if nobody listens on it, else a free one
    "$python" - "$1" <<'PYTHON'
import socket
import sys

for wished in (int(sys.argv[1]), 0):
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wished))
        except OSError:
            continue
        print(probe.getsockname()[1])
        break
PYTHON
}

paint() {
    "$python" - "$picture" <<'PYTHON'
import sys

from PIL import Image, ImageDraw

picture = Image.new("RGB", (224, 224), "blue")
ImageDraw.Draw(picture).ellipse((52, 52, 172, 172), fill="red")
picture.save(sys.argv[1])
PYTHON
}

build() {
    "$python" -m app.tiny_model "$model"
    paint
}

up() {
    "$trivet" up --detach --topology "$topology" --model "$model" --served-model-name tiny --enable-multimodal \
        --redis-url "redis://127.0.0.1:$(port 6379)/0" --api-port "$(port 8000)" --flower-port "$(port 5555)" \
        "${engine[@]}"
    started=1 # had it failed or been interrupted, it would have stopped all that it began
}

ask() {
    say "  $picture: $prompt   (the model's weights are random, and so is what it says)"
    "$trivet" chat --image "$picture" --max-tokens 60 --temperature 0 "$prompt"
}

finish() {
    local code=$?
    trap - EXIT
    if [[ $started == 1 ]]; then
        step "stopping" "$trivet" down || code=1
    fi
    [[ $code == 0 ]] || say "failed after $SECONDS s"
    exit "$code"
}

started=0
trap finish EXIT
mkdir -p "$work"
step "a model in $model and a picture" build
step "topology $topology" up
step "a question over HTTP" ask
if [[ ${KEEP:-} == 1 ]]; then
    started=0
    say "left running, at the addresses above; stop it with: make down   (or $trivet down)"
fi
say "it works, after $SECONDS s"
