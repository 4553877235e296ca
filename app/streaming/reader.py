"""The API's side of the token stream."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from typing import Any

import msgspec
from redis.exceptions import RedisError

from app import keys
from app.errors.base import Failure
from app.errors.serving import TokensLost
from app.messages.deltas import Batch, Delta
from app.messages.plans import Assignment
from app.redis import subscription

log = logging.getLogger(__name__)

#: Batches read at once from the replay stream, whose size is in megabytes.
PAGE = 100
#: From so many open streams on, a token that comes alone waits for its stream's next one: to hand on two costs what it
#: costs to hand on one. That is one engine step.
MANY_STREAMS = 128
#: For so long at least and twice as long at most, where engine steps are longer.
PATIENCE_S = 0.05


class RequestStream:
    """The deltas of one attempt of one request, in order and without holes.

    `workers` are those whose death ends it: until one of them speaks those of the plan, then whoever speaks.
    """

    def __init__(self, request_id: str, attempt: int, workers: frozenset[Assignment]) -> None:
        self.request_id = request_id
        self.attempt = attempt
        self.workers = workers
        self._expected = 0
        self._speaker: Assignment | None = None
        self._ended = False
        self._ready: list[Delta] = []
        self._wake: asyncio.Future[None] | None = None
        self._answered = False
        self._held_at: float | None = None

    def feed(self, delta: Delta, speaker: Assignment, now: float | None = None) -> None:
        """Take a delta from the channel; another attempt's and those seen before are dropped.

        With `now`, the loop's time, a token may wait for the next one; the first and the last of an answer never do.
        """
        if delta.attempt != self.attempt or (delta.seq < self._expected and delta.error is None):
            return
        if speaker is not self._speaker and speaker != self._speaker:
            self._speaker, self.workers = speaker, frozenset({speaker})
        if delta.seq > self._expected and delta.error is None:
            lost = TokensLost(f"part {self._expected} of the answer was lost between worker and API")
            delta = Delta(request=self.request_id, attempt=self.attempt, seq=delta.seq, error=lost.failure())
        self._expected = delta.seq + 1
        waits = now is not None and self._answered and not (self._ready or self._ended or delta.final)
        self._answered = self._answered or delta.answers
        if waits:
            self._held_at = now
            self._ready.append(delta)
        else:
            self._put(delta)

    def fail(self, failure: Failure) -> None:
        """End the stream with an error that does not come from its worker."""
        self._put(Delta(request=self.request_id, attempt=self.attempt, seq=self._expected, error=failure))

    async def get(self) -> list[Delta]:
        """All deltas that have come since the last call, at least one. One reader at a time."""
        if not self._ready:
            self._wake = asyncio.get_running_loop().create_future()
            try:
                await self._wake
            finally:
                self._wake = None
        deltas, self._ready = self._ready, []
        self._held_at = None
        return deltas

    def hand_on(self, held_before: float) -> bool:
        """What has waited since then waits no longer. Whether there is a token that does."""
        if self._held_at is not None and self._held_at <= held_before:
            self._hand_on()
        return self._held_at is not None

    def _put(self, delta: Delta) -> None:
        # Whatever comes after the end would hide it from a reader that looks at the last delta.
        if self._ended:
            return
        self._ended = delta.final
        self._ready.append(delta)
        self._hand_on()

    def _hand_on(self) -> None:
        self._held_at = None
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


class TokenReader:
    """Reads the channel of this API process and hands each delta to its request. `redis` is an asyncio client."""

    def __init__(self, redis: Any, api: str, replay_batches: int) -> None:
        self._redis = redis
        self._api = api
        self._replay_batches = replay_batches
        self._streams: dict[str, RequestStream] = {}
        self._numbers: dict[tuple[str, str], int] = {}
        self._speakers: dict[tuple[str, str], Assignment] = {}
        self._decoder = msgspec.json.Decoder(Batch)
        self._look: asyncio.TimerHandle | None = None
        self.subscribed = asyncio.Event()
        self.gaps = 0

    @property
    def streams(self) -> list[RequestStream]:
        return list(self._streams.values())

    def open(self, request_id: str, attempt: int, workers: frozenset[Assignment]) -> RequestStream:
        """Register a request before it is sent, so that no delta can come too early."""
        stream = RequestStream(request_id, attempt, workers)
        self._streams[request_id] = stream
        return stream

    def close(self, request_id: str) -> None:
        self._streams.pop(request_id, None)

    async def run(self) -> None:
        """Read for ever. A lost connection is made again; what was missed shows as a gap and is refilled."""
        while True:
            try:
                async with aclosing(subscription(self._redis, keys.tokens_channel(self._api))) as messages:
                    async for message in messages:
                        if message is None:
                            self.subscribed.set()
                        elif (batch := self._decode(message)) is not None:
                            await self._take(batch)
            except (RedisError, OSError) as error:
                log.warning("token channel lost, subscribing again: %s", error)
                await asyncio.sleep(0.2)

    async def _take(self, batch: Batch) -> None:
        source = (batch.worker, batch.incarnation)
        last = self._numbers.get(source, 0)
        # A tick repeats the last number: everything up to it should have been seen. A batch is itself the next one.
        complete_to = batch.number if not batch.deltas else batch.number - 1
        if complete_to > last:
            await self._refill(source, last, complete_to)
        self._numbers[source] = max(last, batch.number)
        self._deliver(batch)

    def _deliver(self, batch: Batch) -> None:
        speaker = self._speaker_of(batch)
        now = self._patient_now()
        for delta in batch.deltas:
            stream = self._streams.get(delta.request)
            if stream is not None:
                stream.feed(delta, speaker, now)

    def _speaker_of(self, batch: Batch) -> Assignment:
        """Always the same object: streams compare it for every delta."""
        source = (batch.worker, batch.incarnation)
        found = self._speakers.get(source)
        if found is None:
            found = self._speakers[source] = Assignment(worker=batch.worker, incarnation=batch.incarnation)
        return found

    def _patient_now(self) -> float | None:
        """The loop's time, if tokens may wait for others."""
        if len(self._streams) < MANY_STREAMS:
            return None
        self._look_later()
        return asyncio.get_running_loop().time()

    def _look_later(self) -> None:
        """At tokens that have waited for too long."""
        if self._look is None:
            self._look = asyncio.get_running_loop().call_later(PATIENCE_S, self._hand_on_late)

    def _hand_on_late(self) -> None:
        self._look = None
        held_before = asyncio.get_running_loop().time() - PATIENCE_S
        waiting = [stream.hand_on(held_before) for stream in self._streams.values()]
        if any(waiting):
            self._look_later()

    async def _refill(self, source: tuple[str, str], last: int, until: int) -> None:
        """Deliver the batches last+1 .. until of one worker from the replay stream."""
        self.gaps += 1
        found = await self._replayed(source, last, until)
        for number in sorted(found):
            self._deliver(found[number])
        log.warning("token gap from %s: batches %d to %d, refilled %d", source[0], last + 1, until, len(found))
        if len(found) < until - last:
            self._fail_all(Assignment(worker=source[0], incarnation=source[1]))

    async def _replayed(self, source: tuple[str, str], last: int, until: int) -> dict[int, Batch]:
        """Batches last+1 .. until, as far as the replay stream has them, by number. It is read from its newest end."""
        found: dict[int, Batch] = {}
        newest, pages = "+", -(-2 * self._replay_batches // PAGE)
        try:
            while len(found) < until - last and pages > 0:
                entries = await self._redis.xrevrange(keys.replay(self._api), max=newest, count=PAGE)
                batches = [self._decode(fields.get(b"batch", b"")) for _, fields in entries]
                mine = [one for one in batches if one is not None and (one.worker, one.incarnation) == source]
                found |= {one.number: one for one in mine if last < one.number <= until}
                if len(entries) < PAGE:
                    break
                newest, pages = f"({entries[-1][0].decode()}", pages - 1
        except (RedisError, OSError) as error:
            log.error("the replay stream cannot be read: %s", error)
        return found

    def _decode(self, payload: bytes) -> Batch | None:
        """The batch; None, which leaves a gap in its place, if it is none."""
        try:
            return self._decoder.decode(payload)
        except (msgspec.MsgspecError, UnicodeError) as error:
            log.error("a token batch that is none (another version of Trivet?): %s", error)
            return None

    def _fail_all(self, worker: Assignment) -> None:
        lost = TokensLost("part of the answer was lost between worker and API").failure()
        for stream in self._streams.values():
            if worker in stream.workers:
                stream.fail(lost)
