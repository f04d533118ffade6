"""The standby copy: updates use its memory, and it never holds or changes what serves."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable

import numpy as np
import pytest

from fastdeploy.core import delta_format
from fastdeploy.core.errors import OutOfSpace, WeightUpdateRefused
from fastdeploy.core.fingerprint import fingerprint, over_all
from fastdeploy.model_executor.ops import get_ops
from fastdeploy.model_executor.ops.blocks import PackedLinear
from fastdeploy.model_executor.ops.interface import DeltaItem, Region
from fastdeploy.model_executor.parameters import linear, vector
from fastdeploy.testing.checkpoints import random_tensors
from fastdeploy.worker import standby as standby_module
from fastdeploy.worker.model_runner import ModelRunner
from fastdeploy.worker.standby import MARGIN, StandbyCopy
from support.step_driver import outputs, sleep, update, wake
from worker.new_weights import NORM, SPEC, K, Q, V, new_tensors, sha


def linears(runner: ModelRunner) -> list[PackedLinear]:
    return [value for value in runner.weights.values.values() if hasattr(value, "out_features")]


def same(some: list[PackedLinear], others: list[PackedLinear]) -> list[bool]:
    return [one is other for one, other in zip(some, others, strict=True)]


def nbytes(runner: ModelRunner) -> int:
    return sum(weight.nbytes for weight in linears(runner))


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModelRunner], list[tuple]]:
    """Return a function that lists the weights that a runner allocates from now on."""

    def watch(runner: ModelRunner) -> list[tuple]:
        found, new_linear = list[tuple](), runner.ops.new_linear
        monkeypatch.setattr(runner.ops, "new_linear", lambda *args: found.append(args) or new_linear(*args))
        return found

    return watch


def test_updates_take_turns_between_two_copies_and_allocate_nothing(make_runner, part, allocated):
    runner = make_runner("qwen2", standby_weights="on")
    runner.refresh_standby()
    copies, new = [linears(runner)], allocated(runner)
    for seed in range(4):
        update(runner, part(new_tensors(seed=seed)))
        runner.refresh_standby()
        copies.append(linears(runner))
    assert not new and not any(same(copies[0], copies[1]))
    assert all(all(same(copies[i], copies[i + 2])) for i in range(3))
    assert runner.standby_nbytes == nbytes(runner)


def test_the_copy_is_made_at_the_first_refresh_or_of_the_first_old_weights(make_runner, part):
    runner = make_runner("qwen2", standby_weights="on")
    assert runner.standby_nbytes == 0
    runner.refresh_standby()
    assert runner.standby_nbytes == nbytes(runner)
    other = make_runner("qwen2", standby_weights="on")
    update(other, part(new_tensors()))
    assert other.standby_nbytes == nbytes(other)


def test_without_a_standby_copy_the_old_weights_are_freed_at_the_commit(make_runner, part):
    runner = make_runner("qwen2", standby_weights="off")
    old = [weakref.ref(weight) for weight in linears(runner)]
    runner.refresh_standby()
    update(runner, part(new_tensors()))
    assert runner.standby_nbytes == 0 and not any(weight() for weight in old)


def test_auto_makes_and_keeps_the_copy_only_where_memory_allows(make_runner, part, monkeypatch):
    free = [0]
    monkeypatch.setattr(standby_module, "free_memory", lambda: free[0])
    runner = make_runner("qwen2", standby_weights="auto")
    enough = MARGIN + nbytes(runner) + runner.cache.nbytes
    for free[0], made in ((enough - 1, False), (enough, True)):
        runner.refresh_standby()
        assert (runner.standby_nbytes > 0) == made
    for free[0], kept in ((MARGIN, True), (MARGIN - 1, False)):
        update(runner, part(new_tensors()))
        assert runner.standby_nbytes == (nbytes(runner) if kept else 0)


def test_a_copy_that_does_not_fit_is_reported_and_the_old_weights_serve_on(make_runner, part, monkeypatch):
    runner = make_runner("qwen2", standby_weights="on")
    before = outputs(runner)

    def no_memory(*args):
        raise MemoryError("no memory for a packed weight")

    with monkeypatch.context() as patch:
        patch.setattr(runner.ops, "new_linear", no_memory)
        with pytest.raises(OutOfSpace, match="standby"):
            runner.refresh_standby()
    assert outputs(runner) == before
    runner.refresh_standby()
    assert runner.standby_nbytes == nbytes(runner)


def test_sleeping_weights_give_the_standby_copy_back(make_runner, part):
    runner = make_runner("qwen2", standby_weights="on")
    runner.refresh_standby()
    sleep(runner, "kv_cache")
    assert runner.standby_nbytes > 0
    sleep(runner, "weight")
    assert runner.standby_nbytes == 0
    runner.refresh_standby()  # without weights there is nothing to copy
    wake(runner, "weight", "kv_cache")
    assert runner.standby_nbytes == 0
    update(runner, part(new_tensors()))
    assert runner.standby_nbytes == nbytes(runner)


@pytest.mark.parametrize("how", ["refused", "abandoned", "failed in place"])
def test_the_memory_of_an_update_that_failed_is_used_by_the_next(how, make_runner, part, allocated, fresh):
    runner, new = make_runner("qwen2", standby_weights="on"), new_tensors()
    runner.refresh_standby()
    found = allocated(runner)
    staging = runner.begin_update(False, how == "failed in place")
    if how == "refused":
        diverged = new[K].copy()
        diverged[0, 0] = np.nan
        with pytest.raises(WeightUpdateRefused):
            staging.add(part(new | {K: diverged}), {})
    else:
        staging.add(part(new_tensors(seed=3)), {})
    staging.abandon()
    update(runner, part(new))
    assert not found and outputs(runner) == fresh(SPEC, new)


def test_any_order_of_updates_and_failures_serves_what_was_committed(make_runner, part):
    """Without a standby copy, and with one that is refreshed now and then."""
    rng = random.Random(1)
    for policy in ("on", "off"):
        runner, serving = make_runner("qwen2", standby_weights=policy), random_tensors(SPEC)
        for seed in range(25):
            kind = rng.choice(["full", "partial", "refused", "abandoned", "in place", "sleep"])
            new = new_tensors(seed=seed)
            names = rng.sample(sorted(new), rng.randint(1, 9)) if kind != "full" else list(new)
            staging = runner.begin_update(kind != "full", kind == "in place") if kind != "sleep" else None
            if staging is None:
                sleep(runner, "weight")
                wake(runner, "weight")
            elif kind == "refused":
                broken = new[Q].copy()
                broken[-1, -1] = np.inf
                with pytest.raises(WeightUpdateRefused):
                    staging.add(part({name: new[name] for name in names} | {Q: broken}), {})
                staging.abandon()
            else:
                half = len(names) // 2
                for some in (names[:half], names[half:]):
                    staging.add(part({name: new[name] for name in some}), {})
                staged = staging.finish()
                if kind == "abandoned":
                    staging.abandon()
                else:
                    runner.commit(staged.weights)
                    serving |= {name: new[name] for name in names}
            if rng.random() < 0.5:
                runner.refresh_standby()
            assert runner.checksums() == {name: sha(array) for name, array in serving.items()}, (seed, kind)
            assert runner.fingerprint == over_all({name: fingerprint(array) for name, array in serving.items()})


# ---------------------------------------------------------------------- the copy alone

LINEAR, PLAIN = linear("l", {"a": 16, "b": 32}, 8, bias=True), linear("p", {"c": 16}, 4)
OPS = get_ops("float32")


def packed(seed: int) -> dict[str, PackedLinear]:
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=(48, 8)).astype(np.float32)
    biased = OPS.pack_linear([weight], [rng.normal(size=48).astype(np.float32)])
    return {"l": biased, "p": OPS.pack_linear([rng.normal(size=(16, 4)).astype(np.float32)])}


def equal(one: PackedLinear, other: PackedLinear) -> bool:
    biases = OPS.unpack_bias(one), OPS.unpack_bias(other)
    return np.array_equal(OPS.unpack_linear(one), OPS.unpack_linear(other)) and np.array_equal(*biases)


@pytest.fixture
def copy() -> StandbyCopy:
    return StandbyCopy(OPS, [LINEAR, vector("n", "n.weight", 4), PLAIN], "on")


def overwrite(weight: PackedLinear, at: int, value: float) -> DeltaItem:
    payload = delta_format.overwrite(np.array([at]), np.array([value], np.float32))
    return DeltaItem(Region(48, 8, weight), payload)


def change(copy: StandbyCopy, serving: dict[str, PackedLinear], at: int) -> dict[str, PackedLinear]:
    """Commit a delta of one value of LINEAR, and of one of its biases."""
    loan = copy.lend(for_delta=True)
    weight = loan.current_linear(LINEAR, serving["l"])
    assert equal(weight, serving["l"])
    item = overwrite(weight, at, at + 0.5)
    assert OPS.apply_deltas([item], np.zeros(1, np.int32))[0].problem is None
    OPS.set_bias(weight, at, np.full(1, at, np.float32))
    new = serving | {"l": weight}
    copy.commit(loan, serving, new, {"l": [item]})
    return new


@pytest.mark.parametrize("refreshed", [False, True])
def test_each_copy_catches_up_by_the_delta_that_it_missed(refreshed, copy, monkeypatch):
    serving = packed(1)
    copy.refresh(serving)
    copied, copy_rows = [], OPS.copy_rows
    monkeypatch.setattr(OPS, "copy_rows", lambda *args: copied.append(args) or copy_rows(*args))
    for at in range(5):
        serving = change(copy, serving, at)
        if refreshed:
            copy.refresh(serving)
    assert OPS.unpack_linear(serving["l"]).reshape(-1)[:5].tolist() == [0.5, 1.5, 2.5, 3.5, 4.5]
    assert OPS.unpack_bias(serving["l"])[:5].tolist() == [0, 1, 2, 3, 4]
    assert not copied, "a copy of all rows costs more than the delta"


def test_a_large_delta_is_not_kept_but_the_rows_are_copied(copy):
    serving = packed(1)
    copy.refresh(serving)
    loan = copy.lend(for_delta=True)
    new = serving | {"l": loan.current_linear(LINEAR, serving["l"])}
    payload = np.zeros(48 * 8 * 4, np.uint8)
    copy.commit(loan, serving, new, {"l": [DeltaItem(Region(48, 8, new["l"]), payload)]})
    assert copy.nbytes == sum(weight.nbytes for weight in serving.values())
    OPS.set_bias(new["l"], 3, np.ones(1, np.float32))
    assert equal(copy.lend().current_linear(LINEAR, new["l"]), new["l"])


def test_stale_weights_are_copied_at_a_refresh_only_where_deltas_are_expected(copy, monkeypatch):
    serving, copied, copy_rows = packed(1), [], OPS.copy_rows
    copy.refresh(serving)
    monkeypatch.setattr(OPS, "copy_rows", lambda *args: copied.append(args) or copy_rows(*args))
    for expects, count in ((False, 0), (True, 2)):
        loan, new = copy.lend(for_delta=expects), packed(2)
        copy.commit(loan, serving, new, {})
        serving = new
        copy.refresh(serving)
        assert len(copied) == count
    copied.clear()
    copy.refresh(serving)
    assert not copied


def test_only_the_last_borrower_can_return_memory(copy):
    serving = packed(1)
    copy.refresh(serving)
    first = copy.lend()
    taken = first.linear(LINEAR)
    second = copy.lend()
    assert second.spares == {} and second.linear(LINEAR) is not taken
    copy.give_back(first)
    copy.refresh(serving)
    assert copy.nbytes == second.nbytes == serving["l"].nbytes
    copy.give_back(second)
    lost = copy.lend()
    copy.lose(lost)
    copy.give_back(lost)
    assert copy.nbytes == 0


def test_a_refresh_that_ends_after_a_sleep_brings_nothing_back(copy):
    loan = copy.lend()
    loan.linear(LINEAR)
    copy.drop()
    copy.give_back(loan)
    assert copy.nbytes == 0


def test_weights_that_were_staged_before_the_last_commit_bring_no_copy_of_their_time(copy):
    old, other = packed(1), packed(2)
    copy.refresh(old)
    loan = copy.lend()
    copy.commit(copy.lend(), old, other, {})
    copy.commit(loan, other, other, {})
    assert copy.nbytes == 0


def test_weights_that_serve_are_never_spare(copy):
    old, loan = packed(1), copy.lend()
    other = packed(2)
    copy.commit(copy.lend(), old, other, {})
    copy.commit(loan, other, old, {})  # staged before ``other``, with parts of the old weights
    spares = copy.lend().spares
    assert sorted(spares) == ["l", "p"] and all(spare.weight is other[key] for key, spare in spares.items())
    copy.commit(copy.lend(), old, old, {})
    assert copy.nbytes == 0


def test_what_a_failed_job_wrote_is_stale_and_the_rest_is_not(copy):
    serving = packed(1)
    copy.refresh(serving)
    loan = copy.lend()
    OPS.set_bias(loan.linear(LINEAR), 0, np.ones(48, np.float32))
    copy.give_back(loan)
    loan = copy.lend()
    assert loan.spares["l"].missed is None and loan.spares["p"].missed == ()
    assert all(equal(loan.current_linear(p, serving[p.key]), serving[p.key]) for p in (LINEAR, PLAIN))


def test_an_update_after_a_sleep_that_discarded_the_weights_needs_memory_for_one_set_only(make_runner, part):
    """The way for a model whose two sets of packed weights do not fit into memory."""
    runner, new = make_runner("qwen2", standby_weights="off"), new_tensors()
    one_set = sum(weight.nbytes for weight in linears(runner))
    sleep(runner, "weight", discard=True)
    assert runner.weights is None and runner.standby_nbytes == 0
    wake(runner, "weight")
    staging = runner.begin_update(False)
    staging.add(part(new), {})
    assert runner.standby_nbytes == one_set
    runner.commit(staging.finish().weights)
    assert runner.standby_nbytes == 0 and sum(weight.nbytes for weight in linears(runner)) == one_set


def test_a_partial_update_leaves_the_rest_of_the_copy_equal(make_runner, part):
    runner, new = make_runner("qwen2", standby_weights="on"), new_tensors()
    runner.refresh_standby()
    update(runner, part({name: new[name] for name in (Q, V, NORM)}), partial=True)
    spares = runner._standby.lend().spares
    assert {key for key, spare in spares.items() if spare.missed is None} == {"layers.1.qkv"}
