#!/usr/bin/env bash
# llama.cpp on CPU as a peer: its server, built for this machine from the sources in the package llama-cpp-python, whose
# own server takes one request at a time. Needs a C++ compiler, cmake and ninja.
#
#   benchmarks/peers/llamacpp.sh install                 build the server and create the venv of the converter, once
#   benchmarks/peers/llamacpp.sh convert MODEL           write MODEL-llamacpp.gguf: bfloat16, no quantisation
#   benchmarks/peers/llamacpp.sh serve MODEL [PORT] ...  serve it (converted if need be); the rest goes to llama-server
#
# Environment: PEERS_DIR (default ~/.cache/fastdeploy-peers), PYTHON (default python3.11), CORES (default: those that it
# may use), SEQUENCES (default 32), CONTEXT (default 4096): each sequence has as much KV as the context takes.
set -euo pipefail

VERSION=0.3.36
GGUF=0.19.0
PEERS_DIR=${PEERS_DIR:-$HOME/.cache/fastdeploy-peers}
VENV=$PEERS_DIR/llamacpp

cores() { # the cores that this process may use, as a list: 0-3
    taskset -cp $$ | sed 's/.*: //'
}

install() {
    [ -e "$VENV/.complete" ] && { echo "already installed: $VENV"; return; }
    mkdir -p "$PEERS_DIR"
    "${PYTHON:-python3.11}" -m venv "$VENV"
    "$VENV/bin/pip" install --quiet "gguf==$GGUF" numpy
    rm -rf "$VENV/src"
    mkdir "$VENV/src"
    "$VENV/bin/pip" download --quiet --no-deps --no-binary :all: --dest "$VENV/src" "llama-cpp-python==$VERSION"
    tar -xzf "$VENV/src/llama_cpp_python-$VERSION.tar.gz" -C "$VENV/src" --strip-components 1
    cmake -S "$VENV/src/vendor/llama.cpp" -B "$VENV/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
        -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
        -DLLAMA_BUILD_APP=OFF -DLLAMA_USE_PREBUILT_UI=OFF
    cmake --build "$VENV/build" --target llama-server
    cp "$VENV/build/bin/llama-server" "$VENV/bin/"
    rm -rf "$VENV/build" "$VENV/src"
    echo "$VERSION" > "$VENV/.complete"
    echo "installed: $VENV"
}

check() {
    [ -e "$VENV/.complete" ] || { echo "run '$0 install' first" >&2; exit 2; }
}

convert() {
    check
    local target=${1%/}-llamacpp.gguf
    [ -e "$target" ] && { echo "already converted: $target"; return; }
    "$VENV/bin/python" "$(dirname "$0")/llamacpp_convert.py" "$1" "$target.part"
    mv "$target.part" "$target"
}

serve() {
    local model=${1%/} port=${2:-8000} cores threads sequences=${SEQUENCES:-32}
    shift; [ $# -gt 0 ] && shift
    check
    convert "$model" >&2
    cores=${CORES:-$(cores)}
    threads=$(taskset -c "$cores" nproc)
    exec taskset -c "$cores" "$VENV/bin/llama-server" --model "$model-llamacpp.gguf" --host 127.0.0.1 --port "$port" \
        --threads "$threads" --parallel "$sequences" --ctx-size "$((sequences * ${CONTEXT:-4096}))" \
        --flash-attn on --metrics --no-webui "$@"
}

case ${1:-} in
install) install ;;
convert) [ $# -ge 2 ] || { sed -n 2,10p "$0"; exit 2; }; convert "$2" ;;
serve) [ $# -ge 2 ] || { sed -n 2,10p "$0"; exit 2; }; shift; serve "$@" ;;
*) sed -n 2,10p "$0"; exit 2 ;;
esac
