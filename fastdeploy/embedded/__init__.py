"""The model that ships with the package: a small Qwen3 checkpoint that works arithmetic problems step by step."""

from __future__ import annotations

from pathlib import Path

MODEL_DIR: Path = Path(__file__).parent / "model"
"""Its checkpoint folder, in Hugging Face format."""


def default_model() -> str:
    """The model folder to serve where the user names none."""
    return str(MODEL_DIR)
