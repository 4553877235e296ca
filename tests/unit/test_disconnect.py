"""api.disconnect."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from fastapi import Request

from api import disconnect
from api.disconnect import ClientGone, WhileConnected


class Client:
    """The receiving end of a request whose body has been read."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.request = Request({"type": "http", "headers": []}, self.messages.get)

    def leave(self) -> None:
        self.messages.put_nowait({"type": "http.disconnect"})


class Work:
    def __init__(self) -> None:
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.cancelled = False

    async def __call__(self) -> str:
        try:
            return await asyncio.shield(self.end)
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            self.cancelled = True
            raise


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, str]) -> str:
    task = asyncio.create_task(work)
    assert await disconnect.unless_disconnected(request, task)
    return task.result()


async def settled() -> None:
    assert asyncio.all_tasks() == {asyncio.current_task()}, "something was left running"


async def test_the_result_of_the_work() -> None:
    client, work = Client(), Work()
    work.end.set_result("answer")
    assert await unless_disconnected(client.request, work()) == "answer"
    await settled()


async def test_the_error_of_the_work() -> None:
    client, work = Client(), Work()
    work.end.set_exception(ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        await unless_disconnected(client.request, work())
    await settled()


async def test_a_client_that_leaves_ends_the_work() -> None:
    client, work = Client(), Work()
    serving = asyncio.create_task(unless_disconnected(client.request, work()))
    await asyncio.sleep(0.01)
    client.messages.put_nowait({"type": "http.request", "body": b"", "more_body": False})
    await asyncio.sleep(0.01)
    assert not serving.done(), "the end of the body is no disconnect"
    client.leave()
    with pytest.raises(ClientGone):
        await asyncio.wait_for(serving, 5)
    assert work.cancelled
    await settled()


async def test_work_that_takes_longer_goes_on() -> None:
    client, work = Client(), Work()
    task = asyncio.create_task(work())
    assert not await disconnect.unless_disconnected(client.request, task, 0.01)
    work.end.set_result("answer")
    assert await task == "answer"
    client.leave()
    assert (await asyncio.wait_for(client.request.receive(), 5))["type"] == "http.disconnect"
    await settled()


async def test_a_finished_work_wins_over_a_client_that_leaves() -> None:
    client, work = Client(), Work()
    work.end.set_result("answer")
    client.leave()
    assert await unless_disconnected(client.request, work()) == "answer"


async def test_being_cancelled_cancels_the_work() -> None:
    client, work = Client(), Work()
    serving = asyncio.create_task(unless_disconnected(client.request, work()))
    await asyncio.sleep(0.01)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(serving, 5)
    assert work.cancelled
    await settled()


async def test_a_disconnect_seen_here_is_seen_again_later() -> None:
    """What it took from the channel without need must not be lost: a stream that follows watches the same one."""
    client, work = Client(), Work()
    serving = asyncio.create_task(unless_disconnected(client.request, work()))
    await asyncio.sleep(0.01)
    work.end.set_result("answer")
    assert await asyncio.wait_for(serving, 5) == "answer"
    client.leave()
    assert (await asyncio.wait_for(client.request.receive(), 5))["type"] == "http.disconnect"


async def attended(client: Client, work: Coroutine[Any, Any, str]) -> str | None:
    async with WhileConnected(client.request.receive):
        return await work
    return None


async def gone_too() -> None:
    """What was only cancelled takes a moment."""
    await asyncio.sleep(0)
    await settled()


async def test_while_the_client_is_there_the_work_goes_on() -> None:
    client, work = Client(), Work()
    serving = asyncio.create_task(attended(client, work()))
    await asyncio.sleep(0.01)
    client.messages.put_nowait({"type": "http.request", "body": b"", "more_body": False})
    await asyncio.sleep(0.01)
    work.end.set_result("answer")
    assert await asyncio.wait_for(serving, 5) == "answer"
    await gone_too()


async def test_when_the_client_leaves_the_work_is_cancelled_and_that_is_all() -> None:
    client, work = Client(), Work()
    serving = asyncio.create_task(attended(client, work()))
    await asyncio.sleep(0.01)
    client.leave()
    assert await asyncio.wait_for(serving, 5) is None
    assert work.cancelled and not serving.cancelling()
    await gone_too()


async def test_a_client_that_has_left_before() -> None:
    client, work = Client(), Work()
    client.leave()
    assert await asyncio.wait_for(attended(client, work()), 5) is None
    await gone_too()


async def test_who_leaves_as_the_work_ends_cancels_nothing_after_it() -> None:
    client, work = Client(), Work()
    work.end.set_result("answer")
    serving = asyncio.create_task(attended(client, work()))
    await asyncio.sleep(0)
    client.leave()
    assert await asyncio.wait_for(serving, 5) in ("answer", None)
    await gone_too()


async def test_an_error_of_the_work_is_one_although_the_client_left() -> None:
    async def work() -> str:
        try:
            return await asyncio.Future()
        finally:
            raise ValueError("broken")

    client = Client()
    serving = asyncio.create_task(attended(client, work()))
    await asyncio.sleep(0.01)
    client.leave()
    with pytest.raises(ValueError, match="broken"):
        await asyncio.wait_for(serving, 5)
    assert not serving.cancelling()


async def test_somebody_elses_cancellation_comes_through() -> None:
    for leaves in (False, True):
        client, work = Client(), Work()
        serving = asyncio.create_task(attended(client, work()))
        await asyncio.sleep(0.01)
        if leaves:
            client.leave()
            await asyncio.sleep(0)
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(serving, 5)
        assert work.cancelled


async def test_a_channel_that_fails_is_a_client_that_left() -> None:
    async def receive() -> Any:
        raise OSError("broken")

    async with WhileConnected(receive):
        await asyncio.sleep(60)
