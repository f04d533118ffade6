"""Tiny models for tests: a chat template, a tokenizer and weights, of four architectures.

"qwen3" is the embedded model, which was trained to solve arithmetic problems. The others have random weights, and so
say nothing that makes sense. All have the embedded model's tokenizer, of 272 tokens.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fastdeploy.core.errors import InvalidField
from fastdeploy.embedded import MODEL_DIR

if TYPE_CHECKING:
    from fastdeploy.testing.checkpoints import Spec

MODELS = ("qwen3", "llama", "ernie", "moe")
"""Names of the models: dense Qwen3, Llama and ERNIE, and a mixture of experts (Qwen3-MoE)."""
EMBEDDED_NAME = "fastdeploy-embedded"  # in requests and replies, if no model was named
FROM_EMBEDDED = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")
VOCAB, PAD, END = 272, 256, 257  # of the embedded model
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def _random_models() -> dict[str, Spec]:
    """Return the models that are made, by name."""
    from fastdeploy.testing.checkpoints import BFLOAT16, Spec  # imports numpy: not where a folder is served

    tiny = partial(Spec, dtype=BFLOAT16, head_dim=32, vocab=VOCAB, max_len=4096, eos=(END,))
    extra = {"pad_token_id": PAD, "rope_theta": 10000.0}
    return {
        "llama": tiny("llama", "LlamaForCausalLM", seed=1, extra=extra),
        "ernie": tiny("ernie", "Ernie4_5ForCausalLM", seed=2, extra=extra),
        "moe": tiny("moe", "Qwen3MoeForCausalLM", seed=3, extra=extra | EXPERTS),
    }


def find_model(given: str | os.PathLike[str] | None) -> tuple[Path, str]:
    """Return the folder of the model that is given, and the model's name in requests. given: a folder, or a name of
    MODELS if there is no such folder; None: the embedded model. Raises InvalidField."""
    if given is None:
        return MODEL_DIR, EMBEDDED_NAME
    folder, name = Path(os.path.abspath(given)), str(given)
    if (folder / "config.json").is_file():
        return folder, folder.name
    if folder.is_dir():
        raise InvalidField("model", f"expected a folder with a config.json, got {str(folder)!r}")
    if name not in MODELS:
        text = f"expected a folder with a config.json, or one of {', '.join(MODELS)}, got {str(folder)!r}"
        raise InvalidField("model", f"{text}; nothing is downloaded")
    try:
        return model_folder(name), name
    except (OSError, ValueError) as error:
        raise InvalidField("model", f"{name} cannot be written: {error}") from None


def cache_folder() -> Path:
    """Return the folder of this user where models are kept: fastdeploy/models in $XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastdeploy" / "models"


def model_folder(name: str, root: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of a model of MODELS, in Hugging Face's layout. Treat it as read-only: others use it.

    It is written to ``root`` (default: :func:`cache_folder`) if it is not there. Processes may do so at the same time:
    the folder appears complete, and its name has a digest of its content. "qwen3" is a part of this package, and is not
    written. Raises InvalidField for another name, and ValueError if a file of the folder was changed.
    """
    if name not in MODELS:
        raise InvalidField("model", f"expected one of {', '.join(MODELS)}, got {name!r}")
    if name == "qwen3":
        return MODEL_DIR
    from fastdeploy.testing.checkpoints import write_checkpoint

    parent = Path(root) if root is not None else cache_folder()
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix=".new-") as scratch:
        new = write_checkpoint(Path(scratch) / name, _random_models()[name])
        for file in FROM_EMBEDDED:
            shutil.copyfile(MODEL_DIR / file, new / file)
        digest = _digest(new)
        folder = parent / f"{name}-{digest[:12]}"
        try:
            new.rename(folder)
        except OSError:  # it is there, of an earlier call or of another process
            if not folder.is_dir():
                raise
            if _digest(folder) != digest:
                raise ValueError(f"{folder}: a file was changed; delete the folder, and it is written again") from None
    return folder


def _digest(folder: Path) -> str:
    """Return a digest of the names and the content of the files of a folder."""
    lines = [f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n" for path in sorted(folder.iterdir())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
