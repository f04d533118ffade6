"""SGLang's ``meta_info`` of a choice: how it ended, its counts, and the log probabilities of its tokens."""

from __future__ import annotations

from typing import Any

from fastdeploy.client.choice import Choice
from fastdeploy.client.generation import Generation
from fastdeploy.http.openai.reply import mask_ids, weight_versions

# AReaL recognises an abort without tokens by this beginning of the message.
BEFORE_PREFILL = "Abort before prefill"


async def meta_info(generation: Generation, index: int, with_logprobs: bool, with_mask: bool) -> dict[str, Any]:
    """Return the meta_info of a whole choice. The triples of output_token_logprobs are [logprob, token id, null].
    with_mask: tell the ids that each token was drawn from, and its logprob over them, as miles reads them."""
    choice, prompt = generation.choices[index], index // generation.n
    meta: dict[str, Any] = {
        "id": generation.request_id,
        "finish_reason": finish_reason(choice),
        "prompt_tokens": len(generation.prompts[prompt]),
        "completion_tokens": len(choice.token_ids),
        "cached_tokens": generation.cached_tokens[prompt],
        "weight_versions": weight_versions(choice.spans),
    }
    if choice.spans:
        meta["weight_version"] = choice.spans[-1].version
    if with_logprobs:
        pairs = zip(choice.token_ids, choice.logprobs, strict=True)
        triples = ((entry.logprob, token, None) for token, entry in pairs)
        meta["output_token_logprobs"] = await generation.pace.array(triples)
        meta["output_token_logprobs_length"] = len(choice.token_ids)
    if with_mask:
        meta["output_token_sampling_mask"] = await mask_ids(generation.pace, choice.logprobs)
        meta["output_token_sampling_mask_length"] = len(choice.token_ids)
        meta["output_token_sampling_logprobs"] = [entry.logprob for entry in choice.logprobs]
    return meta


def finish_reason(choice: Choice) -> dict[str, Any] | None:
    """Return SGLang's finish_reason, which is None until the choice has ended."""
    match choice.finish_reason:
        case None:
            return None
        case "stop":
            matched = choice.stop_reason if choice.stop_reason is not None else choice.token_ids[-1]
            return {"type": "stop", "matched": matched}
        case "length":
            return {"type": "length", "length": len(choice.token_ids)}
        case "error":  # SGLang's form. The status keeps clients from resuming this as an abort.
            error = {"status_code": 500, "err_type": "InternalServerError"}
            return {"type": "abort", "message": choice.message, **error}
    message = choice.message or "Aborted"
    if not choice.token_ids and not message.startswith(BEFORE_PREFILL):
        message = f"{BEFORE_PREFILL}: {message}"
    return {"type": "abort", "message": message, "status_code": None, "err_type": None}
