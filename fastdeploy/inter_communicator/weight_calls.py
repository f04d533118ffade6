"""Control calls for weights and adapters: a part of the messages, see :mod:`fastdeploy.inter_communicator.messages`.

Other modules use these calls as names of ``messages``.
"""

from __future__ import annotations

from typing import Any

from fastdeploy.core.weight_source import PLAIN, DeltaBase, PartFormat, Source
from fastdeploy.inter_communicator.control_call import Args


class UpdateWeightsArgs(Args, frozen=True):
    """A whole update in one call: begin, one part and commit. Other fields: see BeginUpdateArgs.

    verify_checksum: the folder must hold a checksums.json ({tensor: sha256 hex}), and every tensor must match it.
    timeout_s: seconds that reading and checking may take (None = --stage-timeout-s); StagingTimeout after that.
    form: as in UpdatePartArgs.
    """

    source: Source
    version: str | None = None
    expected_version: str | None = None
    kv: str = "keep"
    partial: bool = False
    checksums: dict[str, str] = {}
    verify_checksum: bool = False
    timeout_s: float | None = None
    form: PartFormat = PLAIN
    base: DeltaBase | None = None
    fingerprint: str | None = None

    def begin(self, placed_by: str = "native") -> BeginUpdateArgs:
        """Return the begin of the session that this update is."""
        return BeginUpdateArgs(
            version=self.version,
            expected_version=self.expected_version,
            kv=self.kv,
            partial=self.partial,
            timeout_s=self.timeout_s,
            base=self.base,
            fingerprint=self.fingerprint,
            placed_by=placed_by,
        )


class BeginUpdateArgs(Args, frozen=True):
    """The call that opens a weight session. Reply: {"session_id", "lease_s", version, weight_epoch, boot_id,
    "fingerprint" and "dtype" as in WeightInfoArgs}.

    expected_version: the update is refused unless this version serves, now and at the commit.
    kv: keep or recompute the KV of requests in flight.
    partial: tensors that do not arrive keep their value; otherwise all must arrive.
    lease_s: the session ends when no part and no commit has come for so many seconds.
    timeout_s: seconds that each part, and the check of the commit, may take; after that the session ends.
    placed_by: name of the opener, for callers that keep no session id.
    base: the session takes deltas against these weights, and BaseMismatch is raised unless they serve. Values that no
    part changes stay.
    fingerprint: the commit is refused unless the new weights have this fingerprint over all tensors. A delta must name
    it, here or at the commit.
    idempotency_key: a second begin with the same key and fields gets the reply of the first and renews the lease, as
    long as the session is open. Afterwards it gets the reason of the session's end.
    ends_with_client: the session ends with the connection of the client that opened it, while it waits for parts.
    """

    version: str | None = None
    expected_version: str | None = None
    kv: str = "keep"
    partial: bool = False
    lease_s: float = 300.0
    timeout_s: float | None = None
    placed_by: str = "native"
    base: DeltaBase | None = None
    fingerprint: str | None = None
    idempotency_key: str | None = None
    ends_with_client: bool = False


class UpdatePartArgs(Args, frozen=True):
    """A part of a weight session: some tensors, checked and packed before the reply {"session_id", "tensors", "nbytes",
    "tensors_received", "lease_s"}. A part that is refused ends the session.

    session_id: None = the open session of ``placed_by``. If there is none, the part is not read, and the reply is
    {"session_id": null}. version: replaces the version of begin. checksums: {tensor: sha256 hex of its bytes}, for any
    of the tensors. form: the encoding of the tensors; other than dense in a session with a base only."""

    session_id: str | None
    source: Source
    version: str | None = None
    checksums: dict[str, str] = {}
    verify_checksum: bool = False
    placed_by: str = ""
    form: PartFormat = PLAIN

    def needs_leader(self) -> bool:
        """Anyone may name a weight session: its id is the permission."""
        return self.session_id is None


class CheckUpdateArgs(Args, frozen=True):
    """The question whether the engine would refuse an upload, before its bytes are received. The upload is a part of
    the open session (found as in UpdatePartArgs), whose lease is renewed. Without a session the upload is an update
    with the fields of ``begin``. form: of the part. Reply: {"session_id": of the session or null, "lease_s": of the
    session}, or the error of the refusal."""

    session_id: str | None = None
    begin: BeginUpdateArgs = BeginUpdateArgs()
    placed_by: str = ""
    form: PartFormat = PLAIN

    def needs_leader(self) -> bool:
        """See UpdatePartArgs."""
        return self.session_id is None


class CommitUpdateArgs(Args, frozen=True):
    """The call that commits a weight session. Reply: a report. session_id: None = the open session of ``placed_by``;
    WrongOrder if there is none. version, kv, fingerprint: replace those of begin. weight_epoch: number of the new
    weights, above that of the weights that serve (VersionConflict otherwise); None = the next one. eos_token_ids: of
    the new weights, whatever their source names; None = those that the source names, or, if it names none, the present
    ones. So a replica that joins a fleet gets every field of CommittedState (core/served_weights.py) in its commit.

    prepare: make every check of the commit, and swap nothing. Reply: {"session_id", "fingerprint", "eos_token_ids":
    those that the source names, or null}. Afterwards the
    session takes a commit, which no check of the weights can refuse any more, also after a new label of those that
    serve. Or it takes an abort, or another prepare, which renews its lease. A commit with a bad field leaves it
    prepared."""

    session_id: str | None
    version: str | None = None
    kv: str | None = None
    placed_by: str = ""
    fingerprint: str | None = None
    weight_epoch: int | None = None
    eos_token_ids: tuple[int, ...] | None = None
    prepare: bool = False


class AbortUpdateArgs(Args, frozen=True):
    """The call that ends a weight session without a commit. session_id: None = any open one. Reply: {"aborted":
    [session ids]}."""

    session_id: str | None = None


class LoadAdapterArgs(Args, frozen=True):
    """The call that loads a PEFT adapter under a name, or replaces the adapter of that name between two steps. A
    refused adapter changes nothing. Reply: a report.

    source: a PEFT folder, or the tensors alone (adapter_model.safetensors) in a file or shared memory. config: the
    content of adapter_config.json, for a source that is not a folder. path: the origin to show in /v1/models.
    version: label of the adapter (None = made from its epoch). kv: keep or recompute the KV of requests in flight,
    when an adapter is replaced. replace: False = AdapterLoaded if the name is known, unless the load is from
    the folder that the adapter came from, by its path.
    timeout_s: seconds that the whole load may take, with the time that it waits for other loads (None =
    --stage-timeout-s); StagingTimeout after that. fingerprint: the load is refused unless the adapter has it. Such a
    load may read the copy of another engine. prepare: load everything and swap nothing; EndLoadArgs follows. Reply
    then: {"lora_name", "status": "prepared", "fingerprint"}. A prepared load that is not ended within timeout_s and
    60 s more is forgotten. lookup: load the folder of this name in --adapter-root; ``source`` and ``path`` do not
    count. ModelNotFound if it is not there. No route sets it."""

    lora_name: str
    source: Source
    config: dict[str, Any] | None = None
    path: str = ""
    version: str | None = None
    kv: str = "keep"
    replace: bool = True
    timeout_s: float | None = None
    prepare: bool = False
    fingerprint: str | None = None
    lookup: bool = False


class LookUpAdapterArgs(Args, frozen=True):
    """The question whether --adapter-root has a folder of this name. Reply: {"lora_name", "path"}, or ModelNotFound.
    Changes nothing, so a gateway asks this before a load with ``lookup``."""

    lora_name: str


class EndLoadArgs(Args, frozen=True):
    """The call that ends a load that was made with ``prepare``: the adapter is swapped in between two steps (commit),
    or the load is forgotten. adapter_epoch: number of the new adapter, above that of the one it replaces; None = the
    next one, or, for a name that is not loaded, a number above those of all adapters that were unloaded. fingerprint:
    that of the adapter which was prepared; a load that has another one by now is left alone; None = whatever is
    prepared. A commit raises WrongOrder if no such load is prepared. Reply: the report of the load, or {"lora_name",
    "status": "dropped"}, also if there was none any more."""

    lora_name: str
    commit: bool
    adapter_epoch: int | None = None
    fingerprint: str | None = None


class UnloadAdapterArgs(Args, frozen=True):
    """The call that removes a name at once. Its running requests finish on the weights they have. ModelNotFound for an
    unknown name. Reply: {"lora_name", "lora_int_id", "adapter_epoch", "requests_in_flight"}."""

    lora_name: str


class AdaptersArgs(Args, frozen=True):
    """The question for all adapters. Reply: {"adapters": [one dict per known name: "lora_name", "lora_int_id",
    "adapter_epoch", "version", "fingerprint" (see AdapterInfo in core/runner.py), "path", "rank", "nbytes",
    "in_memory", "requests"]}."""

    reads = True


class ExportAdapterArgs(Args, frozen=True):
    """The question where the engine's own copy of an adapter is: a PEFT folder that is there until the name is replaced
    or unloaded. Reply: {"path", "fingerprint", version, weight_epoch, lora_name, adapter_epoch}. ModelNotFound for an
    unknown name."""

    leader_only = False
    one_member = True

    lora_name: str
