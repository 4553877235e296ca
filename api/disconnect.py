"""Noticing that a client has gone while nothing is being sent to it."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TypeVar

from fastapi import Request
from starlette.types import Receive

T = TypeVar("T")


class ClientGone(Exception):
    """Nobody is left to answer."""

    code = "cancelled"


async def unless_disconnected(request: Request, task: asyncio.Task[T], timeout_s: float | None = None) -> bool:
    """Wait for the task; False if that takes longer than `timeout_s`, and then it goes on.

    ClientGone, and the task cancelled, when the client leaves. The body must have been read.
    """
    gone = asyncio.create_task(_disconnected(request.receive))
    goes_on = False
    try:
        done, _ = await asyncio.wait({task, gone}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        goes_on = not done
        if gone in done and task not in done:
            raise ClientGone
        return not goes_on
    finally:
        ending = (gone,) if goes_on else (task, gone)
        for one in ending:
            one.cancel()
        await asyncio.gather(*ending, return_exceptions=True)


class WhileConnected:
    """`async with`: what is in it is cancelled when the client leaves, and that is no error.

    Starlette's streams have a task group of anyio's for that, which costs as much CPU as ten tasks, and cancels at each
    await anew. Here it is said once: whoever goes on for long looks at `left`, too, as what it waits for may have taken
    the cancellation for its own (asyncio.wait_for does, where it comes together with the result).
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._over = self.left = False

    async def __aenter__(self) -> WhileConnected:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        self._gone = asyncio.create_task(_disconnected(self._receive))
        self._gone.add_done_callback(self._leave)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._over = True
        self._gone.cancel()
        # As asyncio.timeout does: somebody else's cancellation, which came too, is not swallowed.
        return self.left and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError

    def _leave(self, gone: asyncio.Task[None]) -> None:
        if gone.cancelled():
            return
        gone.exception()  # a channel that fails is closed, too
        if not self._over:
            self.left = True
            self._task.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
