"""How many tokens a step may have."""

from __future__ import annotations

from fastdeploy.scheduler.pacer import StepPacer


def test_before_anything_is_known_a_step_is_small():
    assert StepPacer(2048, 0.25).budget() == StepPacer.FIRST_GUESS
    assert StepPacer(20, 0.25).budget() == 20


def test_the_budget_follows_what_prompt_tokens_cost():
    pacer = StepPacer(2048, 0.25)
    for _ in range(50):
        pacer.observe(256, 0.256)  # 1 ms each
    assert 128 <= pacer.budget() <= 256 and pacer.budget() % StepPacer.ALIGN == 0
    for _ in range(50):
        pacer.observe(256, 0.0256)
    assert pacer.budget() == 2048


def test_a_step_always_makes_progress_however_slow_the_device():
    pacer = StepPacer(2048, 0.01)
    pacer.observe(256, 100.0)
    assert pacer.budget() == StepPacer.ALIGN


def test_decodes_beside_the_prompt_leave_less_room_for_it():
    pacer = StepPacer(2048, 0.25)
    for _ in range(50):
        pacer.observe(0, 0.2)
        pacer.observe(256, 0.2 + 0.128)  # 0.5 ms each
    assert pacer.budget() == 64


def test_a_short_prompt_says_little_about_the_cost_of_a_token():
    pacer = StepPacer(2048, 0.25)
    for _ in range(50):
        pacer.observe(256, 0.128)
    budget = pacer.budget()
    pacer.observe(4, 0.01)
    assert pacer.budget() >= budget - StepPacer.ALIGN


def test_small_steps_beside_many_decodes_are_found_to_be_too_small():
    """After one slow step the budget is at its least; decodes take half of that, and prompts get the rest."""
    pacer = StepPacer(2048, 0.25)
    pacer.observe(32, 0.16)
    assert pacer.budget() == 64
    for _ in range(50):
        prefill = pacer.budget() - 32
        pacer.observe(0, 0.04)
        pacer.observe(prefill, 0.04 + prefill * 0.0004)
    assert pacer.budget() > 400
