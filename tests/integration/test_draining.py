"""What a worker that drains does with what still comes."""

import asyncio
import json
import time
from types import SimpleNamespace
from typing import Any

import pytest

from app import keys, sender
from app.celery import DECODE_TASK, ENCODE_TASK, PREFILL_TASK
from app.errors.base import Failure
from app.messages.deltas import Delta
from app.messages.prompts import RenderedPrompt
from app.messages.tasks import KVHandoff
from app.roles import Role
from app.sender import TaskSender
from tests.messages import ENCODE, decode_task, encode_task, prefill_task
from workers.draining import turn_away

HANDED_ON = KVHandoff(params={"remote_request_id": "p-1"}, expires_at=time.time() + 60)


class Worker:
    """A host of which only what draining uses is there; its Redis is real."""

    def __init__(self, redis: Any, *roles: Role) -> None:
        self.said: dict[str, Delta] = {}
        self.rejected: list[dict[str, Any]] = []
        self.given_up: dict[str, str] = {}
        self.host: Any = SimpleNamespace(
            id="w@gpu0",
            broker=redis,
            settings=SimpleNamespace(roles=frozenset(roles)),
            tokens=SimpleNamespace(put=lambda _api, delta: self.said.update({delta.request: delta})),
            engine=SimpleNamespace(reject=self._reject),
            items=SimpleNamespace(encoder=SimpleNamespace(give_up=self._give_up)),
        )

    async def _reject(self, _request: str, kv: dict[str, Any]) -> None:
        self.rejected.append(kv)

    async def _give_up(self, identity: str, failure: Failure) -> None:
        self.given_up[identity] = failure.code


async def test_each_request_is_answered_and_blocks_are_given_back(redis: Any) -> None:
    sending = TaskSender(redis)
    queue = keys.worker_queue(Role.DECODE, "w@gpu0")
    split = decode_task("split", prompt=RenderedPrompt(token_ids=[1]), kv=HANDED_ON)
    await asyncio.gather(
        sending.send(DECODE_TASK, split, queue), sending.send(DECODE_TASK, decode_task("whole"), queue)
    )
    worker = Worker(redis, Role.DECODE)
    await turn_away(worker.host)
    assert set(worker.said) == {"split", "whole"}
    assert {delta.error.code for delta in worker.said.values() if delta.error} == {"worker_lost"}
    assert worker.rejected == [HANDED_ON.params]
    assert await redis.llen(queue) == 0


async def test_items_are_left_to_other_encode_workers(redis: Any) -> None:
    queue = keys.worker_queue(Role.ENCODE, "w@gpu0")
    await TaskSender(redis).send(ENCODE_TASK, encode_task("r", ENCODE), queue)
    worker = Worker(redis, Role.ENCODE)
    await turn_away(worker.host)
    assert (worker.given_up, worker.said) == ({"a" * 32: "worker_lost"}, {})


async def test_both_priorities_and_all_roles_but_nobody_elses_queue(redis: Any) -> None:
    own, other = keys.worker_queue(Role.PREFILL, "w@gpu0"), keys.worker_queue(Role.PREFILL, "x@gpu0")
    for queue, name in ((own, "a"), (keys.lists(own)[1], "b"), (other, "c"), (keys.role_queue(Role.PREFILL), "d")):
        await redis.lpush(queue, sender.envelope(PREFILL_TASK, prefill_task(name), queue))
    worker = Worker(redis, Role.ENCODE, Role.PREFILL)
    await turn_away(worker.host)
    assert set(worker.said) == {"a", "b"}
    assert await redis.llen(other) == 1 and await redis.llen(keys.role_queue(Role.PREFILL)) == 1


@pytest.mark.parametrize("content", [b"{", b"[]", b"{}", json.dumps({"body": "!", "headers": {}}).encode()])
async def test_a_message_that_is_none_is_dropped(redis: Any, content: bytes) -> None:
    queue = keys.worker_queue(Role.DECODE, "w@gpu0")
    await redis.lpush(queue, content, sender.envelope(DECODE_TASK, decode_task("good"), queue))
    worker = Worker(redis, Role.DECODE)
    await turn_away(worker.host)
    assert set(worker.said) == {"good"}
