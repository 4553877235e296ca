"""Modelled engines behind the real router: time is simulated, every decision is made in a real Redis."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from app import keys
from app.items.index import ItemIndex
from app.items.record import ItemRecord
from app.messages.plans import Assignment
from app.messages.tensors import Descriptor
from app.registry import EngineState, Fleet, WorkerRecord
from app.roles import Role
from app.routing import Ask, RedisRouter, Reservations, View
from app.routing.affinity import HeldBlocks
from app.routing.blocks import chain
from app.settings_sections import ItemSettings, RoutingSettings
from bench.simulation.engine import Costs, Engine, Running, Step
from bench.simulation.traffic import Traffic, Turn

API = "simulated"
MODEL = "f" * 32
#: bfloat16 values of an embedding, for each token of a picture.
WIDTH = 4096

#: What the router is shown of a prompt: all of it, the text before its first picture, or nothing.
Sight = Literal["whole", "text"]
Act = Callable[[float], Awaitable[None]]


@dataclass
class Outcome:
    """Seconds and counts of the requests that ended within the measured time."""

    ttft: list[float] = field(default_factory=list)
    requests: int = 0
    seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    encodes: int = 0
    loads: list[float] = field(default_factory=list)


class Worker:
    """A worker of all roles, whose engine is modelled. What its engine holds goes to Redis as a real worker's does."""

    def __init__(self, number: int, redis: Any, costs: Costs) -> None:
        self.me = Assignment(worker=f"agg@gpu{number}", incarnation=f"i{number}")
        self.engine = Engine(costs)
        self.held = HeldBlocks(redis, keys.kv(self.me.worker, 0), lease_s=3600, renew_s=3600, most=1_000_000)
        self.stepping = False

    @property
    def record(self) -> WorkerRecord:
        costs = self.engine.costs
        return WorkerRecord(
            id=self.me.worker,
            incarnation=self.me.incarnation,
            roles=frozenset(Role),
            model="m",
            multimodal=True,
            pid=1,
            host="h",
            concurrency=512,
            metrics="",
            fingerprint=MODEL,
            spliceable=True,
            engine=EngineState(
                vllm="0",
                max_model_len=1 << 20,
                block_size=costs.block_size,
                kv_tokens=costs.blocks * costs.block_size,
            ),
            started=0.0,
        )


class Cluster:
    """`redis` is an asyncio client of an empty server. The policy is that of `settings`."""

    def __init__(self, redis: Any, workers: int, costs: Costs, settings: RoutingSettings, sight: Sight) -> None:
        self._costs, self._sight = costs, sight
        self.workers = [Worker(number, redis, costs) for number in range(workers)]
        self._by_name = {one.me.worker: one for one in self.workers}
        self._fleet = Fleet(tuple(one.record for one in self.workers))
        self._router = RedisRouter(redis, settings, 60.0)
        self._reservations = Reservations(redis, 60.0)
        self._index = ItemIndex(redis, MODEL, ItemSettings())
        self._holders: dict[str, set[str]] = {}
        self._events: list[tuple[float, int, Act]] = []
        self._order = itertools.count()
        self._outcome = Outcome()
        self._from = 0.0
        self._ended = 0

    async def run(self, traffic: Traffic, warm_up: int, requests: int) -> Outcome:
        """Serve `warm_up` requests, then measure over the next `requests`."""
        for one in self.workers:
            await one.held.write()
        sessions = traffic.sessions()
        for number in range(traffic.workload.sessions):
            self._at(0.02 * number, self._next_turn(next(sessions), sessions))
        now, ended = 0.0, 0
        while self._ended < warm_up + requests:
            now, _, act = heapq.heappop(self._events)
            await act(now)
            if self._ended >= warm_up and ended < warm_up:
                self._begin(now)
            ended = self._ended
        return self._end(now)

    def _at(self, when: float, act: Act) -> None:
        heapq.heappush(self._events, (when, next(self._order), act))

    def _begin(self, now: float) -> None:
        self._outcome, self._from = Outcome(), now
        for one in self.workers:
            engine = one.engine
            engine.busy_s, engine.requests, engine.prompt_tokens, engine.cached_tokens = 0.0, 0, 0, 0

    def _end(self, now: float) -> Outcome:
        outcome, engines = self._outcome, [one.engine for one in self.workers]
        outcome.seconds = now - self._from
        outcome.prompt_tokens = sum(one.prompt_tokens for one in engines)
        outcome.cached_tokens = sum(one.cached_tokens for one in engines)
        outcome.loads = [float(one.requests) for one in engines]
        return outcome

    def _next_turn(self, session: Iterator[Turn], sessions: Iterator[Iterator[Turn]]) -> Act:
        """Ask the session's next question; when it has none left, a new session takes its place."""

        async def ask(now: float) -> None:
            nonlocal session
            turn = next(session, None)
            while turn is None:
                session = next(sessions)
                turn = next(session, None)
            await self._place(turn, now, lambda at: self._at(at + turn.think_s, ask))

        return ask

    async def _place(self, turn: Turn, now: float, then: Callable[[float], None]) -> None:
        size = self._costs.block_size
        blocks = chain(turn.tokens + turn.answer, size, items=turn.pictures)
        full = len(turn.tokens) // size
        seen = blocks[:full]
        if self._sight == "text" and turn.pictures:
            seen = blocks[: turn.pictures[0].offset // size]
        items = tuple(dict.fromkeys(one.identity for one in turn.pictures)) if self._sight == "whole" else ()
        view = View(tuple(seen), len(turn.tokens))
        name = f"r{next(self._order)}"
        ask = Ask(name, time.time() + 600, API, items, MODEL, view, len(turn.answer), session=turn.session)
        chosen = (await self._router.plan(self._fleet, ask)).plan.prefill
        worker = self._by_name[chosen.worker]
        request = Running(turn, blocks, full, now, ready=now, name=name, then=then)
        self._gather(worker, request)
        worker.engine.waiting.append(request)
        self._wake(worker, now)

    def _gather(self, worker: Worker, request: Running) -> None:
        """The pictures that nobody holds are encoded here; the others are fetched, if they are not here."""
        for one in request.turn.pictures:
            holders = self._holders.get(one.identity)
            if one.identity in worker.engine.embeddings:
                continue
            if holders:
                request.ready = max(request.ready, request.arrived + self._costs.fetch_s)
            else:
                request.encode.append(one.identity)

    def _wake(self, worker: Worker, now: float) -> None:
        if not worker.stepping and not worker.engine.idle:
            worker.stepping = True
            self._at(worker.engine.next_ready(now), lambda at: self._step(worker, at))

    async def _step(self, worker: Worker, now: float) -> None:
        step = worker.engine.step(now)

        async def done(when: float) -> None:
            worker.held.add(step.stored)
            worker.held.remove(step.removed)
            told = [self._tell(worker, step)]
            told += [self._reservations.prefilled(API, one.name) for one in step.first]
            told += [self._reservations.release(API, one.name) for one in step.ended]
            await asyncio.gather(*told)
            self._outcome.ttft += [when - one.arrived for one in step.first]
            self._outcome.encodes += step.encodes
            self._outcome.requests += len(step.ended)
            self._ended += len(step.ended)
            for one in step.ended:
                one.then(when)
            worker.stepping = False
            self._wake(worker, when)

        self._at(now + step.seconds, done)

    async def _tell(self, worker: Worker, step: Step) -> None:
        """Which blocks and embeddings it holds now."""
        me, told = worker.me, []
        if step.stored or step.removed:
            told.append(worker.held.write())
        for identity in step.taken_in:
            self._holders.setdefault(identity, set()).add(me.worker)
            told.append(self._index.publish(identity, me, _record(identity), _descriptor(identity, me)))
        for identity in step.dropped:
            self._holders.get(identity, set()).discard(me.worker)
            told.append(self._withdraw(identity, me))
        await asyncio.gather(*told)

    async def _withdraw(self, identity: str, me: Assignment) -> None:
        await self._index.withdraw(identity, me.worker)


def _record(identity: str) -> ItemRecord:
    return ItemRecord(
        modality="image",
        identity=identity,
        target=[1],
        replacement=[(1, 1024)],
        fields={},
        embeds=1024,
        width=WIDTH,
        dtype="bfloat16",
        model="m",
        worker="w",
        written=0.0,
    )


def _descriptor(identity: str, holder: Assignment) -> Descriptor:
    return Descriptor(
        agent=holder.worker,
        host="h",
        path=f"/dev/shm/{identity}",
        address=0,
        metadata="",
        name=identity,
        nonce="0" * 16,
        dtype="bfloat16",
        shape=[1024, WIDTH],
        nbytes=1024 * WIDTH * 2,
        expires_at=2e9,
    )
