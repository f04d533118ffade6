"""Values that the state machine draws from, and the answers that each of its calls may get.

The pool of KV is small, so preemption is common. The vocabulary is small, so requests end by EOS and by stop ids. The
prompts share prefixes, so blocks are shared and copied on write.
"""

from __future__ import annotations

import msgspec
from hypothesis import strategies as st

from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.served_weights import WHOLE_ENGINE, adapter_scope
from fastdeploy.core.weight_source import PLAIN, PartFormat
from fastdeploy.inter_communicator import messages as m

PROMPTS = [
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 1, 2],
    [1, 2, 3, 4, 5, 6, 7, 8],
    [5],
    [2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9],
]
SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 30),
    min_tokens=st.integers(0, 1) | st.just(8),
    ignore_eos=st.booleans(),
    seed=st.integers(0, 3),
    stop_token_ids=st.sampled_from([(), (), (3,), (0,)]),
    logprobs=st.sampled_from([None, None, 0]),
    routed_experts=st.booleans(),
    routed_experts_start=st.integers(0, 1),
).map(
    lambda p: msgspec.structs.replace(
        p,
        min_tokens=min(p.min_tokens, p.max_tokens),
        routed_experts_start=p.routed_experts_start if p.routed_experts else 0,
    )
)
ADAPTERS = ("t", "u", "v")  # of which two fit into the memory for adapters
MODELS = st.sampled_from(["", "", "t", "t", "u", "v"])
HOLDS = st.sampled_from([None, None, "x", "y"])
SCOPES = st.sampled_from([WHOLE_ENGINE, WHOLE_ENGINE, *map(adapter_scope, ("t", "t", "u", "nobody"))])
PAUSES = st.builds(
    m.PauseArgs,
    mode=st.sampled_from(["abort", "wait", "wait", "keep"]),
    clear_cache=st.sampled_from([None, True, False]),
    admission=st.sampled_from([None, None, "hold", "reject"]),
    timeout_s=st.sampled_from([0.0, 1.0, 60.0, 60.0]),
    on_timeout=st.sampled_from([None, "keep", "abort", "cancel"]),
    ttl_s=st.sampled_from([None, None, 2.0, 20.0]),
    hold_id=HOLDS,
    scope=SCOPES,
)
FOLDERS = ["/w1", "/w2", "/w3-recompute", "/bad", "/garbage"]
DELTAS = ["/d1", "/d2", "/d3-recompute", "/bad"]
FORMS = [PLAIN, PartFormat("overwrite", "zstd")]
UPDATES = list(zip(FOLDERS, ["keep", "keep", "recompute", "keep", "recompute"], strict=True))
KV = st.sampled_from(["keep", "recompute"])
TAGS = st.sampled_from([(), ("weight",), ("kv_cache",), ("weight", "kv_cache")])
SYSTEM_HOLDS = {"sleep", "republish"}
# Calls that are answered when their work is done. All other calls are answered at once.
LATER = (
    m.PauseArgs, m.SleepArgs, m.UpdateWeightsArgs, m.UpdatePartArgs, m.CommitUpdateArgs, m.WeightInfoArgs,
    m.LoadAdapterArgs, m.WakeArgs,
)  # fmt: skip
ENDED = {"session_not_found", "session_expired"}
REFUSALS: dict[type, set[str]] = {
    m.BeginUpdateArgs: {"update_in_progress", "version_conflict", "base_mismatch", "wrong_order", *ENDED},
    m.UpdateWeightsArgs: {"weight_update_refused", "update_in_progress", "base_mismatch", "wrong_order", *ENDED},
    m.UpdatePartArgs: {"weight_update_refused", "update_in_progress", "wrong_order", "invalid_field", *ENDED},
    m.CommitUpdateArgs: {
        "weight_update_refused", "version_conflict", "base_mismatch", "wrong_order", "invalid_field", *ENDED,
    },
    m.AbortUpdateArgs: {"session_not_found"},
    m.WeightInfoArgs: {"wrong_order"},
    m.SleepArgs: {"wrong_order", "out_of_space", "pause_timeout", "pause_interrupted", "update_in_progress"},
    m.WakeArgs: {"wrong_order", "out_of_space", "staging_timeout", "update_in_progress"},
    m.LoadAdapterArgs: {"weight_update_refused", "update_in_progress", "wrong_order", "adapter_loaded"},
    m.EndLoadArgs: {"wrong_order", "version_conflict"},
    m.UnloadAdapterArgs: {"model_not_found"},
    m.PauseStatusArgs: {"model_not_found"},
}  # fmt: skip
