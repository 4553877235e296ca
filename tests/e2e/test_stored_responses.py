"""Stored responses with OpenAI's client: two API processes with the setting on, over the workers of a topology."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.e2e.prompts import picture
from tests.e2e.second_api import second_api
from tests.e2e.stack import ENGINE, LIMITS, TOOL_PARSER, Stack

pytestmark = pytest.mark.topology("agg")
ASK: dict[str, Any] = {"model": "tiny", "max_output_tokens": 12, "temperature": 0}
LOOK: Any = [
    {
        "role": "user",
        "content": [
            {"type": "input_image", "image_url": picture(7), "detail": "auto"},
            {"type": "input_text", "text": "What is in this picture?"},
        ],
    }
]
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def clients(stacks: Mapping[str, Stack], model: Path) -> Iterator[tuple[OpenAI, OpenAI]]:
    """Of the two processes."""
    settings = {
        "TRIVET_API__RESPONSE_STORE_TTL_S": "600",
        "TRIVET_API__TOOL_CALL_PARSER": TOOL_PARSER,
        "TRIVET_ENABLE_MULTIMODAL": "true",
        "TRIVET_TENSORS__MEDIA_GB": "0.05",
        # What decides what becomes of a picture has to be the workers' own.
        "TRIVET_ENGINE__ARGS": shlex.join([*shlex.split(ENGINE), json.dumps(LIMITS)]),
    }
    url = stacks["agg"].redis_url
    with (
        second_api(url, model, **settings) as one,
        second_api(url, model, **settings) as other,
        client(one) as first,
        client(other) as second,
    ):
        yield first, second


def client(base_url: str) -> OpenAI:
    return OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=120)


def until(condition: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + LIMIT_S
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {LIMIT_S:.0f} s: {what}"
        time.sleep(0.1)
    return value


def reached(api: OpenAI, response_id: str, *statuses: str) -> Any:
    def now() -> Any:
        found = api.responses.retrieve(response_id)
        return found if found.status in statuses else None

    return until(now, f"{response_id} is one of {statuses}")


def test_a_talk_about_a_picture_goes_on_at_another_process(clients: tuple[OpenAI, OpenAI], agg: Stack) -> None:
    one, other = clients
    first = one.responses.create(input=LOOK, **ASK)
    assert first.usage is not None and first.usage.output_tokens > 0
    second = other.responses.create(input="And behind it?", previous_response_id=first.id, **ASK)
    talk = [*LOOK, *first.output, {"role": "user", "content": "And behind it?"}]
    whole = agg.client.responses.create(input=talk, **ASK)
    assert second.previous_response_id == first.id
    assert second.usage is not None and whole.usage is not None
    assert second.usage.input_tokens == whole.usage.input_tokens
    assert second.output_text == whole.output_text
    asked, said, again = other.responses.input_items.list(second.id, order="asc").data
    assert (asked.type, said.type, again.type) == ("message", "message", "message")
    assert said.id == first.output[0].id


def test_a_stored_response_is_got_and_deleted_at_another_process(clients: tuple[OpenAI, OpenAI]) -> None:
    one, other = clients
    made = one.responses.create(input="hi", metadata={"a": "b"}, **ASK)
    found = other.responses.retrieve(made.id)
    assert (found.output_text, found.status, found.metadata) == (made.output_text, made.status, {"a": "b"})
    *_, last = one.responses.create(input="hi", stream=True, **ASK)
    assert last.type == "response.completed"
    assert other.responses.retrieve(last.response.id).output_text == made.output_text
    for response_id in (made.id, last.response.id):
        other.responses.delete(response_id)
        with pytest.raises(openai.NotFoundError):
            one.responses.retrieve(response_id)


def test_a_response_in_the_background(clients: tuple[OpenAI, OpenAI]) -> None:
    one, other = clients
    made = one.responses.create(input="Tell me a story.", background=True, **ASK)
    assert (made.status, made.background) == ("queued", True)
    done = reached(other, made.id, "completed", "incomplete")
    assert done.output_text == one.responses.create(input="Tell me a story.", **ASK).output_text
    assert done.usage is not None and done.usage.output_tokens > 0
    more = other.responses.create(input="And then?", previous_response_id=made.id, **ASK)
    assert more.status in ("completed", "incomplete")


def test_one_that_is_cancelled_at_another_process_stops_in_its_worker(
    clients: tuple[OpenAI, OpenAI], agg: Stack
) -> None:
    one, other = clients
    made = one.responses.create(
        input="Tell me a story.",
        background=True,
        **ASK | {"max_output_tokens": 1900, "extra_body": {"ignore_eos": True}},
    )
    reached(other, made.id, "in_progress")
    until(lambda: agg.workers()["agg"].in_flight == 1, "the worker runs it")
    cancelled = other.responses.cancel(made.id)
    assert (cancelled.id, cancelled.status) == (made.id, "cancelled")
    until(lambda: agg.workers()["agg"].in_flight == 0, "the worker has stopped")
    assert one.responses.retrieve(made.id).status == "cancelled"


def test_what_is_wrong_in_the_background_is_said_at_once(clients: tuple[OpenAI, OpenAI]) -> None:
    one, _ = clients
    with pytest.raises(openai.BadRequestError) as refused:
        one.responses.create(input="word " * 4000, background=True, **ASK)
    assert refused.value.code == "context_length_exceeded"


def test_without_the_setting_nothing_is_stored(agg: Stack) -> None:
    with agg.client as api:
        made = api.responses.create(input="hi", store=True, **ASK)
        with pytest.raises(openai.NotFoundError, match="response_store_ttl_s"):
            api.responses.retrieve(made.id)
        with pytest.raises(openai.NotFoundError, match="response_store_ttl_s"):
            api.responses.create(input="hi", previous_response_id=made.id, **ASK)
        with pytest.raises(openai.BadRequestError, match="response_store_ttl_s"):
            api.responses.create(input="hi", background=True, **ASK)
