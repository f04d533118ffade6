"""Names in PaddlePaddle/FastDeploy, release 2.6, commit 7198b5883a0ebdc85b91a455aa07d0856911c9a7 of 2026-06-01:
the routes of fastdeploy/entrypoints/openai/api_server.py and of the older fastdeploy/entrypoints/api_server.py, and the
fields of openai/protocol.py."""

from __future__ import annotations

ROUTES = """
GET /health, GET /load, GET /ping, POST /ping, POST /v1/pause, POST /v1/resume, GET /v1/is_paused, POST /v1/sleep,
POST /v1/wakeup, POST /v1/update_weights, POST /v1/abort_requests, POST /v1/chat/completions, POST /v1/completions,
GET /v1/models, POST /v1/reward, POST /v1/embeddings, GET /update_model_weight, GET /clear_load_weight,
POST /rearrange_experts, POST /get_per_expert_tokens_stats, POST /check_redundant, GET /metrics, GET /config-info,
POST /controller/reset_scheduler, POST /controller/scheduler, POST /generate
"""
OF_BOTH = """
model frequency_penalty logprobs include_draft_logprobs include_logprobs_decode_token prompt_logprobs
temp_scaled_logprobs top_p_normalized_logprobs max_tokens n presence_penalty seed stop stream stream_options temperature
top_p user request_id disaggregate_info top_k min_p repetition_penalty stop_token_ids min_tokens
include_stop_str_in_output bad_words bad_words_token_ids logits_processors_args response_format guided_json guided_regex
guided_choice guided_grammar max_streaming_response_tokens return_token_ids prompt_token_ids mm_hashes trace_context
collect_metrics video_fps
"""
OF_COMPLETIONS = "prompt best_of echo suffix"
OF_CHATS = """
messages tools top_logprobs max_completion_tokens metadata chat_template_kwargs chat_template reasoning_max_tokens
response_max_tokens reasoning_effort structural_tag disable_chat_template completion_token_ids
"""
REPLY_FIELDS = """
id object created model choices usage routed_experts metrics index message delta text finish_reason arrival_time
logprobs draft_logprobs prompt_logprobs sampling_mask speculate_metrics role content multimodal_content
reasoning_content audio_content tool_calls prompt_token_ids completion_token_ids prompt_tokens completion_tokens
prompt_tokens_details completion_tokens_details cached_tokens image_tokens video_tokens reasoning_tokens
"""
