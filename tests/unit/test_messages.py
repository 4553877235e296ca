"""app.messages: what is said on one side is understood on the other."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from app.errors.base import Failure
from app.messages import (
    Assignment,
    Batch,
    DecodeTask,
    Delta,
    EmbedTask,
    FieldValue,
    KVHandoff,
    MediaRef,
    Plan,
    PrefillTask,
    Prompt,
    RenderedItem,
    RenderedPrompt,
    Task,
    TokenLogprob,
    joined,
)
from tests.messages import ENCODE, encode_task, media_ref

P = Assignment(worker="prefill@gpu0", incarnation="p1")
D = Assignment(worker="decode@gpu1", incarnation="d1")
PICTURE = media_ref("0123456789abcdef" * 2)
COMMON: dict[str, Any] = {
    "request_id": "chatcmpl-1.0",
    "attempt": 0,
    "api": "api-1",
    "model": "m",
    "plan": Plan(prefill=P, decode=D),
    "deadline": 1764428400.123456,
    "params": {"temperature": 0.7, "max_tokens": 5, "stop": ["\n", "é"], "seed": None},
}
GRID = FieldValue(kind="batched", dtype="int64", shape=[3], data=[1, 4, 6])
RENDERED = RenderedPrompt(
    token_ids=[1, 2, 2, 3],
    items=[
        RenderedItem(
            modality="image",
            identity=PICTURE.identity,
            offset=1,
            length=2,
            embed_runs=[0, 1, 1],
            fields={
                "grid": GRID,
                "fps": FieldValue(kind="shared", data=2.5),
                "seconds": FieldValue(kind="flat", dim=1, data=[[0.5], [1.5]]),
            },
        )
    ],
    cache_salt="s",
)

TASKS = [
    encode_task("chatcmpl-1.0", ENCODE),
    PrefillTask(
        prompt=Prompt(token_ids=[1], media=[PICTURE]),
        **COMMON | {"plan": Plan(prefill=P, decode=D, encode={PICTURE.identity: ENCODE})},
    ),
    PrefillTask(prompt=Prompt(token_ids=[1, 2], media=[PICTURE], cache_salt="s"), **COMMON),
    DecodeTask(prompt=Prompt(token_ids=[1]), **COMMON),
    DecodeTask(
        prompt=RENDERED, kv=KVHandoff(params={"remote_block_ids": [[1, 2]], "port": 5}, expires_at=1.5), **COMMON
    ),
    EmbedTask(prompt=Prompt(token_ids=[1, 2], cache_salt="s"), **COMMON | {"params": {"dimensions": 32}}),
    DecodeTask(prompt=RenderedPrompt(token_ids=[7]), reasoning_parser_kwargs={"a": {"b": [1]}}, **COMMON),
]


def through_json(message: BaseModel) -> BaseModel:
    return type(message).model_validate(json.loads(json.dumps(message.model_dump(mode="json"))))


@pytest.mark.parametrize("task", TASKS, ids=lambda task: type(task).__name__)
def test_tasks_survive_json(task: Task) -> None:
    back = through_json(task)
    assert back == task
    if isinstance(task, DecodeTask):
        assert isinstance(back, DecodeTask) and type(back.prompt) is type(task.prompt)


def parts(message: Any) -> list[dict[str, Any]]:
    """Every object in a message's JSON that is a message itself, outermost first."""
    found = []
    if isinstance(message, dict):
        found = [message] + [part for name, value in message.items() if name != "params" for part in parts(value)]
    elif isinstance(message, list):
        found = [part for value in message for part in parts(value)]
    return found


@pytest.mark.parametrize("task", TASKS, ids=lambda task: type(task).__name__)
def test_what_is_not_known_is_refused_at_every_depth(task: Task) -> None:
    for at in range(len(parts(task.model_dump(mode="json")))):
        tree = task.model_dump(mode="json")
        part = parts(tree)[at]
        if set(part) <= {"grid", "fps", "seconds"} or "b" in part or "a" in part or PICTURE.identity in part:
            continue  # names chosen by others
        part["surprise"] = 1
        with pytest.raises(ValidationError, match="surprise"):
            type(task).model_validate(tree)


@pytest.mark.parametrize(
    "wrong",
    [
        {"identity": "../../etc/passwd"},
        {"identity": "0123456789ABCDEF" * 2},
        {"size": 0},
        {"modality": "smell"},
    ],
)
def test_a_reference_is_what_it_claims_to_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        MediaRef.model_validate(PICTURE.model_dump() | wrong)


def test_an_empty_prompt_is_none() -> None:
    with pytest.raises(ValidationError):
        Prompt(token_ids=[])


def test_a_plan_counts_its_workers_once() -> None:
    split, whole = Plan(prefill=P, decode=D), Plan(prefill=D, decode=D)
    assert (split.aggregated, split.workers) == (False, (P, D))
    assert (whole.aggregated, whole.workers) == (True, (D,))
    restarted = Plan(prefill=D.model_copy(update={"incarnation": "d2"}), decode=D)
    assert not restarted.aggregated


LOGPROBS = st.builds(
    TokenLogprob,
    token_id=st.integers(0, 1 << 20),
    logprob=st.floats(-9999, 0),
    rank=st.none() | st.integers(0, 1 << 20),
    text=st.none() | st.text(),
)
DELTAS = st.builds(
    Delta,
    request=st.text(min_size=1),
    attempt=st.integers(0, 9),
    seq=st.integers(0, 1 << 31),
    token_ids=st.lists(st.integers(0, 1 << 20)),
    text=st.text(),
    logprobs=st.none() | st.lists(st.lists(LOGPROBS)),
    prompt_logprobs=st.none() | st.lists(st.none() | st.lists(LOGPROBS)),
    prompt_token_ids=st.none() | st.lists(st.integers(0, 1 << 20)),
    media_tokens=st.none() | st.dictionaries(st.text(), st.integers(0, 1 << 20)),
    cached_tokens=st.none() | st.integers(0, 1 << 20),
    created_cache_tokens=st.none() | st.integers(0, 1 << 20),
    vector=st.none() | st.binary(),
    finish_reason=st.none() | st.sampled_from(["stop", "length"]),
    stop_reason=st.none() | st.integers(0, 1 << 20) | st.text(),
    error=st.none() | st.builds(Failure, st.integers(400, 599), st.text(), st.text(), st.none() | st.text()),
)


@given(st.builds(Batch, st.text(), st.text(), st.integers(0, 1 << 40), st.lists(DELTAS)))
def test_batches_survive_json(batch: Batch) -> None:
    encoded = msgspec.json.encode(batch)
    json.loads(encoded)
    assert msgspec.json.decode(encoded, type=Batch) == batch


def test_a_delta_carries_only_what_it_has() -> None:
    assert json.loads(msgspec.json.encode(Delta(request="r", seq=3, token_ids=[5], text="x"))) == {
        "request": "r",
        "seq": 3,
        "token_ids": [5],
        "text": "x",
    }


def test_the_last_delta_says_so() -> None:
    assert not Delta(request="r", seq=0).final
    assert Delta(request="r", seq=0, finish_reason="stop").final
    assert Delta(request="r", seq=0, error=Failure(500, "c", "m")).final


def test_a_vector_is_base64_for_those_who_look() -> None:
    delta = Delta(request="r", seq=0, vector=b"\x00\x00\x80?", finish_reason="stop")
    assert json.loads(msgspec.json.encode(delta))["vector"] == "AACAPw=="
    assert joined([delta]) == delta and delta.final and delta.answers
