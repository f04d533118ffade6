"""Make a small Mixture of Experts to start training from: ``python -m examples.async_grpo.start_mixture FOLDER``.

The mixture is made from the dense start policy by sparse upcycling (https://arxiv.org/abs/2212.05055): every expert is
a copy of the MLP of its layer. The weights of the chosen experts add up to 1, so copies compute what the MLP computes,
whatever the router chooses. Then each value of each expert is changed a little, so that the experts differ and training
can make them differ more. Routers are random: the mixture solves about as many problems as the dense model does, and
its tokens choose different experts. This takes a second.

    python -m examples.async_grpo.start_mixture /tmp/mixture
    python -m examples.async_grpo --model /tmp/mixture --out runs/mixture
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from examples.async_grpo.config import START_POLICY
from examples.embedded_model.checkpoint import read_weights, write_weights

EXPERTS, TOP_K = 8, 2
CHANGE = 0.05  # standard deviation of the change of a value of an expert, as a share of the value
ROUTER_STD = 0.1  # of a router's weights: logits have a standard deviation of about 1
SEED = 0


def config_of(dense: Mapping[str, object]) -> dict[str, object]:
    """Return config.json of the mixture. dense: that of a Qwen3 model."""
    return {
        **dense,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "moe_intermediate_size": dense["intermediate_size"],
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def upcycled(weights: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of the mixture, float32. weights: of the dense model, by name."""
    rng = np.random.default_rng(SEED)
    for name, weight in weights.items():
        layer, is_mlp, projection = name.partition(".mlp.")
        if not is_mlp:
            yield name, weight
            continue
        if projection == "gate_proj.weight":
            yield f"{layer}.mlp.gate.weight", rng.normal(0, ROUTER_STD, (EXPERTS, weight.shape[1])).astype(np.float32)
        for expert in range(EXPERTS):
            changed = weight * (1 + CHANGE * rng.standard_normal(weight.shape, np.float32))
            yield f"{layer}.mlp.experts.{expert}.{projection}", changed


def make(folder: Path, dense: Path = START_POLICY) -> None:
    """Write the mixture to ``folder``. dense: the folder of the model that it is made from."""
    shutil.copytree(dense, folder, dirs_exist_ok=True)
    config = config_of(json.loads((dense / "config.json").read_text()))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_weights(folder, dict(upcycled(read_weights(dense))))


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a small Mixture of Experts to start training from.")
    parser.add_argument("folder", type=Path, help="where to write it: 10 MB")
    parser.add_argument("--dense", type=Path, default=START_POLICY, help="the model that it is made from")
    arguments = parser.parse_args()
    make(arguments.folder, arguments.dense)
    print(f"wrote {arguments.folder}")


if __name__ == "__main__":
    main()
