"""What TRL's AsyncGRPOTrainer needs on a machine without a GPU: stand-ins, put on the path before TRL is imported.

TRL itself stays as it is. Its trainer asks for flash attention kernels (``kernels``), for a distribution called vllm
(to be sure that there is a server to talk to), and for the name of a CUDA device (to estimate its peak).
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
VLLM_VERSION = "0.27.0"  # one that TRL 1.16 accepts and that needs no trainer engine of vLLM's


def install() -> None:
    """Put the stand-ins on the path of this process and of those it starts."""
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
