"""The adapters of one model, as Redis has them."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from app import keys
from app.adapter_registry.records import Load, Published, Report, Wanted
from app.errors.adapters import AdapterConflict, AdapterLoading
from app.errors.requests import ModelNotFound
from app.errors.serving import NoWorker
from app.redis import needed
from app.registry import WorkerRecord
from app.scripts import Script
from app.tick import Tick

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
WHOSE = "adapters need"
#: What `resolve` says of a name that will soon be one. No id of an adapter is without an `@`.
LOADING = "loading"
#: Seconds between two looks at a load that somebody waits for.
LOOK_S = 0.1
#: How much longer than the load's own limit somebody waits: workers and other API processes settle it, too.
PATIENCE_S = 10.0


def _script(name: str) -> Script:
    return Script(FOLDER / "adapters.lua", FOLDER / f"{name}.lua")


BEGIN, REPORT, LOOK, SETTLE = _script("begin"), _script("report"), _script("look"), _script("settle")
RESOLVE, UNLOAD, JOIN = _script("resolve"), _script("unload"), _script("join")


class AdapterRegistry:
    """`redis` is an asyncio client, `model` the served name. All methods raise BrokerUnavailable."""

    def __init__(self, redis: Any, model: str) -> None:
        self._tick = Tick(redis)
        self._model = model
        self._keys = [keys.lora(model), keys.lora_loads(model), keys.WORKERS]
        self._common = (model, keys.LORAS_CHANNEL, keys.worker(""))
        self._users = keys.lora_users(model, "")

    async def begin(self, name: str, uri: str, limit_s: float) -> Load:
        """Have all workers load an adapter; one that is being loaded from the same place already is joined.

        Raises NoWorker, and AdapterConflict while the name is being loaded from elsewhere.
        """
        text = await self._run(BEGIN, secrets.token_hex(8), name, uri, limit_s)
        if text is None:
            raise NoWorker("no worker is alive that could load an adapter; start one, or wait until it is ready")
        load = Load.model_validate_json(text)
        if load.uri != uri:
            raise AdapterConflict(f"{name} is being loaded from another source; wait until that has ended")
        return load

    async def ended(self, load: Load, limit_s: float) -> Load:
        """The load when it has ended, whichever way. Raises AdapterConflict if another one has followed it by then."""
        until = time.monotonic() + limit_s + PATIENCE_S
        while time.monotonic() < until:
            found = await self.last(load.name)
            if found is None or found.load != load.load:
                break
            if found.state != "loading":
                return found
            await asyncio.sleep(LOOK_S)
        raise AdapterConflict(f"what became of loading {load.name} is not known; ask for its state")

    async def last(self, name: str) -> Load | None:
        """The load of this name that is under way, or ended in the last ten minutes."""
        text = await self._run(SETTLE, name)
        return None if text is None else Load.model_validate_json(text)

    async def report(self, load: Load, worker: str, report: Report) -> bool:
        """A worker's part of a load is done. False if nobody waits for it any more."""
        return bool(await self._run(REPORT, load.load, load.name, worker, report.model_dump_json()))

    async def look(self, held: Collection[str] = ()) -> Wanted:
        """What a worker should hold, and how many use each of the adapters that it does."""
        return Wanted.model_validate_json(await self._run(LOOK, self._users, *sorted(held)))

    async def published(self) -> list[Published]:
        """All of them, by name."""
        wanted = await self.look()
        return [wanted.published[name] for name in sorted(wanted.published)]

    async def resolve(self, name: str, request: str, deadline: float) -> str:
        """The id of the adapter that a name stands for. The request is one of its users until `release`, or its
        deadline (unix seconds). Raises ModelNotFound and AdapterLoading."""
        found = await self._run(RESOLVE, self._users, name, request, deadline)
        if found is None:
            raise ModelNotFound(f"the model does not exist; this server has: {self._model}", param="model")
        if found == LOADING:
            raise AdapterLoading("the model is an adapter that is being loaded", param="model")
        return str(found)

    async def release(self, adapter: str, request: str) -> None:
        with needed(WHOSE, "ZREM"):
            await self._tick.run("ZREM", keys.lora_users(self._model, adapter), request)

    async def unload(self, name: str) -> bool:
        """Take the name away; workers let the adapter go when its last user has ended. False if there was none."""
        return bool(await self._run(UNLOAD, name))

    async def join(self, record: WorkerRecord, lease_s: float, given_up: Collection[str]) -> list[str]:
        """Register a worker that holds all that is published, less what it had to give up. Answers what is missing;
        then it is not registered."""
        lease_ms = max(1, int(lease_s * 1000))
        found = await self._run(JOIN, record.id, record.model_dump_json(), lease_ms, *sorted(given_up))
        return [_text(one) for one in found]

    async def _run(self, script: Script, *arguments: str | int | float) -> Any:
        with needed(WHOSE, script.name):
            found = await script.run(self._tick, self._keys, *self._common, *arguments)
        return _text(found) if isinstance(found, bytes) else found


def changed(message: bytes, model: str) -> bool:
    """Whether a message on the channel is about this model."""
    return message.decode(errors="replace") == model


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
