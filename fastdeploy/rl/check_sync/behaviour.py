"""The check of how an engine answers prompts: for engines that do not show their weights, and for the KV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fastdeploy.rl.check_sync.report import BehaviourReport, ServingState, Verdict
from fastdeploy.rl.check_sync.weights import TrainerWeights


class Asked(NamedTuple):
    """An engine to ask. url: without /v1 and without a slash at its end. headers: with the key, if there is one.
    model_name: of /v1/models. state: what the engine says of itself."""

    url: str
    headers: Mapping[str, str]
    model_name: str
    state: ServingState


def check_behaviour(asked: Asked, trainer: TrainerWeights, previous: Sequence[TrainerWeights] = ()) -> BehaviourReport:
    """Compare the answers of an engine with those of the trainer's weights. previous: earlier weights, the latest
    first. Raises OSError for what the engine refuses or does not answer."""
    return BehaviourReport(Verdict.UNKNOWN, "The answers of the engine were not checked.")
