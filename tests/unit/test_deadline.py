"""api.deadline: what a client may ask for, and work that ends with its time whatever vLLM makes of being stopped."""

import asyncio
import time
from typing import Any

import pytest
from fastapi import Request

from api import deadline
from app.errors.requests import InvalidRequest
from app.errors.serving import DeadlineExceeded


class Refused(Exception):
    """What vLLM's serving code makes of a cancellation."""


@pytest.mark.parametrize("made_of_it", [None, "an answer", Refused()], ids=["nothing", "answer", "error"])
async def test_a_deadline_is_one_whatever_vllm_makes_of_it(made_of_it: Any) -> None:
    async def work() -> Any:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if made_of_it is None:
                raise
            if isinstance(made_of_it, Exception):
                raise made_of_it from None
            return made_of_it

    with pytest.raises(DeadlineExceeded):
        await asyncio.wait_for(deadline.within(time.time() + 0.05, work()), 5)


async def test_what_fails_in_time_fails_as_it_does() -> None:
    async def work() -> None:
        raise TimeoutError("somebody else's")

    with pytest.raises(TimeoutError, match="somebody"):
        await deadline.within(time.time() + 60, work())


def asking(value: str | None) -> Request:
    headers = [] if value is None else [(deadline.TIMEOUT_HEADER.encode(), value.encode())]
    return Request({"type": "http", "headers": headers})


@pytest.mark.parametrize(("asked", "seconds"), [(None, 60), ("5", 5), ("0.5", 0.5), ("600", 60)])
def test_a_client_may_ask_for_less_time_and_not_for_more(asked: str | None, seconds: float) -> None:
    before = time.time()
    assert before <= deadline.of(asking(asked), 60) - seconds <= time.time()


@pytest.mark.parametrize("asked", ["", "soon", "0", "-1", "nan", "inf"])
def test_what_is_no_time_is_refused(asked: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        deadline.of(asking(asked), 60)
    assert caught.value.failure().param == deadline.TIMEOUT_HEADER
