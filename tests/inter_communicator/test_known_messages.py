"""What the messages of one version say to a process of another version."""

from __future__ import annotations

from copy import deepcopy

from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.inter_communicator import messages as m
from fastdeploy.inter_communicator.known_messages import cannot, foreign_to, known_messages, lacking

KNOWN = known_messages()


def without(*names: str) -> dict[str, dict[str, bool]]:
    """Return what a version knows that lacks these structs, and fields as "struct.field"."""
    known = deepcopy(KNOWN)
    for name in names:
        struct, _, field = name.partition(".")
        if field:
            del known[struct][field]
        else:
            del known[struct]
    return known


def test_a_process_of_the_same_version_knows_everything():
    assert cannot(KNOWN) == foreign_to(KNOWN) == []
    assert KNOWN["SamplingParams"]["seed"] is False and KNOWN["AddRequest"]["prompt_token_ids"] is True


def test_a_call_that_the_other_version_lacks_and_a_field_that_is_given_are_named():
    old = without("SleepArgs", "PauseArgs.ttl_s", "FolderSource")
    assert lacking(m.SleepArgs(), old) == ["SleepArgs"]
    assert lacking(m.PauseArgs(ttl_s=3.0), old) == ["PauseArgs.ttl_s"]
    assert lacking(m.PauseArgs(mode="wait"), old) == [], "a field that is not given is not sent"
    assert lacking(m.UpdateWeightsArgs(FolderSource("/w")), old) == ["FolderSource"]
    assert cannot(old) == ["FolderSource", "PauseArgs.ttl_s", "SleepArgs"]
    assert foreign_to(old) == []


def test_a_parameter_of_sampling_counts_as_given_if_it_is_not_the_default():
    old = without("SamplingParams.min_p")
    assert lacking(AddRequest("a", [1], SamplingParams()), old) == []
    assert lacking(AddRequest("a", [1], SamplingParams(min_p=0.1)), old) == ["SamplingParams.min_p"]


def test_a_field_that_a_newer_version_must_have_is_named():
    new = deepcopy(KNOWN)
    new["PauseArgs"]["reason"] = True
    new["ResumeArgs"]["reason"] = False
    assert lacking(m.PauseArgs(), new) == ["PauseArgs.reason"] and lacking(m.ResumeArgs(), new) == []
    assert cannot(new) == ["PauseArgs.reason"] and foreign_to(new) == []


def test_an_engine_that_cannot_be_led_or_sends_too_little_is_foreign():
    assert foreign_to(without("LeadArgs")) == ["LeadArgs"]
    assert foreign_to(without("Output.request_id")) == ["Output.request_id"]
    assert foreign_to(without("Output.routed")) == []
    new = deepcopy(KNOWN)
    new["AddRequest"]["tenant"] = True
    assert foreign_to(new) == ["AddRequest.tenant"]
    assert set(foreign_to({})) >= {"Hello", "AddRequest"}, "a version that tells nothing of itself"
