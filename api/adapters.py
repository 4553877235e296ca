"""The adapters that requests name as their model, and what an administrator does with them."""

from __future__ import annotations

import logging
import secrets
from typing import Any

from api.context import NamedAdapter, RequestContext
from app.adapter_registry import AdapterRegistry, Load, Published, adapter_id, lora_number
from app.adapters import AdapterRefused, check_name
from app.adapters.names import MAX_LENGTH
from app.errors.adapters import AdapterLoadFailed
from app.errors.requests import ModelNotFound
from app.errors.serving import BrokerUnavailable
from app.fleet import FleetView
from app.settings import Settings

log = logging.getLogger(__name__)

#: What a load may take beyond the fetch: the engines' share.
ENGINES_S = 60.0
#: Of a load, what is told in another form, or to nobody.
INTERNAL = {"waiting", "failing", "deserted"}

Json = dict[str, Any]


class Adapters:
    """Of the model that this API serves. All methods raise BrokerUnavailable."""

    def __init__(self, registry: AdapterRegistry, fleet: FleetView, settings: Settings) -> None:
        self._registry = registry
        self._fleet = fleet
        self._model = settings.served_name
        self._limit_s = settings.adapters.fetch_timeout_s + ENGINES_S

    async def enter(self, asked: RequestContext, model: Any) -> None:
        """If the request names an adapter, that is the one it runs with, and it stays until the request is closed.

        Redis is asked each time: what another API process published a moment ago can be used here. Raises
        ModelNotFound and AdapterLoading.
        """
        if not model or not isinstance(model, str) or model == self._model:
            return
        if len(model) > MAX_LENGTH:
            raise self._unknown()
        user = f"{asked.request_id}:{secrets.token_hex(4)}"
        adapter = await self._registry.resolve(model, user, asked.deadline)
        asked.adapter = NamedAdapter(model, adapter)
        asked.on_close.append(lambda: self._leave(adapter, user))

    async def _leave(self, adapter: str, user: str) -> None:
        try:
            await self._registry.release(adapter, user)
        except BrokerUnavailable as error:
            log.warning("adapter %s counts as in use until a deadline passes: %s", adapter, error.message)

    async def published(self) -> list[Published]:
        return await self._registry.published()

    async def load(self, name: str, uri: str) -> Load:
        """Have every worker load it, and publish its name. Raises AdapterRefused, AdapterLoadFailed, NoWorker and
        AdapterConflict."""
        check_name(name, {self._model})
        load = await self._registry.begin(name, uri, self._limit_s)
        ended = await self._registry.ended(load, self._limit_s)
        if ended.state == "published":
            return ended
        message = f"{name} was not loaded: {ended.reason}{_reasons(ended)}"
        raise AdapterRefused(message) if ended.refused else AdapterLoadFailed(message)

    async def unload(self, name: str) -> None:
        """Raises ModelNotFound."""
        if len(name) > MAX_LENGTH or not await self._registry.unload(name):
            raise self._no_adapter(name)

    async def state(self, name: str) -> Json:
        """Everything that is known of a name. Raises ModelNotFound."""
        wanted = await self._registry.look()
        published, load = wanted.published.get(name), wanted.loads.get(name)
        if published is None and load is None:
            raise self._no_adapter(name)
        await self._fleet.renew()
        return {
            "lora_name": name,
            "state": "published" if published else load and load.state,
            "adapter": published and described(published),
            "load": load and load.model_dump(exclude=INTERNAL) | {"waiting": sorted(load.waiting)},
            "workers": {one: self._at(one, published, load) for one in self._holders()},
        }

    def _holders(self) -> list[str]:
        return [one.id for one in self._fleet.now.workers if one.runs_language_model]

    def _at(self, worker: str, published: Published | None, load: Load | None) -> Json:
        """The state of an adapter in a worker: of the published version, else of the load. What a worker has loaded is
        in its record: it may have let go what it reported once."""
        record = next(one for one in self._fleet.now.workers if one.id == worker)
        if published:
            if published.id in record.adapters:
                return {"state": "loaded"}
            return {"state": "missing", "reason": record.adapters_failed.get(published.id, "")}
        report = load.workers.get(worker) if load else None
        if load and report and report.incarnation == record.incarnation:
            if report.state == "failed":
                return {"state": "failed", "reason": report.reason}
            if adapter_id(load.name, report.version) in record.adapters:
                return {"state": "loaded"}
        return {"state": "loading" if load and load.state == "loading" else "unloaded"}

    def _no_adapter(self, name: str) -> ModelNotFound:
        return ModelNotFound(f"there is no adapter {name[:MAX_LENGTH]!r}", param="lora_name")

    def _unknown(self) -> ModelNotFound:
        return ModelNotFound(f"the model does not exist; this server has: {self._model}", param="model")


def described(one: Published) -> Json:
    return one.model_dump(exclude={"name", "load"}) | {
        "lora_name": one.name,
        "id": one.id,
        "lora_id": lora_number(one.id),
    }


def _reasons(load: Load) -> str:
    """Each worker's; those that say the same together."""
    said: dict[str, list[str]] = {}
    for worker, report in sorted(load.workers.items()):
        if report.reason:
            said.setdefault(report.reason, []).append(worker)
    for worker in sorted(load.waiting):
        said.setdefault("had not loaded it by then", []).append(worker)
    return "".join(f"; {', '.join(workers)}: {reason}" for reason, workers in said.items())
