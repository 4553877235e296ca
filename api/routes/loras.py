"""The routes of adapters: Trivet's own, the shorter ones that Dynamo's workers have, and vLLM's."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from api import admin, openapi_bodies
from api.adapters import Adapters, described
from app.adapter_registry import Load, adapter_id, lora_number
from app.errors.requests import InvalidRequest

router = APIRouter(tags=["Adapters"], dependencies=[Depends(admin.required)], responses=openapi_bodies.errors())

Text = Annotated[str, Field(max_length=4096)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore")


class Source(_Body):
    """Where an adapter is: `s3://bucket/prefix`, `hf://owner/name`, `https://host/adapter.tar.gz`, `file:///path`."""

    uri: Text


class LoadBody(_Body):
    """`source.uri`, or `lora_path` for the same."""

    lora_name: Text
    source: Source | None = None
    lora_path: Text | None = None

    @property
    def uri(self) -> str:
        found = self.source.uri if self.source is not None else self.lora_path
        if not found:
            raise InvalidRequest("where is the adapter? give source.uri, or lora_path", param="source.uri")
        return found


class VllmLoadBody(_Body):
    """vLLM's LoadLoRAAdapterRequest."""

    lora_name: Text
    lora_path: Annotated[Text, Field(min_length=1)]
    load_inplace: bool = False


class NameBody(_Body):
    lora_name: Text


@router.post("/v1/loras")
@router.post("/load_lora")
async def load(request: Request, body: LoadBody) -> JSONResponse:
    """Load an adapter on every worker, and answer when requests can use its name, in any API process.

    Loading what is loaded changes nothing. Other content under a name takes the name over; requests in flight keep
    theirs. If a worker cannot load it none keeps it, and the answer, 400 or 502, has the reason of each.
    """
    ended = await _adapters(request).load(body.lora_name, body.uri)
    return JSONResponse(_loaded(ended))


@router.get("/v1/loras")
@router.get("/list_loras")
@router.post("/list_loras")
async def listed(request: Request) -> JSONResponse:
    """All adapters that requests can name: `loras` has their numbers in the engines, `data` all that is known."""
    found = [described(one) for one in await _adapters(request).published()]
    loras = {one["lora_name"]: one["lora_id"] for one in found}
    return JSONResponse({"status": "success", "loras": loras, "count": len(loras), "data": found})


@router.get("/v1/loras/{lora_name:path}")
async def state(request: Request, lora_name: str) -> JSONResponse:
    """What is known of one, its state in every worker included."""
    return JSONResponse(await _adapters(request).state(lora_name))


@router.delete("/v1/loras/{lora_name:path}")
async def remove(request: Request, lora_name: str) -> JSONResponse:
    """The name is free at once; workers let the adapter go when the last request with it has ended."""
    return await _unloaded(request, lora_name)


@router.post("/unload_lora")
async def unload(request: Request, body: NameBody) -> JSONResponse:
    """The same."""
    return await _unloaded(request, body.lora_name)


@router.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
async def vllm_load(request: Request, body: VllmLoadBody) -> Response:
    """As vLLM's server has it, but for the whole cluster. A name that is taken is refused without `load_inplace`."""
    adapters = _adapters(request)
    if not body.load_inplace and any(one.name == body.lora_name for one in await adapters.published()):
        raise InvalidRequest(
            f"The lora adapter '{body.lora_name}' has already been loaded. If you want to load the adapter in place, "
            "set 'load_inplace' to True.",
            param="lora_name",
        )
    await adapters.load(body.lora_name, body.lora_path)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
async def vllm_unload(request: Request, body: NameBody) -> Response:
    """As vLLM's server has it."""
    await _adapters(request).unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def _unloaded(request: Request, name: str) -> JSONResponse:
    await _adapters(request).unload(name)
    return JSONResponse({"status": "success", "message": f"{name} is unloaded", "lora_name": name})


def _loaded(ended: Load) -> dict[str, Any]:
    found = adapter_id(ended.name, ended.version)
    what = "was loaded already" if ended.unchanged else "is loaded"
    return {
        "status": "success",
        "message": f"{ended.name} {what} on {len(ended.workers)} workers",
        "lora_name": ended.name,
        "lora_id": lora_number(found),
        "id": found,
        "version": ended.version,
        "unchanged": ended.unchanged,
        "workers": {worker: report.state for worker, report in ended.workers.items()},
    }


def _adapters(request: Request) -> Adapters:
    adapters: Adapters = request.app.state.services.adapters
    return adapters
