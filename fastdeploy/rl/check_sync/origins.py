"""Ways in which a tensor differs: the whole of another tensor, or of other weights, serves in its place. Digests tell,
so these find their fault at engines that show no values, too."""

from __future__ import annotations

import re
from collections.abc import Callable

from fastdeploy.model_executor.models.interface import EMBEDDING, LM_HEAD
from fastdeploy.rl.check_sync.case import Sides

EXPERT, LAYER = re.compile(r"\.experts\.\d+\."), re.compile(r"\.layers\.\d+\.")
GATE_UP, QKV = re.compile(r"\.(gate|up)_proj\."), re.compile(r"\.[qkv]_proj\.")


def tied_head(name: str, sides: Sides) -> str | None:
    """Find an output layer that has the values of the embedding, or the reverse, though the model ties nothing."""
    pair = {LM_HEAD: EMBEDDING, EMBEDDING: LM_HEAD}
    if name not in pair or sides.served.get(pair[name]) != sides.served[name]:
        return None
    ends = ("output layer", "embedding") if name == LM_HEAD else ("embedding", "output layer")
    return f"the {ends[0]} has the values of the {ends[1]}, as if tie_word_embeddings were true"


def stale(name: str, sides: Sides) -> str | None:
    """Find the values of earlier weights."""
    for one in sides.likely:
        if sides.served[name] == one.digests.get(name):
            return f"the values are those of {one.label}"
    return None


def never_updated(name: str, sides: Sides) -> str | None:
    """Find the values of before the training."""
    if sides.base is None or sides.served[name] != sides.base.digests.get(name):
        return None
    return f"the values are those of {sides.base.label}: no update has reached this tensor"


def zero(name: str, sides: Sides) -> str | None:
    """Find a tensor of zeros."""
    return "all values are 0" if sides.served[name] == sides.zero else None


def exchanged_experts(name: str, sides: Sides) -> str | None:
    """Find the tensor of another expert of the same layer."""
    return _of_another(name, sides, lambda one: EXPERT.sub(".experts.", one) if EXPERT.search(one) else None)


def exchanged_gate_and_up(name: str, sides: Sides) -> str | None:
    """Find gate in the place of up, or up in the place of gate."""
    return _of_another(name, sides, lambda one: GATE_UP.sub(".", one) if GATE_UP.search(one) else None)


def exchanged_qkv(name: str, sides: Sides) -> str | None:
    """Find another one of q, k and v of the same layer."""
    return _of_another(name, sides, lambda one: QKV.sub(".", one) if QKV.search(one) else None)


def another_layer(name: str, sides: Sides) -> str | None:
    """Find the same tensor of another layer."""
    return _of_another(name, sides, lambda one: LAYER.sub(".layers.", one) if LAYER.search(one) else None)


def another_tensor(name: str, sides: Sides) -> str | None:
    """Find any other tensor of the trainer."""
    return _of_another(name, sides, lambda one: "")


def stale_and_another(name: str, sides: Sides) -> str | None:
    """Find another tensor of earlier weights."""
    for one in sides.likely:
        for other, digest in one.digests.items():
            if digest == sides.served[name] and other != name:
                return f"the values are those of {other} of {one.label}"
    return None


def repeated(name: str, sides: Sides) -> str | None:
    """Find values that serve for another tensor, too, although the trainer's are different: one was written twice."""
    for other, digest in sides.served.items():
        if digest == sides.served[name] and other != name and sides.expected.get(other) != sides.expected[name]:
            return f"the same values serve as {other}"
    return None


def _of_another(name: str, sides: Sides, family: Callable[[str], str | None]) -> str | None:
    """Return a sentence if the values are those of another tensor of the same family. family: returns the name without
    the part in which a family differs; None for a tensor of no family."""
    for other in sides.named(sides.served[name]):
        if other == name or family(other) is None or family(other) != family(name):
            continue
        if sides.served.get(other) == sides.expected[name]:
            return f"exchanged with {other}"
        return f"the values are those of {other}"
    return None
