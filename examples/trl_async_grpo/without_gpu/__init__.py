"""Stand-ins for what TRL's AsyncGRPOTrainer needs of a GPU. TRL itself is not changed.

kernels      the package with the kernels of flash attention, which TRL loads
vllm         TRL checks that a distribution of this name is installed, and imports a few of its names
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def install() -> None:
    """Put the stand-ins on the path of this process and of its children. Call this before TRL is imported."""
    here = str(Path(__file__).resolve().parent)
    sys.path.insert(0, here)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    import torch

    torch.cuda.get_device_name = lambda device=None: "CPU"  # TRL looks up the peak of this device
