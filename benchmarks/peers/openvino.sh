#!/usr/bin/env bash
# OpenVINO GenAI on CPU as a peer, in a venv of its own outside the repository.
#
#   benchmarks/peers/openvino.sh install                 create the venv, once
#   benchmarks/peers/openvino.sh convert MODEL           write MODEL-openvino: OpenVINO IR, no weight compression
#   benchmarks/peers/openvino.sh serve MODEL [PORT] ...  serve it (converted if need be); the rest goes to openvino_server.py
#
# Environment: PEERS_DIR (default ~/.cache/fastdeploy-peers), PYTHON (default python3.11), CORES (default: those that it may use).
set -euo pipefail

VERSION=2026.4.1.0
OPTIMUM=2.2.0
PEERS_DIR=${PEERS_DIR:-$HOME/.cache/fastdeploy-peers}
VENV=$PEERS_DIR/openvino

cores() { # the cores that this process may use, as a list: 0-3
    taskset -cp $$ | sed 's/.*: //'
}

install() {
    [ -e "$VENV/.complete" ] && { echo "already installed: $VENV"; return; }
    mkdir -p "$PEERS_DIR"
    "${PYTHON:-python3.11}" -m venv "$VENV"
    # torch only converts the checkpoint. A torchvision of another build than torch's would break its import.
    "$VENV/bin/pip" install --quiet torch==2.13.0 "openvino-genai==$VERSION" "optimum-intel[openvino]==$OPTIMUM" uvloop
    "$VENV/bin/pip" uninstall --quiet --yes torchvision
    echo "$VERSION" > "$VENV/.complete"
    echo "installed: $VENV"
}

check() {
    [ -e "$VENV/.complete" ] || { echo "run '$0 install' first" >&2; exit 2; }
}

convert() {
    check
    local target=${1%/}-openvino
    [ -e "$target/.complete" ] && { echo "already converted: $target"; return; }
    # Without --weight-format a model of less than a billion parameters keeps the checkpoint's precision.
    HF_HUB_OFFLINE=1 "$VENV/bin/optimum-cli" export openvino --model "$1" --task text-generation-with-past "$target"
    touch "$target/.complete"
}

serve() {
    local model=${1%/} port=${2:-8000}
    shift; [ $# -gt 0 ] && shift
    check
    convert "$model" >&2
    exec taskset -c "${CORES:-$(cores)}" "$VENV/bin/python" "$(dirname "$0")/openvino_server.py" \
        --model "$model-openvino" --port "$port" "$@"
}

case ${1:-} in
install) install ;;
convert) [ $# -ge 2 ] || { sed -n 2,8p "$0"; exit 2; }; convert "$2" ;;
serve) [ $# -ge 2 ] || { sed -n 2,8p "$0"; exit 2; }; shift; serve "$@" ;;
*) sed -n 2,8p "$0"; exit 2 ;;
esac
