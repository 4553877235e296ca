"""The components of an `up`, each with its way to tell that it is ready."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import httpx
from redis.exceptions import RedisError

from app.launch import plan, readiness, redis_server
from app.launch.component import Component, Probe
from app.launch.plan import Engine
from app.launch.state import State
from app.redis import connect
from app.registry import Registry
from app.settings import Settings

log = logging.getLogger(__name__)

#: Neither a probe nor the removal of an entry may hold the supervisor up for longer.
REGISTRY_TIMEOUT_S = 2.0


class Layout:
    """Makes the components and holds the connections that their probes use."""

    def __init__(self, settings: Settings, state: State, changed: Callable[[], None]) -> None:
        self._settings = settings
        self._state = state
        self._cache = connect(settings.redis.cache, REGISTRY_TIMEOUT_S, name="trivet-up", connections=8)
        self._component = partial(Component, changed=changed, tensors=Path(settings.tensors.directory))
        self._environment = plan.child_environment(settings, state.sockets)
        self.registry = Registry(self._cache, settings.worker.lease_s)
        # Proxies of the environment are not for loopback.
        self.client = httpx.AsyncClient(trust_env=False)

    def redis(self, address: tuple[str, int]) -> Component:
        logs = self._state.logs
        spec = redis_server.spec(address, logs.parent, logs / "redis.log", self._environment)
        return self._component("redis", spec, partial(redis_server.serves, self._settings.redis.broker_url))

    def workers(self, engines: Sequence[Engine]) -> list[Component]:
        return [self._worker(engine, len(engines)) for engine in engines]

    def api(self) -> Component:
        url = f"{self._state.api_url}/health/live"
        metrics = self._state.sockets / "metrics"  # it goes with the sockets
        metrics.mkdir(exist_ok=True)
        spec = plan.api(self._settings, self._environment, self._state.logs, metrics)
        return self._component("api", spec, self._get(url))

    def flower(self) -> Component:
        url = f"{self._state.flower_url}/healthcheck"
        spec = plan.flower(self._settings, self._environment, self._state.logs)
        return self._component("flower", spec, self._get(url))

    async def aclose(self) -> None:
        await self.client.aclose()
        with suppress(RedisError, OSError):
            await self._cache.aclose()

    def _worker(self, engine: Engine, count: int) -> Component:
        spec = plan.worker(engine, self._settings, self._environment, count, self._state.logs)
        probe = partial(readiness.registered, self.registry, engine.id)
        return self._component("worker", spec, probe, buried=partial(self._unregister, engine.id))

    async def _unregister(self, worker_id: str) -> None:
        """Do not make the API wait for the dead worker's lease to run out."""
        try:
            async with asyncio.timeout(REGISTRY_TIMEOUT_S):
                await self.registry.remove(worker_id)
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("%s is dead and still in the registry: %s", worker_id, error)

    def _get(self, url: str) -> Probe:
        async def probe(_pid: int) -> bool:
            return await readiness.answers(self.client, url)

        return probe
