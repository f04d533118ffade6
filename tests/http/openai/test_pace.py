"""A large reply leaves the event loop free for other work. The tests count rounds of the loop, not seconds."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy.client.choice import Choice, TextOptions, pieces
from fastdeploy.client.generation import TOKENS_AT_ONCE, WORK_PER_TOKEN, Generation, GenerationRequest
from fastdeploy.client.pace import SLICE, GrowingArray, Pace
from fastdeploy.client.request_stream import RequestStream
from fastdeploy.core.config import ServeConfig
from fastdeploy.core.outputs import Logprob, Span
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.http.context import ServingContext
from fastdeploy.http.dialects.sglang import generate as sglang_generate
from fastdeploy.http.dialects.sglang import generate_body as sglang_generate_body
from fastdeploy.http.dialects.vllm import generate as vllm_generate
from fastdeploy.http.guards.budget import Budget
from fastdeploy.http.openai.chat import ChatView
from fastdeploy.http.openai.completion import CompletionView
from fastdeploy.http.openai.protocol import ChatBody, CompletionBody
from fastdeploy.inter_communicator.messages import Output
from support.fake_engine_server import replace
from support.search import examples

TOP, TOKENS, CHOICES = 20, 400, 3
ENTRY = Logprob.of(-0.5, tuple((97 + i, -1.0 - i) for i in range(TOP)))
PROMPT = [97] * 5


async def rounds(work: Awaitable[Any]) -> tuple[Any, int]:
    """Return the result of ``work``, and the number of rounds of the event loop until it came."""
    count = 0

    async def count_rounds() -> None:
        nonlocal count
        while True:
            await asyncio.sleep(0)
            count += 1

    counter = asyncio.create_task(count_rounds())
    await asyncio.sleep(0)
    before = count
    result = await work
    counter.cancel()
    return result, count - before


class FilledClient:
    """A client that has the whole output of each request at once."""

    welcome = SimpleNamespace(boot_id="boot", max_model_len=10**6)
    model_info: dict[str, Any] = {}

    async def submit(self, request, reader) -> RequestStream:
        stream = RequestStream(request.request_id, request.n, lambda *_: None, lambda _: None, reader)
        for choice in range(request.n):
            prompt_logprobs = [ENTRY] * (len(request.prompt_token_ids) - 1) if choice == 0 else []
            ids, spans = [97 + i % 26 for i in range(TOKENS)], [Span("v1", 1, 0, TOKENS)]
            output = Output(request.request_id, choice, ids, [ENTRY] * TOKENS, spans, "length")
            stream.put(replace(output, prompt_logprobs=prompt_logprobs))
        reader.wake(stream)
        return stream


@pytest.fixture
def context(tokenizer) -> ServingContext:
    config = ServeConfig(model="m", served_model_name="tiny")
    return ServingContext(FilledClient(), tokenizer, config, Budget(1, 1.0, "uploads"))


def generation_of(context: ServingContext, kind: type[Generation] = Generation, prompt=PROMPT) -> Generation:
    request = GenerationRequest([AddRequest("r", prompt, SamplingParams(), n=CHOICES)], [TextOptions()], streams=True)
    return kind(context.client, context.tokenizer, request, context.pace())


def completion(context: ServingContext, view: type = CompletionView):
    return view(context, generation_of(context), CompletionBody(prompt="a", logprobs=TOP, n=CHOICES))


def chat(context: ServingContext):
    body = ChatBody(messages=[{"role": "user"}], logprobs=True, top_logprobs=TOP, n=CHOICES)
    return ChatView(context, generation_of(context), body)


def vllm(context: ServingContext):
    return completion(context, vllm_generate.GenerateView)


def sglang(context: ServingContext):
    options = sglang_generate_body.LogprobOptions(True, 0, TOP)
    prompt = sglang_generate_body.Prompt("r", "", PROMPT, SamplingParams(), TextOptions(), options)
    prompts = sglang_generate_body.Prompts([prompt], CHOICES, False, "")
    generation = generation_of(context, sglang_generate.LabelledGeneration)
    return sglang_generate.GenerateView(context, generation, sglang_generate_body.GenerateBody(), prompts)


VIEWS = [completion, chat, vllm, sglang]
SLICES = CHOICES * TOKENS * TOP // (SLICE + TOP + 1)


async def run(view: Any) -> list:
    async with view.generation:
        return await view.generation.step()


def in_event_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Turn a coroutine into a test."""

    @functools.wraps(test)
    def run_test(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run_test


@pytest.mark.parametrize("make", VIEWS)
@in_event_loop
async def test_a_whole_reply_is_made_in_slices(context, make):
    view = make(context)
    await run(view)
    body, num_rounds = await rounds(view.body())
    assert num_rounds >= SLICES
    data = msgspec.json.decode(msgspec.json.encode(body))
    assert len(data if make is sglang else data["choices"]) == CHOICES


@pytest.mark.parametrize("make", VIEWS)
@in_event_loop
async def test_the_event_of_a_late_reader_is_made_in_slices(context, make):
    view = make(context)
    deltas = await run(view)
    assert [index for index, _ in deltas] == list(range(CHOICES)), "one event per choice"
    assert sum([(await rounds(view.events(*delta)))[1] for delta in deltas]) >= SLICES


@in_event_loop
async def test_the_tokens_of_a_late_reader_are_decoded_in_slices(context):
    _, num_rounds = await rounds(run(completion(context)))
    assert num_rounds >= CHOICES * TOKENS * WORK_PER_TOKEN // (SLICE + TOKENS_AT_ONCE * WORK_PER_TOKEN)


@in_event_loop
async def test_logprobs_of_a_long_prompt_are_made_in_slices(context):
    generation = generation_of(context, prompt=[97] * 2000)
    view = CompletionView(context, generation, CompletionBody(prompt="a", prompt_logprobs=TOP))
    await run(view)
    _, num_rounds = await rounds(view.body())
    assert num_rounds >= 2000 * TOP // (SLICE + 2 * TOP + 2)


@in_event_loop
async def test_each_round_of_the_event_loop_has_a_slice_of_one_reply_only(context):
    """Ten replies take ten times the rounds of one."""
    views = [chat(context) for _ in range(10)]
    for view in views:
        await run(view)
    _, num_rounds = await rounds(asyncio.gather(*(view.body() for view in views)))
    assert num_rounds >= 10 * SLICES


@in_event_loop
async def test_a_cancelled_reply_does_not_block_other_replies(context):
    views = [chat(context) for _ in range(3)]
    for view in views:
        await run(view)
    tasks = [asyncio.create_task(view.body()) for view in views]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.sleep(0)
    tasks[1].cancel()
    assert (await tasks[2])["choices"]


@in_event_loop
async def test_an_array_that_is_sent_repeatedly_encodes_each_item_once():
    """In SGLang's streams each event repeats all earlier tokens."""
    made = []

    def items(numbers: range):
        for number in numbers:
            made.append(number)
            yield number

    array = GrowingArray(Pace(asyncio.Lock()))
    assert bytes(array.raw()) == b"[]"
    for start in (0, 2, 2, 4):
        await array.extend(items(range(start, start + 2)))
        await array.extend([])
    assert bytes(array.raw()) == b"[0,1,2,3,2,3,4,5]" and len(made) == 8


@examples(200)
@given(
    text=st.text(alphabet="abé😀", max_size=20),
    sizes=st.integers(1, 7),
    stops=st.lists(st.text(alphabet="abé", min_size=1, max_size=3), max_size=2),
    cut=st.integers(0, 40),
    finish=st.sampled_from([None, "length", "stop"]),
    first=st.integers(0, 3),
)
def test_an_output_in_pieces_makes_the_same_choice_as_the_whole_output(
    tokenizer, text, sizes, stops, cut, finish, first
):
    ids = tokenizer.encode_now(text)
    middle = min(cut, len(ids))
    spans = [Span("v1", 1, first, first + middle), Span("v2", 2, first + middle, first + len(ids), True)]
    output = Output("r", 0, ids, [Logprob(-float(i)) for i in ids], [s for s in spans if s.end > s.start], finish,
                    prompt_logprobs=[ENTRY], cached_tokens=3, num_preempted=1, message="why")  # fmt: skip

    def choice_of(size: int) -> tuple:
        choice = Choice(tokenizer, [], TextOptions(tuple(stops)))
        choice.feed(Output("r", 0, [97] * first, spans=[Span("v0", 0, 0, first)] if first else []))
        shown = "".join(choice.feed(piece).text for piece in pieces(output, size) if choice.finish_reason is None)
        return (shown, choice.text, choice.token_ids, choice.spans, choice.finish_reason, choice.stop_reason,
                choice.prompt_logprobs, choice.num_preempted, len(choice.logprobs))  # fmt: skip

    assert choice_of(sizes) == choice_of(10**6)
