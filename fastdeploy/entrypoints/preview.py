"""What a server with given settings would serve, found out without serving: for ``fastdeploy check``.

The model is planned by the code that an engine starts with, and the headers of its weights are checked. No weight is
read, and no port stays open.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec

from fastdeploy.client.chat_format.formats import reasoning_parser, tool_call_parser
from fastdeploy.client.tokenizer import load_tokenizer
from fastdeploy.core.config import AUTO, EngineConfig, ServeConfig
from fastdeploy.core.errors import FastDeployError, InvalidField
from fastdeploy.core.roofline import StepRoofline
from fastdeploy.entrypoints.loading import plan
from fastdeploy.entrypoints.ports import open_ports

STREAMS = (1, 8, 32)
CONTEXT = 512  # tokens of each stream in the table of speed
PROBE_BYTES = 2 << 30  # read at most for the bandwidth
NONE = "none"


class Model(msgspec.Struct, frozen=True):
    """parameters: numbers in the tensors. checkpoint_bytes, layout: of the weights on disk. dtype, quantization: of
    what serves. isa, threads: of the ops; "reference" = the slow ops of Paddle. chat_template: whether there is one."""

    name: str
    path: str
    architecture: str
    layers: int
    parameters: int
    checkpoint_bytes: int
    checkpoint_dtype: str
    layout: str
    dtype: str
    quantization: str
    vocabulary: int
    max_model_len: int
    tokenizer: str
    chat_template: bool
    tool_call_parser: str
    reasoning_parser: str
    isa: str
    threads: int


class Memory(msgspec.Struct, frozen=True):
    """Bytes. standby: of the second copy of the weights, which updates write to; 0 = none. adapters, retained: limits
    of what requests may make the server keep. free: of the machine, or of this cgroup, now. left: when weights, standby
    copy and KV cache are in use."""

    weights: int
    standby: int
    kv_cache: int
    kv_blocks: int
    kv_block_tokens: int
    adapters: int
    retained: int
    free: int
    left: int


class Speed(msgspec.Struct, frozen=True):
    """The most that decode steps can reach. read: bytes per second. peak: operations per second; None = not known.
    tokens_per_s: of all streams together, by the number of streams."""

    read: float
    peak: float | None
    context: int
    tokens_per_s: dict[int, float]


class Refusal(msgspec.Struct, frozen=True):
    """A reason why nothing would be served. what: a setting, a key of config.json, a file or a tensor."""

    what: str
    why: str


class Preview(msgspec.Struct):
    """None = not known, because something was refused before, or, for the speed, because the ops cannot measure it."""

    model: Model | None = None
    memory: Memory | None = None
    speed: Speed | None = None
    refused: list[Refusal] = msgspec.field(default_factory=list)


def refusal(error: Exception) -> Refusal:
    """Return why nothing would be served."""
    if isinstance(error, InvalidField):
        return Refusal(error.field, error.message.removeprefix(error.field + ": "))
    what = getattr(error, "detail", {}).get("tensor") or getattr(error, "filename", None) or "model"
    return Refusal(str(what), error.message if isinstance(error, FastDeployError) else str(error))


def preview(engine: EngineConfig, serve: ServeConfig) -> Preview:
    """Return what a server with these settings would serve. Takes about as long as importing Paddle, and some hundred
    milliseconds to measure the machine."""
    found = Preview()
    try:
        for port in open_ports(serve):
            port.close()
    except OSError as error:
        found.refused.append(Refusal("port", str(error)))
    try:
        _describe(engine, serve, found)
    except (FastDeployError, OSError) as error:
        found.refused.append(refusal(error))
    return found


def _describe(engine: EngineConfig, serve: ServeConfig, found: Preview) -> None:
    """Fill ``found``, as far as nothing is refused. Raises FastDeployError or OSError."""
    from fastdeploy.worker.checkpoint_check import check_checkpoint
    from fastdeploy.worker.memory_plan import num_parameters, weight_bytes

    planned = plan(engine)
    tokenizer = load_tokenizer(engine.model, serve.chat_template)
    template = "" if tokenizer is None else tokenizer.template
    ops: Any = planned.ops
    checkpoint = check_checkpoint(planned.model, engine.model)
    found.model = Model(
        name=serve.served_model_name,
        path=engine.model,
        architecture=planned.config.architecture,
        layers=planned.config.num_hidden_layers,
        parameters=num_parameters(planned.model),
        checkpoint_bytes=checkpoint.nbytes,
        checkpoint_dtype=planned.config.dtype,
        layout=checkpoint.layout.name,
        dtype=planned.ops.dtype,
        quantization=engine.quantization or NONE,
        vocabulary=planned.config.vocab_size,
        max_model_len=planned.memory.max_model_len,
        tokenizer=NONE if tokenizer is None else tokenizer.kind,
        chat_template=bool(template),
        tool_call_parser=_chosen(serve.tool_call_parser, tool_call_parser(template)),
        reasoning_parser=_chosen(serve.reasoning_parser, reasoning_parser(template)),
        isa=getattr(ops, "isa", "reference"),
        threads=getattr(ops, "num_threads", len(os.sched_getaffinity(0))),
    )
    found.memory = _memory(engine, planned, weight_bytes(planned.model))
    found.speed = _speed(planned, weight_bytes(planned.model))


def _chosen(setting: str, of_template: str) -> str:
    return of_template if setting == AUTO else setting


def _memory(engine: EngineConfig, planned: Any, weights: int) -> Memory:
    from fastdeploy.worker.memory import free_memory
    from fastdeploy.worker.standby import MARGIN, allows_copy

    kv, free = planned.memory.kv_bytes, free_memory()
    standby = weights if allows_copy(engine.standby_weights, free - weights, weights + kv + MARGIN) else 0
    return Memory(
        weights=weights,
        standby=standby,
        kv_cache=kv,
        kv_blocks=planned.memory.num_blocks,
        kv_block_tokens=planned.memory.block_size,
        adapters=engine.adapter_memory_mb << 20,
        retained=engine.max_retained_mb << 20,
        free=free,
        left=free - weights - standby - kv,
    )


def _speed(planned: Any, weights: int) -> Speed | None:
    """Measure the machine, and return the most that it can reach. None if the ops cannot measure it."""
    from fastdeploy.worker.memory import free_memory
    from fastdeploy.worker.roofline import probe_machine, step_roofline

    nbytes = min(weights, PROBE_BYTES, free_memory() // 4)
    machine = probe_machine(planned.ops, nbytes, planned.model.quantization)
    if machine is None:
        return None
    roofline: StepRoofline = step_roofline(planned.model, machine, planned.memory.token_bytes)
    context = min(CONTEXT, planned.memory.max_model_len)
    rates = {n: n / roofline.least_s(n, n * context) for n in STREAMS}
    return Speed(machine.read, machine.peak, context, rates)
