"""The batches of events that an engine publishes, in order and without gaps, over ZMQ.

vLLM numbers its batches from 0, publishes each once, and keeps the last ones for whoever asks for them again
(`ZmqEventPublisher`): those that went out before this subscribed, and those that got lost.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from workers.kv_events.wire import Batch, decode

log = logging.getLogger(__name__)

#: The number that ends a replay.
END = -1
#: Longest wait for a replay's next message. vLLM looks for requests between two batches, ten times a second at least.
REPLAY_S = 5.0
#: After so long without a batch the engine is asked for what came meanwhile: no number tells that the last message is
#: lost, and the first ones may be sent before the subscription is in force.
IDLE_S = 2.0
#: Batches that wait here while the loop is busy, as many as vLLM lets wait at its end.
WAITING = 100_000


@dataclass(frozen=True)
class Source:
    """Where an engine publishes, as ZMQ addresses; `replay` is None where it keeps nothing."""

    endpoint: str
    replay: str | None = None
    topic: str = ""


@dataclass
class Counts:
    """Sequences of batches that were `gaps`, batches `replayed`, gaps `lost` for good."""

    gaps: int = 0
    replayed: int = 0
    lost: int = 0


class Subscription:
    """One engine's batches."""

    def __init__(self, source: Source, *, replay_s: float = REPLAY_S, idle_s: float = IDLE_S) -> None:
        self.counts = Counts()
        self._source = source
        self._replay_s = replay_s
        self._idle_s = idle_s
        self._context = zmq.asyncio.Context()
        self._next = 0

    async def batches(self) -> AsyncGenerator[Batch | None, None]:
        """Every batch; None where some are lost for good, or one cannot be read."""
        with self._socket(zmq.SUB, self._source.endpoint) as published:
            published.setsockopt(zmq.SUBSCRIBE, self._source.topic.encode())
            while True:
                if not await published.poll(self._idle_s * 1000):
                    async for batch in self._replayed():
                        yield batch
                    continue
                _, number, payload = await published.recv_multipart()
                async for batch in self._arrived(_number(number), payload):
                    yield batch

    def close(self) -> None:
        self._context.destroy(linger=0)

    async def _arrived(self, number: int, payload: bytes) -> AsyncGenerator[Batch | None, None]:
        if number > self._next:
            self.counts.gaps += 1
            async for batch in self._replayed():
                yield batch
        if number > self._next:
            self._skip_to(number)
            yield None
        if number == self._next:  # and not among those replayed
            self._next += 1
            yield _read(payload)

    async def _replayed(self) -> AsyncGenerator[Batch | None, None]:
        """What the engine still has of the batches from the next one on."""
        if self._source.replay is None:
            return
        with self._socket(zmq.DEALER, self._source.replay) as asked:
            while True:
                wanted, beyond = self._next, None
                await asked.send_multipart([b"", wanted.to_bytes(8, "big")])
                while await asked.poll(self._replay_s * 1000):
                    *_, number, payload = await asked.recv_multipart()
                    if (found := _number(number)) == END:
                        break
                    if found == self._next:
                        self._next += 1
                        self.counts.replayed += 1
                        yield _read(payload)
                    elif found > self._next and beyond is None:
                        # Too many for the socket, which drops the rest; or no longer kept.
                        beyond = found
                if beyond is None:
                    return
                if self._next == wanted:
                    self._skip_to(beyond)
                    yield None

    def _skip_to(self, number: int) -> None:
        log.warning("KV events of %s are lost: batches %d to %d", self._source.endpoint, self._next, number - 1)
        self.counts.lost += 1
        self._next = number

    @contextmanager
    def _socket(self, kind: int, address: str) -> Iterator[Any]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.RCVHWM, WAITING)
        socket.connect(address)
        try:
            yield socket
        finally:
            socket.close(linger=0)


def _number(data: bytes) -> int:
    return int.from_bytes(data, "big", signed=True)


def _read(payload: bytes) -> Batch | None:
    try:
        return decode(payload)
    except msgspec.DecodeError as error:
        log.error("unreadable KV events (another vLLM?): %s", error)
        return None
