"""X-Trivet-Timings over the routes: where it comes, and that it comes to nobody who has not asked."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai._streaming import SSEDecoder

from tests.contract.serving import Surface, answer
from tests.messages import DECODE, ENCODE, PREFILL

PATHS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]},
}
MEASURED = {"queue": 1.0, "encode": 2.0, "prefill": 3.0, "transfer": 4.0, "decode": 5.0}
#: Not in the fast lane.
SLOW: dict[str, Any] = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
PREFIX = ": trivet-timings "


@pytest.fixture
def timed(surface: Surface) -> Surface:
    surface.pipeline.deltas = answer("a", " b", cached_tokens=7)
    surface.pipeline.deltas[-1][0].measured = MEASURED
    return surface


async def ask(surface: Surface, path: str, header: str | None = "1", **more: Any) -> httpx.Response:
    headers = {} if header is None else {"X-Trivet-Timings": header}
    found = await surface.http.post(path, json=PATHS[path] | more, headers=headers)
    assert found.status_code == 200, found.text
    return found


def checked(text: str) -> Any:
    found = json.loads(text)
    assert [found[f"{stage}_ms"] for stage in MEASURED] == list(MEASURED.values())
    assert found["total_ms"] > 0 and found["cached_tokens"] == 7
    return found


@pytest.mark.parametrize("path", PATHS)
async def test_a_whole_answer_has_them_in_a_header(timed: Surface, path: str) -> None:
    checked((await ask(timed, path)).headers["x-trivet-timings"])


@pytest.mark.parametrize("more", [{}, {"stream_options": {"include_usage": True}}, SLOW])
async def test_a_stream_has_them_before_its_end(timed: Surface, more: dict[str, Any]) -> None:
    text = (await ask(timed, "/v1/chat/completions", stream=True, **more)).text
    *events, comment, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    checked(comment.removeprefix(PREFIX))
    plain = (await ask(timed, "/v1/chat/completions", None, stream=True, **more)).text
    assert len(plain.split("\n\n")) == len(events) + 2 and PREFIX not in plain


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_a_stream_without_done_has_them_last(timed: Surface, path: str) -> None:
    *_, comment, end = (await ask(timed, path, stream=True)).text.split("\n\n")
    assert end == ""
    checked(comment.removeprefix(PREFIX))


@pytest.mark.parametrize("path", PATHS)
async def test_clients_do_not_see_the_comment(timed: Surface, path: str) -> None:
    raw = (await ask(timed, path, stream=True)).content
    assert PREFIX.encode() in raw
    read = [event.data for event in SSEDecoder().iter_bytes(iter([raw]))]
    assert read and not any("trivet-timings" in data for data in read)


@pytest.mark.parametrize("header", [None, "0", "yes"])
@pytest.mark.parametrize("path", PATHS)
async def test_nobody_else_gets_them(timed: Surface, path: str, header: str | None) -> None:
    assert "x-trivet-timings" not in (await ask(timed, path, header)).headers
    assert PREFIX not in (await ask(timed, path, header, stream=True)).text
    assert all(job.on_plan is None for job in timed.pipeline.jobs)


async def test_several_choices_have_the_slowest_ones_times(timed: Surface) -> None:
    found = checked((await ask(timed, "/v1/completions", prompt=["hi"], n=1)).headers["x-trivet-timings"])
    assert found["other_ms"] >= 0
    timed.pipeline.deltas[0][0].cached_tokens = 1
    text = (await ask(timed, "/v1/completions", n=7)).headers["x-trivet-timings"]
    assert checked(text)["queue_ms"] == 1.0


def test_what_was_encoded_for_it_is_no_hit() -> None:
    from api.timings import Choice
    from app.messages.plans import Plan

    choice = Choice(items=4, measured={"encoded_items": 1})
    choice.planned(Plan(prefill=PREFILL, decode=DECODE, encode={"a" * 32: ENCODE, "b" * 32: ENCODE}))
    assert choice.encoded == 3
