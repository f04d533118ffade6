"""A pytest plugin: SGLang, of which miles imports types, imports torchvision, whose wheels need CUDA. Here are the
names that it imports."""

from __future__ import annotations

import importlib.machinery
import sys
import types


def stand_in(name: str, **names: object) -> None:
    module = types.ModuleType(name)
    module.__dict__.update(names, __path__=[], __spec__=importlib.machinery.ModuleSpec(name, None), __version__="0")
    sys.modules[name] = module


stand_in("torchvision")
stand_in("torchvision.io", decode_jpeg=None, ImageReadMode=None)
stand_in("torchvision.transforms", InterpolationMode=None)
