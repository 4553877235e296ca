"""No body is larger, or slower, than the settings allow, and all of them together have a limit, too."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api import errors
from api.middleware.body_memory import SMALL, BodyMemory, Room
from app.errors.base import TrivetError
from app.errors.requests import BodyMemoryFull, BodyTooLarge, BodyTooSlow

#: Longest wait for the next piece of a body.
BODY_SILENCE_S = 30.0
#: Longest time that a whole body may take: it has memory that others wait for.
BODY_S = 120.0
#: Bytes a second of a body that is no small one, on average, once it has had a while to begin: what it will take has
#: been laid aside.
LEAST_RATE = 100_000
BEGIN_S = 10.0
#: Larger bodies take turns.
PACED = 1 << 18
#: A piece, of about 100 KB, takes a few hundred microseconds.
PAUSE_S = 0.001
#: Where the loop was late by more than that, the pause goes on for so many times as long, up to a limit: bodies go on
#: beside any load.
YIELD = 4
LONGEST_PAUSE_S = 0.01
#: Longest wait until a request with a large body may begin.
BEGIN_WAIT_S = 30.0
CROWDED = "too many large bodies come at once; try again"
#: Where a request's scope has its memory.
ROOM = "trivet.body_room"
#: Of a declared length: more are no size, and Python refuses to read thousands.
MAX_DIGITS = 18


class BodyLimit:
    """Stops reading a body at its limit, or when nothing of it comes for a while, or too little, or not all in time.

    The declared length is only a reason to refuse sooner, and how much memory the body takes; without one it takes all
    that it may, as soon as it is no small one. The route gives that back, once it has no use for it: see `relieve`.
    Until there is memory nothing is read, and the client waits.
    """

    def __init__(self, app: ASGIApp, max_bytes: Callable[[], int], memory: BodyMemory) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._memory = memory
        self._turns = Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        limit = self._max_bytes()
        declared = dict(scope["headers"]).get(b"content-length", b"")
        if declared.isdigit() and (len(declared) > MAX_DIGITS or int(declared) > limit):
            return await _refusal(BodyTooLarge(_reason(limit)), scope)(scope, receive, send)
        room = scope[ROOM] = self._memory.room()
        length = int(declared) if declared.isdigit() else None
        body = _Body(receive, limit, length, room, self._turns)
        try:
            if (length or 0) > PACED and not await self._turns.begin():
                return await _refusal(BodyMemoryFull(CROWDED), scope)(scope, receive, send)
            await self._app(scope, body.receive, send)
        finally:
            room.shrink(0)


def relieve(scope: Scope, left: int) -> None:
    """No more than `left` bytes of the body are in memory from now on."""
    room: Room | None = scope.get(ROOM)
    if room is not None:
        room.shrink(left)


class Turns:
    """One at a time, and a pause after each if more are waiting: so that the pieces of large bodies, however many come,
    leave most of the event loop to everything else.

    Requests that have yet to begin and bodies that have begun take every second turn. Of the bodies that began, the
    first is the next: fair shares would end all of them together, and what has to be done with a whole one would be
    done for all in one go.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._begun: list[tuple[int, asyncio.Future[None]]] = []
        self._new: deque[asyncio.Future[None]] = deque()
        self._new_is_next = True
        self._taken = False

    def number(self) -> int:
        """The place of a body that begins now."""
        return next(self._numbers)

    async def begin(self) -> bool:
        """Before anything is done for the request: a hundred that come at once would keep the loop for a while. False
        if it did not get its turn in time."""
        try:
            async with asyncio.timeout(BEGIN_WAIT_S):
                await self._turn(self._new.append)
        except TimeoutError:
            return False
        return True

    async def take(self, number: int) -> None:
        await self._turn(lambda turn: heapq.heappush(self._begun, (number, turn)))

    async def _turn(self, wait: Callable[[asyncio.Future[None]], None]) -> None:
        if self._taken:
            await self._wait(wait)
        self._taken = True
        try:
            if self._begun or self._new:
                await _pause()
            else:
                await asyncio.sleep(0)
        finally:
            self._pass_on()

    async def _wait(self, wait: Callable[[asyncio.Future[None]], None]) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        wait(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._pass_on()  # it came just now
            raise

    def _pass_on(self) -> None:
        for turn in self._in_order():
            if not turn.done():
                turn.set_result(None)
                return
        self._taken = False

    def _in_order(self) -> Iterator[asyncio.Future[None]]:
        while self._begun or self._new:
            new = bool(self._new) and (self._new_is_next or not self._begun)
            self._new_is_next = not new
            yield self._new.popleft() if new else heapq.heappop(self._begun)[1]


async def _pause() -> None:
    """The longer, the later the loop is, which everybody else waits for, too: a text request takes a dozen turns of the
    loop to its first token."""
    loop = asyncio.get_running_loop()
    due = loop.time() + PAUSE_S
    await asyncio.sleep(PAUSE_S)
    late = loop.time() - due
    if late > PAUSE_S:
        await asyncio.sleep(min(YIELD * late, LONGEST_PAUSE_S))


class _Body:
    """One request's. `declared` is its length, if it has said so."""

    def __init__(self, receive: Receive, limit: int, declared: int | None, room: Room, turns: Turns) -> None:
        self._receive = receive
        self._limit = limit
        self._declared = declared
        self._room = room
        self._turns = turns
        self._read = 0
        self._whole = False
        self._number = 0
        self._begun: float | None = None

    async def receive(self) -> Message:
        if self._whole:
            return await self._receive()
        if self._begun is None:
            await self._room.take(self._declared or 0)
            self._begun, self._number = time.monotonic(), self._turns.number()
        message = await self._soon(self._begun)
        self._read += len(message.get("body", b""))
        self._whole = not message.get("more_body", False)
        if self._read > self._limit:
            raise BodyTooLarge(_reason(self._limit))
        if self._whole:
            self._room.shrink(self._read)
            return message
        if self._declared is None and self._read > PACED:
            await self._room.take(self._limit)
        if max(self._read, self._declared or 0) > PACED:
            waits = time.monotonic()
            await self._turns.take(self._number)
            self._begun += time.monotonic() - waits  # it is not the client that takes its time
        return message

    async def _soon(self, begun: float) -> Message:
        """The next piece. Raises BodyTooSlow once it is too late for one, for the first reason that there is."""
        now = time.monotonic()
        ends = [
            (now + BODY_SILENCE_S, f"nothing of the body came for {BODY_SILENCE_S:.0f} s"),
            (begun + BODY_S, f"the body took longer than {BODY_S:.0f} s"),
        ]
        if self._read > PACED if self._declared is None else self._declared > SMALL:
            rate_end = begun + BEGIN_S + self._read / LEAST_RATE
            ends.append((rate_end, f"the body came slower than {LEAST_RATE // 1000} KB a second"))
        end, reason = min(ends)
        try:
            async with asyncio.timeout(end - now):
                return await self._receive()
        except TimeoutError:
            raise BodyTooSlow(reason) from None


def _reason(limit: int) -> str:
    return f"the body is larger than api.max_body_mb allows ({limit / 1e6:g} MB)"


def _refusal(error: TrivetError, scope: Scope) -> ASGIApp:
    answer = errors.response(error.failure(), scope["path"])
    answer.headers["Connection"] = "close"
    return answer
