"""Noticing that a client has gone while nothing is being sent to it."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from fastapi import Request

T = TypeVar("T")


class ClientGone(Exception):
    """Nobody is left to answer."""

    code = "cancelled"


async def unless_disconnected(request: Request, task: asyncio.Task[T], timeout_s: float | None = None) -> bool:
    """Wait for the task; False if that takes longer than `timeout_s`, and then it goes on.

    ClientGone, and the task cancelled, when the client leaves. The body must have been read.
    """
    gone = asyncio.create_task(_disconnected(request))
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


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
