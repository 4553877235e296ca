"""workers.watch: what the stages measure."""

from types import SimpleNamespace
from typing import Any

import pytest

from app.messages.prompts import RenderedPrompt
from tests.messages import decode_task
from workers import watch
from workers.items.ready import Ready

STATS = SimpleNamespace(queued_ts=10.0, scheduled_ts=10.25, first_token_ts=11.0, last_token_ts=13.0)
PROMPT = RenderedPrompt(token_ids=[1])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    now = SimpleNamespace(at=100.0)
    monkeypatch.setattr(watch.time, "monotonic", lambda: now.at)  # type: ignore[attr-defined]
    return now


def test_laps_are_added_to_what_came_before(clock: Any) -> None:
    task = decode_task("r", timings=True, measured={"queue": 5.0, "encode": 1.0})
    one = watch.Watch(task)
    clock.at += 0.5
    one.lap("queue")
    clock.at += 0.25
    one.lap("queue")
    assert one.measured == {"queue": 755.0, "encode": 1.0}
    assert task.measured == {"queue": 5.0, "encode": 1.0}


def test_an_engine_that_prefills() -> None:
    one = watch.Watch(decode_task("r"))
    one.engine(STATS, pulled=False)
    assert one.measured == {"queue": 250.0, "prefill": 750.0, "decode": 2000.0}


def test_an_engine_that_pulls_blocks_prefills_nothing() -> None:
    one = watch.Watch(decode_task("r"))
    one.engine(STATS, pulled=True)
    assert one.measured == {"transfer": 250.0, "decode": 2750.0}


def test_an_engine_that_never_began() -> None:
    one = watch.Watch(decode_task("r"))
    one.engine(None, pulled=False)
    one.engine(SimpleNamespace(scheduled_ts=0.0), pulled=False)
    assert one.measured == {}


def test_items_encoded_with_the_prompt_are_counted(clock: Any) -> None:
    one = watch.Watch(decode_task("r"))
    clock.at += 1
    one.prepared(Ready(PROMPT, None, encoded_items=2))
    assert one.measured == {"queue": 1000.0, "encoded_items": 2}
