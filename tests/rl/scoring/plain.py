"""A straightforward forward pass in Paddle: one sequence at a time, one projection at a time, nothing fused."""

from __future__ import annotations

import numpy as np
import paddle
import paddle.nn.functional as F

from fastdeploy.model_executor.models import load_config
from fastdeploy.model_executor.models.decoder import rope_frequencies, rope_tables, yarn_frequencies, yarn_scale
from fastdeploy.model_executor.models.deepseek import DeepseekConfig
from fastdeploy.model_executor.models.gemma import GemmaConfig
from fastdeploy.model_executor.models.glm_moe import GlmMoeConfig
from fastdeploy.model_executor.models.gpt_oss import GptOssConfig
from fastdeploy.model_executor.models.llama import LlamaConfig
from fastdeploy.model_executor.models.mistral import MistralConfig
from fastdeploy.model_executor.ops.blocks import RouterScore

Tensors = dict[str, paddle.Tensor]


def plain_logprobs(
    folder: str,
    tensors: Tensors,
    sequences: list[tuple[list[int], list[int]]],
    temperature: float,
    windows: list[int | None] | None = None,
    routing: list[np.ndarray] | None = None,
) -> paddle.Tensor:
    """Return the log probability of each output token. tensors: float32 by checkpoint name. windows: of each layer, of
    a config that is not known here. routing: of each sequence, the experts of each token but the last, [tokens - 1,
    experts layers, top_k]; None: those with the highest scores."""
    config = load_config(folder)
    deepseek = config if isinstance(config, DeepseekConfig) else None
    turned_dims = config.rotary_dim if isinstance(config, GlmMoeConfig) else config.head_dim
    turned_dims = turned_dims if deepseek is None else deepseek.latent.qk_rope_head_dim
    frequencies = rope_frequencies(turned_dims, config.rope_theta)
    if isinstance(config, LlamaConfig) and config.rope is not None:
        frequencies = config.rope.scale(frequencies)
    neighbours = config.architecture.startswith("Ernie")  # of which the pairs are rotated
    neighbours = neighbours if deepseek is None else deepseek.rope_interleave
    gemma = config if isinstance(config, GemmaConfig) else None
    window = config.sliding_window if isinstance(config, MistralConfig) else None
    ropes = [rope_tables(frequencies, 512)] * config.num_hidden_layers
    windows = [window] * config.num_hidden_layers if windows is None else windows
    if gemma is not None:
        local = [kind == "sliding_attention" for kind in gemma.layer_types]
        of_kinds = [rope.tables(config.head_dim, 512) for rope in (gemma.global_rope, gemma.local_rope)]
        ropes, windows = [of_kinds[kind] for kind in local], [gemma.sliding_window if kind else None for kind in local]
    gpt_oss = config if isinstance(config, GptOssConfig) else None
    yarn = getattr(config, "yarn", None)
    if yarn is not None:
        frequencies = yarn_frequencies(turned_dims, config.rope_theta, yarn)
        ropes = [rope_tables(frequencies, 512, yarn.attention_factor)] * config.num_hidden_layers
    if gpt_oss is not None:
        windows = [gpt_oss.sliding_window if kind == "sliding_attention" else None for kind in gpt_oss.layer_types]
    mixture = getattr(config, "mixture", None)
    sparse = () if mixture is None else mixture.layers
    scale = (config.head_dim if gemma is None else gemma.query_pre_attn_scalar) ** -0.5

    def linear(x: paddle.Tensor, name: str) -> paddle.Tensor:
        y = x @ tensors[name + ".weight"].T
        return y + tensors[name + ".bias"] if name + ".bias" in tensors else y

    def norm(x: paddle.Tensor, name: str) -> paddle.Tensor:
        weight = tensors[name + ".weight"] + (0.0 if gemma is None else 1.0)
        return x / paddle.sqrt((x * x).mean(-1, keepdim=True) + config.rms_norm_eps) * weight

    def rotated(x: paddle.Tensor, layer: int) -> paddle.Tensor:
        if turned_dims < x.shape[-1]:
            return paddle.concat([rotated(x[..., :turned_dims], layer), x[..., turned_dims:]], -1)
        half = turned_dims // 2
        cos, sin = (t.repeat_interleave(2, 1) if neighbours else paddle.concat([t, t], 1) for t in ropes[layer])
        turned = paddle.concat([-x[..., half:], x[..., :half]], -1)
        if neighbours:
            turned = paddle.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)
        return x * cos[: x.shape[1]] + turned * sin[: x.shape[1]]

    def heads(x: paddle.Tensor, count: int) -> paddle.Tensor:
        return x.reshape([x.shape[0], count, -1]).transpose([1, 0, 2])

    def attention(x: paddle.Tensor, layer: int) -> paddle.Tensor:
        at = f"model.layers.{layer}.self_attn."
        if deepseek is not None:
            return latent_attention(x, layer, at, deepseek)
        q = heads(linear(x, at + "q_proj"), config.num_attention_heads)
        k, v = (heads(linear(x, f"{at}{name}_proj"), config.num_key_value_heads) for name in "kv")
        if at + "q_norm.weight" in tensors:
            q, k = norm(q, at + "q_norm"), norm(k, at + "k_norm")
        groups = config.num_attention_heads // config.num_key_value_heads
        q, k, v = rotated(q, layer), rotated(k, layer).repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        return attend(q, k, v, scale, layer, at)

    def latent_attention(x: paddle.Tensor, layer: int, at: str, config: DeepseekConfig) -> paddle.Tensor:
        of, count = config.latent, config.num_attention_heads
        if of.q_lora_rank is None:
            q = heads(linear(x, at + "q_proj"), count)
        else:
            q = heads(linear(norm(linear(x, at + "q_a_proj"), at + "q_a_layernorm"), at + "q_b_proj"), count)
        both = linear(x, at + "kv_a_proj_with_mqa")
        latent, key = both[:, : of.kv_lora_rank], both[:, of.kv_lora_rank :]
        kv = heads(linear(norm(latent, at + "kv_a_layernorm"), at + "kv_b_proj"), count)
        plain = of.qk_nope_head_dim
        key = rotated(key.unsqueeze(0), layer).expand([count, -1, -1])
        q = paddle.concat([q[..., :plain], rotated(q[..., plain:], layer)], -1)
        k, v = paddle.concat([kv[..., :plain], key], -1), kv[..., plain:]
        factor = 1.0 if yarn is None else yarn_scale(yarn.factor, yarn.mscale_all_dim) ** 2
        return attend(q, k, v, q.shape[-1] ** -0.5 * factor, layer, at)

    def attend(
        q: paddle.Tensor, k: paddle.Tensor, v: paddle.Tensor, scale: float, layer: int, at: str
    ) -> paddle.Tensor:
        scores = q @ k.transpose([0, 2, 1]) * scale
        visible, seen = paddle.tril(paddle.ones(scores.shape[1:])), windows[layer]
        visible = visible if seen is None else paddle.triu(visible, 1 - seen)
        scores = paddle.where(visible > 0, scores, paddle.full([1], -1e30))
        if gpt_oss is not None:
            sinks = tensors[at + "sinks"].reshape([-1, 1, 1]).expand([-1, scores.shape[1], 1])
            weights = F.softmax(paddle.concat([scores, sinks], -1), -1)[..., :-1]
        else:
            weights = F.softmax(scores, -1)
        return linear((weights @ v).transpose([1, 0, 2]).reshape([q.shape[1], -1]), at + "o_proj")

    def mlp(x: paddle.Tensor, at: str) -> paddle.Tensor:
        gate = linear(x, at + "gate_proj")
        gate = F.silu(gate) if gemma is None else F.gelu(gate, approximate=True)
        return linear(gate * linear(x, at + "up_proj"), at + "down_proj")

    def expert(x: paddle.Tensor, at: str, i: int) -> paddle.Tensor:
        if gpt_oss is None:
            return mlp(x, f"{at}experts.{i}.")
        y = x @ tensors[at + "experts.gate_up_proj"][i] + tensors[at + "experts.gate_up_proj_bias"][i]
        gate, up = y[:, ::2].clip(max=7.0), y[:, 1::2].clip(-7.0, 7.0)
        inner = (up + 1) * gate / (1 + paddle.exp(-1.702 * gate))
        return inner @ tensors[at + "experts.down_proj"][i] + tensors[at + "experts.down_proj_bias"][i]

    def experts(x: paddle.Tensor, at: str, chosen: np.ndarray | None) -> paddle.Tensor:
        """Compute all experts of all rows, with the weight 0 for those that are not chosen."""
        assert mixture is not None
        logits = linear(x, at + ("gate" if gpt_oss is None else "router"))
        best = np.argsort(-logits.numpy())[:, : mixture.top_k] if chosen is None else chosen.astype(np.int64)
        mask = np.zeros(logits.shape, np.float32)
        np.put_along_axis(mask, best, 1, 1)
        scores = 1 / (1 + paddle.exp(-logits)) if mixture.score is RouterScore.SIGMOID else paddle.exp(logits)
        if mixture.score is RouterScore.SOFTMAX:
            scores = scores / scores.sum(-1, keepdim=True)
        weights = scores * paddle.to_tensor(mask)
        if mixture.normalize or mixture.score is RouterScore.SOFTMAX_OF_CHOSEN:
            weights = weights / weights.sum(-1, keepdim=True)
        y = sum(weights[:, i : i + 1] * expert(x, at, i) for i in range(mixture.experts)) * mixture.scale
        return y + mlp(x, at + "shared_experts.") if mixture.shared_inner else y

    def of(prompt: list[int], output: list[int], chosen: np.ndarray | None) -> paddle.Tensor:
        ids = paddle.to_tensor(prompt + output)
        x = tensors["model.embed_tokens.weight"][ids[:-1]] * (1.0 if gemma is None else config.hidden_size**0.5)
        for layer in range(config.num_hidden_layers):
            at = f"model.layers.{layer}."
            y = attention(norm(x, at + "input_layernorm"), layer)
            x = x + (y if gemma is None else norm(y, at + "post_attention_layernorm"))
            y = norm(x, at + ("post_attention_layernorm" if gemma is None else "pre_feedforward_layernorm"))
            if layer in sparse:
                y = experts(y, at + "mlp.", None if chosen is None else chosen[:, sparse.index(layer)])
            else:
                y = mlp(y, at + "mlp.")
            x = x + (y if gemma is None else norm(y, at + "post_feedforward_layernorm"))
        head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
        logits = norm(x, "model.norm")[len(prompt) - 1 :] @ head.T / temperature
        return paddle.take_along_axis(F.log_softmax(logits, -1), ids[len(prompt) :].unsqueeze(1), 1)[:, 0]

    each = [None] * len(sequences) if routing is None else routing
    return paddle.concat([of(*sequence, chosen) for sequence, chosen in zip(sequences, each, strict=True)])
