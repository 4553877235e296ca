"""The worker's side of the token stream."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec
from redis.exceptions import RedisError

from app import keys
from app.messages.deltas import Batch, Delta

log = logging.getLogger(__name__)

#: How long a batch is tried again while Redis is away, before its requests are given up.
RETRY_FOR_S = 10.0
#: How long an API process with neither listener nor lease is waited for: a Redis restarted empty knows neither.
GONE_AFTER_S = 5.0
#: How long after its last delta an API process still gets ticks.
TICK_FOR_S = 60.0
#: Bytes of vectors after which a batch is full: Redis drops a subscriber that has not read 32 MB.
BATCH_VECTORS = 1_000_000
#: Bytes of batches with vectors that a replay stream keeps: of those a batch is as large as thousands of tokens' are.
REPLAY_VECTORS = 32_000_000


class _Channel:
    """One API process: what waits to be sent, and the number of the last batch."""

    __slots__ = ("active", "flushing", "number", "pending")

    def __init__(self) -> None:
        self.pending: list[Delta] = []
        self.number = 0
        self.active = time.monotonic()
        self.flushing: asyncio.Task[None] | None = None


class TokenWriter:
    """Sends deltas. All that are put during one loop tick, which is one engine step, leave in one message.

    `on_gone(api)` is called when nobody listens for an API process any more: its requests are to be dropped.
    """

    def __init__(
        self, redis: Any, worker: str, incarnation: str, replay_batches: int, on_gone: Callable[[str], None]
    ) -> None:
        self._redis = redis
        self._worker = worker
        self._incarnation = incarnation
        self._replay_batches = replay_batches
        self._on_gone = on_gone
        self._channels: dict[str, _Channel] = {}
        self._encoder = msgspec.json.Encoder()

    def put(self, api: str, delta: Delta) -> None:
        """Queue a delta; never waits."""
        channel = self._channels.setdefault(api, _Channel())
        channel.pending.append(delta)
        channel.active = time.monotonic()
        if channel.flushing is None:
            channel.flushing = asyncio.create_task(self._flush(api, channel))

    async def flushed(self, api: str) -> None:
        """Return when what was put so far for this API process has been sent, or given up."""
        flushing = self._channels[api].flushing if api in self._channels else None
        if flushing is not None:
            await asyncio.wait({flushing})

    async def drain(self, timeout_s: float) -> None:
        """Wait until everything put so far has been sent."""
        flushing = [channel.flushing for channel in self._channels.values() if channel.flushing is not None]
        if flushing:
            await asyncio.wait(flushing, timeout=timeout_s)

    async def tick(self) -> None:
        """Repeat the last batch number to every API process served lately, so that it notices a batch it missed."""
        now = time.monotonic()
        for api, channel in list(self._channels.items()):
            if channel.flushing is not None or now - channel.active > TICK_FOR_S:
                continue
            batch = Batch(self._worker, self._incarnation, channel.number)
            await self._redis.publish(keys.tokens_channel(api), self._encoder.encode(batch))

    async def _flush(self, api: str, channel: _Channel) -> None:
        try:
            while channel.pending:
                deltas, channel.pending = _of_one_batch(channel.pending)
                channel.number += 1
                batch = Batch(self._worker, self._incarnation, channel.number, deltas)
                await self._send(api, channel, batch)
        finally:
            channel.flushing = None

    async def _send(self, api: str, channel: _Channel, batch: Batch) -> None:
        try:
            payload = self._encoder.encode(batch)
            kept = self._replay_batches
            if any(delta.vector is not None for delta in batch.deltas):
                kept = max(1, min(kept, REPLAY_VECTORS // len(payload)))
            sent = await self._publish(api, payload, kept)
        except Exception:
            # Its number stays used, so the API sees a gap and ends the requests instead of waiting for them.
            log.exception("token batch %d for API %s is lost", batch.number, api)
            return
        if sent:
            return
        channel.pending.clear()
        # A number that is never sent: an API process that comes back sees the gap, and ends the requests dropped here.
        channel.number += 1
        self._on_gone(api)

    async def _publish(self, api: str, payload: bytes, kept: int) -> bool:
        """Publish and append to the replay stream, which keeps so many batches. False: the API process is gone, or
        Redis has been for too long."""
        until = time.monotonic() + RETRY_FOR_S
        while True:
            pipe = self._redis.pipeline(transaction=False)
            pipe.xadd(keys.replay(api), {"batch": payload}, maxlen=kept, approximate=True)
            pipe.expire(keys.replay(api), keys.REPLAY_TTL_S)
            pipe.publish(keys.tokens_channel(api), payload)
            try:
                *_, listeners = await pipe.execute()
                return bool(listeners) or await self._is_there(api)
            except (RedisError, OSError) as error:
                if time.monotonic() >= until:
                    log.error("tokens for API %s given up after %.0f s without Redis: %s", api, RETRY_FOR_S, error)
                    return False
                await asyncio.sleep(0.1)

    async def _is_there(self, api: str) -> bool:
        """Whether an API process that does not listen is only reconnecting: it has a lease, or is soon back."""
        until = time.monotonic() + GONE_AFTER_S
        while True:
            pipe = self._redis.pipeline(transaction=False)
            pipe.exists(keys.api(api))
            pipe.pubsub_numsub(keys.tokens_channel(api))
            lease, [(_, listeners)] = await pipe.execute()
            if lease or listeners:
                return True
            if time.monotonic() >= until:
                log.warning("API %s is gone: no lease, and nobody listens", api)
                return False
            await asyncio.sleep(0.1)


def _of_one_batch(pending: list[Delta]) -> tuple[list[Delta], list[Delta]]:
    """What leaves in one message, and what does not: tokens of any number, but not vectors."""
    size = 0
    for count, delta in enumerate(pending, 1):
        if delta.vector is not None:
            size += len(delta.vector)
            if size >= BATCH_VECTORS:
                return pending[:count], pending[count:]
    return pending, []
