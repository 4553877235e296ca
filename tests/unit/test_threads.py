"""What runs in a thread ends before whoever waits for it goes on, cancelled or not."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from app.threads import unbroken
from tests.polling import until


async def test_its_answer_and_its_failure_arrive() -> None:
    assert await unbroken(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await unbroken(lambda: 1 // 0)


@pytest.mark.parametrize("end", [lambda: 7, lambda: 1 // 0], ids=["an answer", "a failure"])
async def test_who_is_cancelled_waits_however_often(end: Any) -> None:
    began, going, over = threading.Event(), threading.Event(), []

    def job() -> int:
        began.set()
        going.wait(10)
        over.append(True)
        return int(end())

    waiting = asyncio.create_task(unbroken(job))
    await until(began.is_set, "the thread")
    for _ in range(3):
        waiting.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert not waiting.done()
    going.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert over == [True]


async def test_what_has_not_begun_never_does() -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    began, going = threading.Event(), threading.Event()

    def first() -> bool:
        began.set()
        return going.wait(10)

    done: list[int] = []
    waiting = [asyncio.create_task(unbroken(job)) for job in (first, lambda: done.append(1), lambda: done.append(2))]
    await until(began.is_set, "the only thread")
    waiting[1].cancel()
    await asyncio.sleep(0)
    going.set()
    assert await waiting[0] is True
    with pytest.raises(asyncio.CancelledError):
        await waiting[1]
    await waiting[2]
    assert done == [2]
