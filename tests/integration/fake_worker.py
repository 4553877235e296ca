"""A worker without an engine: it speaks the real wire, and says what the test tells it to.

It takes Celery's messages from its queues, streams through the real TokenWriter, renews its lease in the real registry
and hears the real cancel channel.
"""

import asyncio
import base64
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from app import cancellation, keys
from app.celery import DECODE_TASK, EMBED_TASK, ENCODE_TASK, PREFILL_TASK
from app.messages.deltas import Delta
from app.messages.plans import Assignment
from app.messages.prompts import RenderedPrompt
from app.messages.tasks import DecodeTask, EmbedTask, EncodeTask, KVHandoff, PrefillTask
from app.registry import Fleet, Registry
from app.roles import Role
from app.routing import Ask, RedisRouter
from app.sender import TaskSender
from app.settings_sections import RoutingSettings
from app.streaming import TokenWriter
from tests.messages import worker

Stage = Callable[["FakeWorker", Any], Awaitable[None]]
Taken = PrefillTask | DecodeTask | EncodeTask | EmbedTask


async def count(one: "FakeWorker", task: DecodeTask) -> None:
    """Answer with as many tokens as were asked for: 0, 1, 2 ..."""
    number = task.params["max_tokens"]
    for seq in range(number):
        one.say(task, seq, finish_reason="length" if seq == number - 1 else None)
        await asyncio.sleep(0)


async def hand_on(one: "FakeWorker", task: PrefillTask, seq: int = 0) -> None:
    """Give the request to a decode worker, as if its blocks were filled."""
    ask = Ask(task.request_id, task.deadline, task.api)
    plan = (await one.router.hand_off(Fleet.of(await one.registry.workers(), "m"), ask, task.plan)).plan
    assert plan.decode is not None
    decode = DecodeTask(
        **task.model_dump(exclude={"prompt", "plan"}),
        plan=plan,
        prompt=RenderedPrompt(token_ids=task.prompt.token_ids),
        kv=KVHandoff(params={"from": one.assignment.worker}, expires_at=time.time() + 60),
        seq=seq,
    )
    queue = keys.worker_queue(Role.DECODE, plan.decode.worker)
    await one.sender.send(DECODE_TASK, decode, queue)


async def silence(one: "FakeWorker", task: Any) -> None:
    """Take the task and say nothing."""


class FakeWorker:
    """Use `running`. `taken` are its tasks, `cancelled` the ids that it was told to stop."""

    def __init__(self, redis: Any, assignment: Assignment, roles: tuple[Role, ...], stage: Stage) -> None:
        self.assignment = assignment
        self.taken: list[Taken] = []
        self.cancelled: list[str] = []
        self.gone: list[str] = []
        self.stage = stage
        self.sender = TaskSender(redis)
        self.registry = Registry(redis, 2.0)
        self.router = RedisRouter(redis, RoutingSettings(), 60.0)
        self.record = worker(assignment, *roles)
        self._redis = redis
        self.tokens = TokenWriter(redis, assignment.worker, assignment.incarnation, 200, self.gone.append)

    def say(self, task: Any, seq: int, **more: Any) -> None:
        delta = Delta(request=task.request_id, attempt=task.attempt, seq=seq, token_ids=[seq], text=f"{seq} ", **more)
        self.tokens.put(task.api, delta)

    async def take_for_ever(self) -> None:
        names = [keys.worker_queue(role, self.assignment.worker) for role in Role]
        async with asyncio.TaskGroup() as stages:
            while True:
                taken = await self._redis.brpop(names, timeout=1)
                if taken is None:
                    continue
                task = parse(json.loads(taken[1]))
                if await cancellation.is_cancelled(self._redis, task.request_id):
                    continue
                self.taken.append(task)
                stages.create_task(self.stage(self, task))  # type: ignore[arg-type]

    async def beat_for_ever(self) -> None:
        while True:
            await self.registry.announce(self.record)
            await self.tokens.tick()
            await asyncio.sleep(0.1)

    async def die(self) -> None:
        """Leave as a killed process does, but at once."""
        self.beating.cancel()
        await self.registry.remove(self.assignment.worker)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["FakeWorker"]:
        await self.registry.announce(self.record)
        self.beating = asyncio.create_task(self.beat_for_ever())
        listening = cancellation.listen(self._redis, self.cancelled.append, list)
        tasks = [self.beating, asyncio.create_task(self.take_for_ever()), asyncio.create_task(listening)]
        try:
            yield self
        finally:
            for one in tasks:
                one.cancel()
            for one in tasks:
                with contextlib.suppress(asyncio.CancelledError):
                    await one


KINDS = {ENCODE_TASK: EncodeTask, PREFILL_TASK: PrefillTask, DECODE_TASK: DecodeTask, EMBED_TASK: EmbedTask}


def parse(envelope: dict[str, Any]) -> Taken:
    (_, kwargs, _) = json.loads(base64.b64decode(envelope["body"]))
    task: Any = KINDS[envelope["headers"]["task"]].model_validate(kwargs["message"])
    return task
