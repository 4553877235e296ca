"""app.messages.deltas: tokens arrive as they were sent."""

import json

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from app.errors.base import Failure
from app.messages.deltas import Batch, Delta, TokenLogprob, joined

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
