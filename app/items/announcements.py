"""Hearing that an item was encoded, or could not be, instead of asking for it again and again."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import msgspec
from redis.exceptions import RedisError

from app import keys
from app.errors.base import Failure
from app.messages.plans import Assignment
from app.redis import subscription

log = logging.getLogger(__name__)


class Announcement(msgspec.Struct, frozen=True):
    """What is said on the channel of an item of the model `model` (a fingerprint): encoded, or `failure`."""

    model: str
    identity: str
    worker: str
    incarnation: str
    failure: Failure | None = None


def is_final(failure: Failure) -> bool:
    """Whether the item itself is at fault: every other worker would fail with it, and every waiter has to."""
    return failure.status < 500


def announcement(model: str, identity: str, owner: Assignment, failure: Failure | None = None) -> str:
    """The text for the channel. It leaves out a failure's `param`, which names a part of one request of many."""
    reason = None
    if failure is not None:
        reason = msgspec.to_builtins(msgspec.structs.replace(failure, param=None)) | {"final": is_final(failure)}
    return json.dumps({"model": model, "identity": identity} | owner.model_dump() | {"failure": reason})


class Watch:
    """What has been announced of one item since the watch began. Made by `Announcements.watch`."""

    def __init__(self) -> None:
        self._told = asyncio.Event()
        self._failure: Failure | None = None

    def tell(self, failure: Failure | None) -> None:
        # Of several announcements the last one counts, but none takes back what is the item's own fault.
        if self._failure is None or not is_final(self._failure):
            self._failure = failure
        self._told.set()

    async def wait(self, timeout_s: float) -> Failure | None:
        """Return at once if something was announced since the watch began or last waited, or when something is.

        None means "look into the index": the item is ready, or the time is up, or messages may have been missed.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._told.wait()
        except TimeoutError:
            return None
        self._told.clear()
        return self._failure


class Announcements:
    """Listens for all waiters of a process. `redis` is an asyncio client; `subscribed` is set while it listens."""

    def __init__(self, redis: Any) -> None:
        self._redis = redis
        self._watches: dict[tuple[str, str], set[Watch]] = {}
        self._unreadable_said = False
        self.subscribed = asyncio.Event()

    async def run(self) -> None:
        """Hear announcements for ever. Whenever the subscription was made (again), every waiter looks for itself."""
        while True:
            try:
                async with aclosing(subscription(self._redis, keys.ITEMS_CHANNEL)) as messages:
                    async for message in messages:
                        if message is None:
                            self.subscribed.set()
                            self.wake()
                        else:
                            self._hear(message)
            except (RedisError, OSError) as error:
                log.warning("channel of item announcements lost, subscribing again: %s", error)
            finally:
                self.subscribed.clear()
            await asyncio.sleep(0.5)

    @contextmanager
    def watch(self, namespace: str, identity: str) -> Iterator[Watch]:
        """Remember what is announced of the item from here on: look into the index inside the block, then wait."""
        watch, name = Watch(), (namespace, identity)
        self._watches.setdefault(name, set()).add(watch)
        try:
            yield watch
        finally:
            others = self._watches[name]
            others.discard(watch)
            if not others:
                del self._watches[name]

    def wake(self) -> None:
        """Let every waiter look into the index: a worker was lost, or messages may have been."""
        for watches in self._watches.values():
            for watch in watches:
                watch.tell(None)

    def _hear(self, message: bytes) -> None:
        try:
            heard = msgspec.json.decode(message, type=Announcement)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if not self._unreadable_said:
                log.error("unreadable announcement on %s (another version of Trivet?): %s", keys.ITEMS_CHANNEL, error)
            self._unreadable_said = True
            self.wake()  # somebody waits for it
            return
        for watch in self._watches.get((heard.model, heard.identity), ()):
            watch.tell(heard.failure)
