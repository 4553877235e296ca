"""Routing over two prefill and two decode workers with real engines: who was asked before is asked again."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from app import keys
from tests.e2e.prompts import picture, user
from tests.e2e.stack import Stack, up

BLOCK = 32


@pytest.fixture(scope="module")
def fleet(home: Path, model: Path) -> Iterator[Stack]:
    os.environ["TRIVET_API__EXPLAIN_ROUTING"] = "true"
    try:
        with up("e2e-routing", "pd", model, "--replicas", "prefill=2,decode=2") as stack:
            yield stack
    finally:
        del os.environ["TRIVET_API__EXPLAIN_ROUTING"]


class Asked:
    """An answer, and where it came from."""

    def __init__(self, stack: Stack, messages: list[dict[str, Any]], path: str = "/v1/chat/completions") -> None:
        body = {"model": "tiny", "messages": messages, "max_tokens": 4, "temperature": 0}
        answer = httpx.post(f"{stack.base_url}{path}", json=body, headers={"X-Explain-Route": "1"}, timeout=120)
        assert answer.status_code == 200, answer.text
        self.content = answer.json()
        self.reasons = json.loads(answer.headers.get("x-route", "null")) or self.content
        (chosen,) = [one for one in self.reasons["candidates"] if one.get("chosen")]
        self.worker, self.held = chosen["worker"], chosen.get("held", 0)

    @property
    def cached(self) -> int:
        return int(self.content["usage"]["prompt_tokens_details"]["cached_tokens"])

    @property
    def prompt_tokens(self) -> int:
        return int(self.content["usage"]["prompt_tokens"])

    @property
    def reply(self) -> dict[str, Any]:
        return {"role": "assistant", "content": self.content["choices"][0]["message"]["content"]}


def explained(stack: Stack, messages: list[dict[str, Any]]) -> Asked:
    return Asked(stack, messages, "/debug/route")


def story(number: int | str) -> str:
    """More than two blocks, and its own from the beginning on."""
    return f"Number {number}: " + "tell me a story about the sea and the moon. " * 6


def shown(url: str, question: str) -> list[dict[str, Any]]:
    return user({"type": "image_url", "image_url": {"url": url}}, question)


def talks(kind: str, number: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A first request, and one that has at least two blocks in common with it."""
    if kind == "text":
        return user(story(number)), user(story(number))
    seed = 700 + number
    first = shown(picture(seed, (256, 192)), story(number))
    if kind == "image":
        return first, first
    again = picture(seed, (256, 192)).replace("data:image/png;", "data:image/png;name=again;")
    return first, shown(again, story(number))


def wait_until_held(stack: Stack, messages: list[dict[str, Any]]) -> None:
    """Until the events of the prompt's blocks have come to Redis."""
    until = time.monotonic() + 20
    while True:
        reasons = explained(stack, messages).reasons
        if any(one.get("held", 0) >= reasons["blocks"] - 1 for one in reasons["candidates"]):
            return
        assert time.monotonic() < until, f"no KV events within 20 s: {reasons}"
        time.sleep(0.05)


@pytest.mark.parametrize("kind", ["text", "image", "image under another URL"])
def test_the_second_request_goes_to_the_holder(fleet: Stack, kind: str) -> None:
    for number in range(100 * len(kind), 100 * len(kind) + 4):
        first, second = talks(kind, number)
        before = Asked(fleet, first)
        wait_until_held(fleet, first)
        after = Asked(fleet, second)
        assert after.worker == before.worker, after.reasons
        assert after.cached >= 2 * BLOCK and after.cached > before.cached
        assert after.cached == after.held * BLOCK or after.prompt_tokens % BLOCK == 0
        assert after.reply == before.reply


def test_what_comes_together_is_spread(fleet: Stack) -> None:
    with ThreadPoolExecutor(8) as pool:
        asked = list(pool.map(lambda number: Asked(fleet, user(story(number))), range(8)))
    assert len({one.worker for one in asked}) == 2


def test_a_talk_stays_where_its_history_is(fleet: Stack) -> None:
    messages = shown(picture(801), story(801))
    first = Asked(fleet, messages)
    for turn in range(3):
        wait_until_held(fleet, messages)
        messages = [*messages, first.reply, {"role": "user", "content": story(f"801, turn {turn}")}]
        next_one = Asked(fleet, messages)
        assert next_one.worker == first.worker
        assert next_one.cached >= next_one.held * BLOCK > 0
        assert next_one.reasons["policy"] == "kv" and not next_one.reasons.get("fallback")


def test_text_before_a_picture_that_nobody_has_seen_counts(fleet: Stack) -> None:
    before = Asked(fleet, user(story(850)))
    wait_until_held(fleet, user(story(850)))
    new = {"type": "image_url", "image_url": {"url": picture(850)}}
    after = Asked(fleet, user(story(850), new, "What is it?"))
    assert after.worker == before.worker
    assert not after.reasons.get("exact", True)
    assert after.cached >= 2 * BLOCK


def test_pictures_that_differ_share_nothing(fleet: Stack) -> None:
    for seed in (860, 861):
        asked = Asked(fleet, shown(picture(seed, (256, 192)), story(860)))
        assert asked.cached < 2 * BLOCK


def test_the_router_tells_without_doing(fleet: Stack) -> None:
    messages = user(story(870))
    assert explained(fleet, messages).held == 0
    assert explained(fleet, messages).reasons["candidates"][0].get("requests", 0) == 0
    assert Asked(fleet, messages).cached == 0


def test_redis_tells_who_holds_what(fleet: Stack) -> None:
    Asked(fleet, user(story(880)))
    wait_until_held(fleet, user(story(880)))
    with fleet.redis as client:
        for worker in fleet.all_workers():
            names = client.smembers(keys.kv(worker.id, 0))
            assert all(len(one) == 16 and int(one, 16) >= 0 for one in names)  # type: ignore[union-attr]
        assert not client.keys("trivet:load:*"), "nothing runs"


def test_when_the_holder_dies_another_answers(fleet: Stack) -> None:
    messages = shown(picture(890), story(890))
    before = Asked(fleet, messages)
    wait_until_held(fleet, messages)
    (holder,) = [one for one in fleet.all_workers() if one.id == before.worker]
    os.kill(holder.pid, signal.SIGKILL)
    began = time.monotonic()
    after = Asked(fleet, messages)
    assert after.reply == before.reply
    assert time.monotonic() - began < 30, "it waits for no start of an engine"
    alive = {one.id: one.incarnation for one in fleet.all_workers()}
    assert alive.get(holder.id) != holder.incarnation
    wait_until_held(fleet, messages)
