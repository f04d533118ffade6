"""The queue of waiting requests."""

from __future__ import annotations

import random

import pytest

from fastdeploy.core.request import Group, Request, RequestEvent, Scope
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.served_weights import WHOLE_ENGINE
from fastdeploy.scheduler.queue import WaitingQueue

SCOPE = Scope(WHOLE_ENGINE)


def make(name: str, order: tuple[int, int], started: bool = False) -> Request:
    group = Group("a", AddRequest(name, [1], SamplingParams()), SCOPE.model)
    group.requests = [Request(group, 0, order, 1)]
    group.started = started
    return group.requests[0]


def test_random_operations_give_the_results_of_a_sorted_list():
    random.seed(3)
    queue, model = WaitingQueue(), []
    for i in range(3000):
        act = random.random()
        if act < 0.5 or not model:
            request = make(str(i), (random.randrange(3), i), started=random.random() < 0.2)
            queue.push(request)
            model.append(request)
        elif act < 0.75:
            request = model.pop(random.randrange(len(model)))
            queue.remove(request)
        elif act < 0.85:
            request = min(model, key=lambda r: r.order)
            queue.remove(request)  # the heap keeps the old entry
            queue.push(request)
        else:
            request = random.choice(model)
            if not request.group.started:
                request.group.started = True
                queue.promote(request)
        assert len(queue) == len(model)
        assert queue.started_of(SCOPE) == sum(r.group.started for r in model)
        started = [r for r in model if r.group.started]
        assert queue.head(started_only=False) is min(model, key=lambda r: r.order, default=None)
        assert queue.head(started_only=True) is min(started, key=lambda r: r.order, default=None)
    queue.check_integrity()


def test_entries_of_removed_requests_do_not_pile_up():
    queue = WaitingQueue()
    queue.push(make("first", (0, 0)))
    for i in range(1, 10000):
        request = make(str(i), (0, i))
        queue.push(request)
        queue.remove(request)
    assert max(len(line._heap) for line in queue._lines) < 200 and len(queue) == 1


def test_a_running_request_cannot_be_queued():
    queue, request = WaitingQueue(), make("r", (0, 1))
    request.advance(RequestEvent.ADMIT)
    with pytest.raises(AssertionError):
        queue.push(request)
