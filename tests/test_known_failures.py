"""Defects that other engines had, or this one had before. Below each defect are the tests that exclude it.

Other tests call these defects "known failure N". A test without a path is in this file. 13, 15, 16, 17, 19, 20 and 36
also have tests with real processes in tests/e2e.

1. The loop stopped before it handled aborts: a deadlock, and the tokens of the aborted requests were lost.
    tests/engine/pauses/test_pause.py::test_a_client_may_abort_and_cancel_while_paused
2. An abort mark stayed behind when the request ended by itself at the same time. The drain never ended.
    test_an_abort_that_races_with_the_end_leaves_nothing_behind
3. A failed pause left the paused flag set. The next pause answered success though nothing was drained.
    test_after_a_failed_pause_the_next_one_really_drains
4. A second pause overwrote the place for the first caller's reply. The first caller waited for ever.
    tests/engine/pauses/test_concurrent_pauses.py::test_two_pauses_at_once_are_both_answered
5. A resume came during the drain of a wait. The old pause call succeeded later, and cleared the caches in use.
    tests/engine/pauses/test_pause.py::test_a_resume_during_a_drain_clears_no_cache
6. A wait after a keep by another controller set frozen requests running again, in the middle of an update.
    tests/engine/pauses/test_pause_holds.py::test_a_wait_by_another_controller_does_not_end_the_freeze_of_a_keep
7. An abort after a keep could not end requests, because the loop that ends them was frozen.
    tests/engine/pauses/test_concurrent_pauses.py::test_abort_after_keep_ends_the_frozen_requests_without_a_step
8. Waiting or half-prefilled requests had to be prefilled to the end before they could be aborted.
    tests/engine/pauses/test_pause.py::test_abort_does_not_prefill_the_rest_of_a_half_prefilled_prompt
    tests/engine/pauses/test_pause.py::test_no_request_starts_while_an_abort_waits_for_its_fence
9. An abort dropped the tokens of the step in flight, and tokens that were not delivered yet.
    tests/engine/pauses/test_pause_fence.py::test_the_reply_waits_until_every_client_has_acknowledged_every_output
    test_an_aborted_request_returns_every_token_that_was_computed
10. An EOS token that no model drew was appended to partial results, and got into training data.
    tests/engine/pauses/test_pause.py::test_abort_ends_all_requests_with_exactly_the_tokens_they_had
11. An abort by the client's request id matched nothing, because the engine had renamed the request.
    tests/engine/test_common_engine.py::test_abort_by_the_id_of_a_group_aborts_all_of_its_requests
12. An abort of an already aborted request looped for ever. An abort without ids put None into the set of ids.
    test_an_abort_may_be_repeated
    tests/engine/test_common_engine.py::test_an_abort_call_without_ids_is_refused
13. Requests that were being tokenised escaped the pause and ran under new weights.
    test_a_request_that_reaches_the_engine_after_the_pause_does_not_run
    tests/engine/pauses/test_pause_admission.py::test_requests_are_rejected_from_the_start_of_a_drain_until_the_last_hold_ends
14. A pause was polled once a second, and the state could not be asked for during a drain.
    tests/engine/pauses/test_pause.py::test_a_status_query_is_answered_during_a_drain
    test_an_idle_loop_sleeps_until_the_next_deadline
15. A reply arrived before the caller had registered for it. The caller waited for 600 s.
    test_a_reply_never_comes_before_its_call_was_read
16. The engine died during a pause, and the caller waited for ever.
    tests/engine/test_common_engine.py::test_a_failing_step_answers_every_request_and_call_and_ends_the_loop
17. A paused engine made no tokens and was reported as unhealthy. A router removed it.
    tests/engine/pauses/test_pause.py::test_a_paused_engine_sends_heartbeats
    tests/http/control/test_control_routes.py::test_health_and_ready_while_paused_rejecting_dead_and_restarted
18. A pause whose controller died froze the engine for ever. A wake-up from sleep released another caller's pause.
    tests/engine/pauses/test_pause_holds.py::test_a_hold_ends_after_its_ttl
    tests/engine/pauses/test_pause_holds.py::test_an_anonymous_resume_leaves_named_and_system_holds
    tests/engine/test_sleep.py::test_no_resume_and_no_reset_ends_a_sleep
    tests/engine/test_sleep.py::test_wake_releases_only_the_hold_of_sleep
    tests/engine/pauses/test_scope_holds.py::test_a_hold_of_an_adapter_ends_with_its_ttl_and_by_its_name_alone
19. Results for a client that had gone were kept for ever. A client that connected again got its request run twice.
    tests/engine/test_common_engine.py::test_a_heartbeat_finds_a_dead_client_and_its_requests_end
    tests/engine/test_common_engine.py::test_a_request_id_can_be_used_again_only_after_its_request_has_ended
    tests/engine/requests/test_retention.py::test_a_repeated_request_gets_every_token_once_and_nothing_is_computed_twice
20. An abort of all requests reached one API server only. Two API servers disagreed about the state.
    test_all_clients_see_one_state_and_an_abort_of_all_reaches_everybody
21. After an update, later requests matched cached prefixes that the old weights had computed.
    tests/engine/updates/test_weight_update.py::test_there_is_no_prefix_hit_on_kv_of_the_old_weights
    tests/engine/updates/test_update_exactness.py::test_at_every_switch_point_the_continuation_is_that_of_torch
22. The version label changed one token too early. Of several choices, only the first one had labels.
    tests/engine/test_common_engine.py::test_an_update_between_two_steps_changes_the_label_at_exactly_one_token
    tests/http/openai/test_token_meaning.py::test_every_choice_tells_its_own_weight_versions_and_their_bounds
23. Weights and label changed in two calls. A crash between the calls left a wrong label.
    tests/engine/updates/test_weight_session.py::test_a_commit_replaces_all_weights_at_once_while_requests_run
24. A failed part of an update left half-new weights, and requests ran with them.
    tests/engine/updates/test_weight_session.py::test_a_refused_part_ends_the_session_and_later_calls_name_the_reason
    tests/worker/test_staging.py::test_every_kind_of_damage_in_a_chunk_is_refused_by_name_and_changes_nothing
25. An update while the weights slept crashed the engine. A trainer that died left its session open for ever.
    tests/engine/test_sleep.py::test_an_update_while_the_weights_sleep_is_refused
    tests/engine/updates/test_weight_session.py::test_a_session_ends_with_its_lease_and_the_next_one_may_begin
26. A new version label aborted all requests in flight.
    tests/engine/updates/test_label_and_reset.py::test_a_new_label_changes_no_earlier_span_no_kv_and_no_request
    tests/http/dialects/test_sglang_weights.py::test_a_folder_becomes_one_update_that_aborts_nothing
27. Fused weights were packed once for each part of an upload, and came out wrong without an error.
    tests/worker/test_staging.py::test_no_tensor_waits_unpacked_for_the_rest_of_its_linear
    tests/worker/test_staging.py::test_tensors_that_arrive_one_by_one_in_any_order_make_the_weights_that_were_sent
28. An adapter was loaded again from the same path, and its old KV was used. Running requests changed adapters without
    a label. An unload never ended behind a pause.
    tests/engine/pauses/test_paused_adapters.py::test_a_reload_leaves_no_prefix_hit_on_kv_of_the_adapter_before
    tests/engine/pauses/test_paused_adapters.py::test_a_reload_of_a_paused_adapter_changes_the_weights_of_its_frozen_requests
    tests/engine/pauses/test_paused_adapters.py::test_an_unload_during_a_pause_is_done_at_once_and_old_requests_finish_on_their_weights
29. A reset of the cache was refused while frozen requests existed, so the trainer gave up.
    tests/engine/updates/test_label_and_reset.py::test_the_cache_can_be_reset_in_every_state_of_the_engine
30. Uploaded tensors were deserialised by pickle, which runs code.
    tests/model_executor/test_sources.py::test_a_pickle_is_never_opened_whatever_its_name
    tests/http/dialects/test_sglang_weights.py::test_a_pickle_is_refused_and_never_run
31. A request that was sent again got too many tokens, or logprobs of another length than its tokens.
    tests/rl/test_continuation.py::test_a_continuation_asks_for_the_remaining_tokens_with_the_same_seed_and_choice
    tests/rl/test_continuation.py::test_missing_logprobs_and_too_many_tokens_raise
32. Session id 0 was taken for no session. The version was read when the reply arrived, not when the token was made.
    tests/rl/test_server_state.py::test_the_server_gets_the_session
    tests/rl/test_staleness.py::test_the_staleness_of_a_rollout_is_that_of_its_oldest_token
33. A restarted engine served the weights of its start without saying so. A folder was read after its deletion.
    tests/engine/updates/test_weight_update.py::test_an_engine_that_lost_a_commit_is_held_until_the_next_commit
    tests/worker/test_stage.py::test_the_folder_may_be_deleted_as_soon_as_stage_returns
34. Logprobs were of another distribution than the trainer's. An unsupported field was ignored and changed the data.
    tests/http/openai/test_token_meaning.py::test_a_field_that_would_change_the_tokens_is_refused_unless_its_value_is_neutral
35. An update without a version label left the cached prefixes of the old weights in use.
    tests/engine/updates/test_weight_update.py::test_there_is_no_prefix_hit_on_kv_of_the_old_weights
36. A dead API server left its requests running, and a drain waited for them.
    test_a_drain_does_not_wait_for_the_requests_of_a_dead_client
37. A pause treated a preempted request as waiting, and lost the tokens that it had already sent.
    test_a_preempted_request_is_drained_like_a_running_one
    test_a_preempted_request_is_aborted_with_its_tokens
38. Frozen requests of one adapter kept the places in the batch and the KV that others needed.
    tests/engine/pauses/test_scopes.py::test_one_adapter_is_kept_while_the_other_runs
    tests/engine/pauses/test_scopes.py::test_frozen_requests_of_a_paused_adapter_are_preempted_for_others
    tests/engine/pauses/test_scopes.py::test_held_requests_of_an_adapter_take_no_place_in_the_queue_of_others
39. Equal prompts of one request drew equal samples.
    tests/http/openai/test_random_numbers.py::test_choices_are_numbered_over_all_prompts_of_a_body
40. A message that cannot be encoded ended the engine's loop.
    tests/inter_communicator/test_encoding.py::test_text_that_utf_8_cannot_hold_is_replaced_and_the_rest_is_whole
    tests/e2e/test_weight_session.py::test_an_upload_whose_tensor_has_a_name_that_utf_8_cannot_hold_is_refused_and_the_engine_lives_on
41. A file whose opening never ends (a FIFO, a dead mount) blocked updates and sleep, with a hold that nothing released.
    tests/core/test_files.py::test_only_a_regular_file_is_opened_and_nothing_stays_open
    tests/engine/test_staging_thread.py::test_a_sleep_that_waits_for_a_read_times_out_and_releases_its_hold
42. The numbers of a safetensors header were multiplied before they were bounded: 12 s without a step.
    tests/model_executor/test_sources.py::test_a_hostile_header_is_refused_in_few_words
43. A large reply blocked an API server's event loop. The fence was late, and the server lost all its requests.
    tests/http/openai/test_pace.py::test_a_whole_reply_is_made_in_slices
    tests/engine/pauses/test_pause_fence.py::test_a_slow_client_keeps_its_requests_and_the_report_names_it
44. An engine that was busy with a long call was killed as stuck. A stuck engine was not noticed while nobody called it.
    tests/client/test_engine_client.py::test_a_silent_engine_is_killed_though_nobody_calls_and_answers_everything_that_is_open
    tests/client/test_engine_client.py::test_an_engine_that_beats_is_never_killed_however_long_a_call_takes
45. A route that copies folders followed links out of its root, and widened file permissions.
    tests/http/dialects/test_pull_weights.py::test_no_link_leads_a_pull_out_of_where_it_reads_and_writes
    tests/http/dialects/test_pull_weights.py::test_only_checkpoint_files_are_copied_and_none_gets_wider_permissions
46. A web page could pause a server on loopback. An upload of weights needed no key.
    tests/http/guards/test_browser_guard.py::test_no_page_reaches_the_engine_on_any_route_that_changes_something
    tests/http/guards/test_route_access.py::test_an_upload_to_an_exposed_server_needs_the_control_key
47. A hold outlived its client. The retries of a group of requests shared one request id.
    tests/rl/test_holds.py::test_a_trainer_that_dies_inside_a_pause_leaves_no_hold_behind
    tests/rl/test_request_ids.py::test_a_named_group_that_is_aborted_twice_loses_no_token
48. A reader of streams split lines at characters that JSON does not escape.
    tests/rl/test_replies.py::test_the_client_reads_text_with_every_separator
    tests/http/openai/test_generation_routes.py::test_text_never_ends_a_line_of_a_stream_for_any_reader
49. A replica that joined read the source of an adapter again, which the trainer had overwritten. Two adapters, one label.
    tests/fleet/test_join.py::test_a_joiner_gets_the_adapter_that_was_loaded_though_the_trainer_has_overwritten_the_folder
    tests/fleet/test_control_weights.py::test_an_adapter_that_the_members_have_read_differently_is_loaded_nowhere
    tests/fleet/test_transaction_machine.py::test_all_members_have_one_state_whatever_is_lost_late_or_doubled
50. An unload and a load of a name began its epoch again. Two adapters had one label: in an answer that a client joined,
    after a failover, and at a replica that joined with the adapter before.
    tests/engine/adapters/test_adapters.py::test_no_name_has_an_adapter_epoch_twice_and_no_name_is_remembered
    tests/rl/test_adapters.py::test_publications_of_a_name_go_on_after_an_unload_and_no_span_joins_two_adapters
    tests/fleet/test_failover.py::test_a_request_of_an_unloaded_adapter_does_not_go_on_with_another_one_of_its_name
    tests/fleet/test_join.py::test_an_old_adapter_of_an_engine_that_was_cut_off_is_never_taken_for_a_new_one_of_its_name
    tests/fleet/test_control_weights.py::test_no_number_of_an_adapter_is_used_twice
51. A replica that joined did not get the EOS ids of the last update, which a commit changes beside the tensors.
    tests/fleet/test_join.py::test_a_joiner_ends_texts_at_the_eos_ids_of_the_last_update
    tests/fleet/test_join.py::test_engines_whose_start_has_the_tensors_of_the_fleet_get_its_eos_ids_too
52. A part of the prompt's logprobs, after an abort within the prompt, was taken for all of them.
    tests/rl/test_continuation.py::test_a_part_of_the_prompt_logprobs_is_not_taken_for_all_of_them
    tests/http/openai/test_token_meaning.py::test_after_an_abort_within_the_prompt_prompt_logprobs_are_null_on_every_route
53. A page of metrics was cut at characters that only Unicode calls line ends. Nobody could read it, or it had forged lines.
    tests/fleet/test_reports.py::test_names_of_adapters_neither_break_nor_add_a_sample
    tests/http/fleet/test_replica_routes.py::test_the_metrics_of_a_fleet_are_readable_whatever_the_names_of_its_adapters
54. A hostile config of one tenant held the loads of all others. The time that a load waited did not count in its
    timeout.
    tests/engine/adapters/test_adapter_loads.py::test_a_config_whose_expressions_take_long_holds_no_other_load
    tests/engine/adapters/test_adapter_loads.py::test_a_load_whose_time_ends_while_it_waits_for_another_one_is_refused_then
    tests/model_executor/test_lora_config.py::test_an_expression_that_takes_for_ever_is_refused_once_and_other_threads_run_meanwhile
55. A queue without a bound was in front of queues with one: while nothing took requests, all of them waited.
    tests/fleet/test_relay.py::test_what_waits_while_no_replica_takes_requests_is_bounded_by_their_queues
    tests/fleet/test_drain.py::test_a_fleet_whose_replicas_are_all_drained_lets_a_bounded_number_wait_and_is_not_ready
56. An id that the server made of a client's id could be the id of another client.
    tests/fleet/test_relay.py::test_no_client_can_have_a_request_of_the_name_under_which_a_choice_goes_on
    tests/http/dialects/test_sglang.py::test_one_rid_of_a_batch_becomes_one_for_each_prompt_and_aborts_them_all
57. An abort of a tenant that has no adapter yet was an error, and its first sync never came.
    tests/http/dialects/test_adapter_callers.py::test_the_first_sync_of_a_skyrl_tenant_aborts_an_adapter_that_was_never_loaded
58. The refusal of a long prompt lacked the words that clients look for ("maximum context length").
    tests/http/openai/test_context_length.py::test_every_route_says_in_the_same_words_that_a_request_is_too_long
59. A stream had other tool calls than the whole reply, or arguments that were no JSON.
    tests/client/chat_format/test_chat_parser.py::test_the_message_does_not_depend_on_how_the_text_is_cut
    tests/http/openai/test_chat_tools.py::test_the_stream_has_the_message_and_the_ids_of_the_whole_reply
60. A broken tool call was lost, became another call, or made the reply an error.
    tests/client/chat_format/test_chat_parser.py::test_a_broken_call_is_content_that_is_flagged
    tests/http/openai/test_chat_tools.py::test_a_broken_call_is_content_with_a_flag
61. Each part of a sync put back the experts that it did not have. After the first sync a mixture of experts wrote nonsense.
    tests/worker/test_mixture_updates.py::test_experts_that_arrive_in_parts_are_those_that_were_sent_in_each_sync
    tests/worker/test_mixture_updates.py::test_a_partial_update_changes_the_experts_that_it_has_and_no_other
    tests/worker/test_mixture_updates.py::test_a_full_update_without_an_expert_names_it_and_changes_nothing
    tests/worker/test_mixture_updates.py::test_deltas_of_experts_make_the_weights_of_the_trainer_in_turn
"""  # noqa: E501

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fastdeploy.engine.pauses.pause import FENCE_TIMEOUT_S
from fastdeploy.inter_communicator import messages as m
from support.fake_runner import FakeRunner, expected_tokens
from support.harness import Harness

ROOT = Path(__file__).resolve().parent.parent


def test_every_test_of_the_table_exists():
    table = re.findall(r"^    (?:(tests/\S+)::)?(test_\w+)$", __doc__, re.M)
    numbers = [int(n) for n in re.findall(r"^(\d+)\. ", __doc__, re.M)]
    assert numbers == list(range(1, 62)) and len(table) >= 60
    for path, name in table:
        source = (ROOT / (path or "tests/test_known_failures.py")).read_text()
        assert re.search(rf"^(async )?def {name}\(", source, re.M), name


def test_an_abort_that_races_with_the_end_leaves_nothing_behind():
    h = Harness()
    h.add("r", [1, 2], max_tokens=3)
    h.run_rounds(2)
    h.send(m.CancelRequest("r", None, "stop"))  # r has ended, and its end is not sent yet
    assert h.ask(m.AbortArgs(["r"])).result == {"aborted": [], "not_found": ["r"]}
    h.run_out()
    assert h.ask(m.AbortArgs(["r"])).result["not_found"] == ["r"]
    h.transport.sent["a"].clear()
    h.add("r", [1, 2], max_tokens=3)
    h.run_rounds()
    assert h.pause(mode="wait").failure is None
    assert h.stream("r").tokens == expected_tokens([1, 2], 3) and h.stream("r").reason == "length"


def test_after_a_failed_pause_the_next_one_really_drains():
    h = Harness()
    h.add("r", [1, 2], max_tokens=30)
    h.run_rounds(2)
    call = h.call(m.PauseArgs(mode="wait", timeout_s=1.0, on_timeout="cancel"))
    h.run_rounds()
    h.now += 1.0
    h.run_rounds()
    assert h.reply(call).failure.code == "pause_timeout"
    assert not h.status()["is_paused"] and not h.status()["rejecting_new_requests"] and h.status()["holds"] == []
    again = h.call(m.PauseArgs(mode="wait"))
    h.run_rounds()
    assert h.reply(again) is None, "r still runs"
    h.run_rounds(30)
    assert h.reply(again).failure is None and h.stream("r").tokens == expected_tokens([1, 2], 30)


def test_an_aborted_request_returns_every_token_that_was_computed():
    for rounds in range(1, 6):
        h = Harness()
        for i in range(3):
            h.add(f"r{i}", [i + 1] * 3, max_tokens=50)
        h.run_rounds(rounds)
        counts = {f"r{i}": h.engine.lifecycle.requests.get(f"r{i}")[0].num_output_tokens for i in range(3)}
        reply = h.ask(m.AbortArgs(abort_all=True)).result
        assert {x["request_id"]: x["output_token_count"] for x in reply["aborted"]} == counts
        for name, count in counts.items():
            assert len(h.stream(name).tokens) == count == rounds


def test_an_abort_may_be_repeated():
    h = Harness()
    h.add("r", [1, 2], max_tokens=30)
    h.run_rounds(2)
    first, second = h.call(m.AbortArgs(["r", "r"])), h.call(m.AbortArgs(["r"]))
    h.run_rounds()
    assert len(h.reply(first).result["aborted"]) == 1 and h.reply(first).result["not_found"] == []
    assert h.reply(second).result["not_found"] == ["r"]
    assert len(h.stream("r").finals) == 1 and h.ask(m.AbortArgs(["r"])).result["not_found"] == ["r"]


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_request_that_reaches_the_engine_after_the_pause_does_not_run(mode):
    h = Harness()
    call = h.call(m.PauseArgs(mode=mode))
    h.add("late", [1, 2], max_tokens=3)
    h.run_rounds(5)
    assert h.reply(call).failure is None and h.runner.computed_tokens == 0
    assert (h.rejected("late") is None) == (mode != "abort")


def test_an_idle_loop_sleeps_until_the_next_deadline():
    h = Harness(heartbeat_s=100.0)
    h.run_rounds()
    waits = []
    recv, h.transport.recv = h.transport.recv, lambda timeout_s: (waits.append(timeout_s), recv(timeout_s))[1]
    h.engine.run_once(block=True)
    h.pause(mode="keep", ttl_s=30.0)
    waits.clear()
    h.engine.run_once(block=True)
    h.connect("b")
    h.transport.mute.add("b")
    h.send(m.Call(99, m.PauseArgs(mode="keep", timeout_s=60.0)))
    h.run_rounds()
    h.engine.run_once(block=True)  # reads a's acknowledgement
    waits.clear()
    h.engine.run_once(block=True)
    assert waits == [FENCE_TIMEOUT_S], "of the ttl, the timeout, the fence and the heartbeat the fence is due first"
    h.resume()
    h.add("r", [1], max_tokens=3)
    h.run_rounds()
    waits.clear()
    h.engine.run_once(block=True)
    assert waits == [0.0, 0.0], "with work to do it does not wait, neither before the step nor between its layers"


def test_a_reply_never_comes_before_its_call_was_read():
    h = Harness()
    calls = [h.call(args) for args in (m.PauseArgs(mode="keep"), m.PauseStatusArgs(), m.AbortArgs(), m.ResumeArgs())]
    assert [h.reply(call) for call in calls] == [None] * 4
    h.run_rounds(3)
    assert all(h.reply(call) is not None for call in calls)


def test_all_clients_see_one_state_and_an_abort_of_all_reaches_everybody():
    h = Harness()
    h.connect("b")
    h.add("of_a", [1, 2], max_tokens=30)
    h.add("of_b", [3, 4], client="b", max_tokens=30)
    h.run_rounds(2)
    h.ask(m.PauseArgs(mode="keep"), client="b", rounds=3)
    seen = [h.ask(m.PauseStatusArgs(), client=client).result for client in "ab"]
    assert seen[0] == seen[1] and seen[0]["is_paused"]
    reply = h.ask(m.AbortArgs(abort_all=True), client="b").result
    assert {x["request_id"] for x in reply["aborted"]} == {"of_a", "of_b"}
    assert h.stream("of_a").reason == h.stream("of_b", client="b").reason == "abort"
    h.add("late", [5])
    h.add("late_b", [5], client="b")
    h.ask(m.ResumeArgs())
    h.run_out()
    assert h.stream("late").reason == h.stream("late_b", client="b").reason == "length"


def test_a_drain_does_not_wait_for_the_requests_of_a_dead_client():
    h = Harness(FakeRunner(num_blocks=128))
    h.connect("b")
    h.add("of_b", [3, 4], client="b", n=2, max_tokens=100)
    h.add("of_a", [1, 2], max_tokens=10)
    h.run_rounds(3)
    call = h.call(m.PauseArgs(mode="wait"))
    h.run_rounds()
    h.transport.gone.add("b")
    h.run_rounds(12)
    assert h.reply(call).failure is None and h.reply(call).result["counts"]["kept"] == 0
    assert h.stream("of_a").tokens == expected_tokens([1, 2], 10)
    assert h.engine.kv.num_free == h.runner.info.num_blocks


def with_a_preempted_request() -> tuple[Harness, str]:
    """Return a harness with four requests and KV blocks for three, and the name of a preempted request with tokens."""
    h = Harness(FakeRunner(num_blocks=20, max_model_len=64))
    for i in range(4):
        h.add(f"r{i}", [i + 1] * 8, max_tokens=30)
    for _ in range(100):
        h.run_rounds()
        for request in h.engine.lifecycle.requests:
            if request in h.engine.scheduler.waiting and request.num_output_tokens:
                return h, request.key[0]
    raise AssertionError("nothing was preempted")


def test_a_preempted_request_is_drained_like_a_running_one():
    h, name = with_a_preempted_request()
    h.add("fresh", [9], max_tokens=2)
    report = h.pause(mode="wait", rounds=200).result
    assert report["counts"] == {"aborted": 0, "drained": 4, "kept": 0, "queued": 1}
    assert h.stream(name).tokens == expected_tokens([int(name[1]) + 1] * 8, 30) and h.stream("fresh").tokens == []


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_a_preempted_request_is_aborted_with_its_tokens(mode):
    h, name = with_a_preempted_request()
    seen = list(h.stream(name).tokens)
    report = h.pause(mode=mode).result
    if mode == "keep":
        assert report["counts"]["kept"] == 4
        h.ask(m.AbortArgs(abort_all=True))
    else:
        assert report["tokens_returned"] == sum(len(h.stream(f"r{i}").tokens) for i in range(4))
    stream = h.stream(name)
    assert stream.tokens == seen and stream.reason == "abort"
    assert not stream.finals[0].message.startswith("Abort before prefill")
