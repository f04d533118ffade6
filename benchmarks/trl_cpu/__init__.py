"""Stand-in modules for TRL's AsyncGRPOTrainer on a machine without a GPU, put on the path before TRL is imported.

TRL is not changed. Its trainer imports flash attention kernels (``kernels``), checks that a distribution called vllm is
installed, and asks for the name of the CUDA device, to estimate its peak.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
VLLM_VERSION = "0.27.0"  # a version that TRL 1.16 accepts and that needs no trainer engine of vLLM


def install() -> None:
    """Put the stand-ins on the path of this process and of its children."""
    folder = Path(tempfile.mkdtemp(prefix="trl-cpu-"))
    info = folder / f"vllm-{VLLM_VERSION}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}\n")
    (info / "top_level.txt").write_text("vllm\n")
    paths = [str(HERE), str(folder)]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    import torch

    torch.cuda.get_device_name = lambda device=None: "CPU"
