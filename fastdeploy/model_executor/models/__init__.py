"""The model classes, by the name that config.json gives in ``architectures``."""

from fastdeploy.model_executor.models.qwen import Qwen

MODELS: dict[str, type[Qwen]] = {"Qwen2ForCausalLM": Qwen, "Qwen3ForCausalLM": Qwen}
