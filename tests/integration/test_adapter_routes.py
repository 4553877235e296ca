"""The routes of adapters over a real registry, and workers whose engines only note what they hold."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from api.context import RequestContext
from app.adapter_registry import lora_number
from app.errors.adapters import AdapterLoading
from app.errors.requests import ModelNotFound
from tests.integration.adapter_api import adapters, client
from tests.integration.adapter_cluster import MODEL, Member, Sources, cluster
from tests.messages import DECODE, PREFILL
from tests.polling import until

SQL = {"lora_name": "sql", "source": {"uri": "s3://a/sql"}}


@pytest.fixture
def sources() -> Sources:
    made = Sources()
    made.versions = {"s3://a/sql": "v1"}
    return made


@pytest.fixture
async def members(redis: Any, sources: Sources) -> AsyncIterator[list[Member]]:
    async with cluster(redis, sources, PREFILL, DECODE) as made:
        yield made


@pytest.fixture
async def http(redis: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with client(redis) as made:
        yield made


async def test_from_load_to_unload(http: httpx.AsyncClient, members: list[Member]) -> None:
    loaded = (await http.post("/v1/loras", json=SQL)).json()
    assert (loaded["status"], loaded["id"], loaded["unchanged"]) == ("success", "sql@v1", False)
    assert loaded["workers"] == {PREFILL.worker: "loaded", DECODE.worker: "loaded"}
    assert (await http.post("/load_lora", json={"lora_name": "sql", "lora_path": "s3://a/sql"})).json()["unchanged"]
    listed = (await http.get("/v1/loras")).json()
    assert (listed["loras"], listed["count"]) == ({"sql": lora_number("sql@v1")}, 1)
    assert (await http.post("/list_loras")).json() == listed
    state = (await http.get("/v1/loras/sql")).json()
    assert state["state"] == "published" and state["adapter"]["uri"] == "s3://a/sql"
    assert state["workers"] == {PREFILL.worker: {"state": "loaded"}, DECODE.worker: {"state": "loaded"}}
    assert (await http.delete("/v1/loras/sql")).json()["status"] == "success"
    await until(lambda: not any(one.engine.loaded for one in members), "the workers let it go")
    gone = await http.post("/unload_lora", json={"lora_name": "sql"})
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")


async def test_nothing_is_told_of_what_was_unloaded(http: httpx.AsyncClient, members: list[Member]) -> None:
    assert (await http.post("/v1/loras", json=SQL)).status_code == 200
    with members[0].adapters.using("sql@v1"):  # here it is still
        assert (await http.delete("/v1/loras/sql")).status_code == 200
        gone = await http.get("/v1/loras/sql")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")


async def test_what_a_worker_let_go_is_not_loaded(http: httpx.AsyncClient, members: list[Member]) -> None:
    members[1].engine.fault = RuntimeError("no memory")
    assert (await http.post("/v1/loras", json=SQL)).status_code == 502

    async def of_the_first() -> bool:
        workers = (await http.get("/v1/loras/sql")).json()["workers"]
        return bool(workers[PREFILL.worker] == {"state": "unloaded"})

    await until(of_the_first, "the worker that had it says that it does not")


async def test_as_vllms_server(http: httpx.AsyncClient, members: list[Member]) -> None:
    body = {"lora_name": "sql", "lora_path": "s3://a/sql"}
    loaded = await http.post("/v1/load_lora_adapter", json=body)
    assert loaded.text == "Success: LoRA adapter 'sql' added successfully."
    again = await http.post("/v1/load_lora_adapter", json=body)
    assert again.status_code == 400 and "load_inplace" in again.text
    assert (await http.post("/v1/load_lora_adapter", json=body | {"load_inplace": True})).status_code == 200
    unloaded = await http.post("/v1/unload_lora_adapter", json={"lora_name": "sql", "lora_int_id": 1})
    assert unloaded.text == "Success: LoRA adapter 'sql' removed successfully."
    assert (await http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})).status_code == 404


async def test_the_reason_is_each_workers(http: httpx.AsyncClient, members: list[Member], sources: Sources) -> None:
    refused = await http.post("/v1/loras", json={"lora_name": "sql", "source": {"uri": "s3://a/none"}})
    assert refused.status_code == 400
    assert f"{DECODE.worker}, {PREFILL.worker}: nothing at s3://a/none" in refused.json()["error"]["message"]
    members[1].engine.fault = RuntimeError("no memory")
    failed = await http.post("/v1/loras", json=SQL)
    assert (failed.status_code, failed.json()["error"]["code"]) == (502, "adapter_load_failed")
    assert f"{DECODE.worker}: the worker failed" in failed.text and PREFILL.worker not in failed.text
    state = (await http.get("/v1/loras/sql")).json()
    assert (state["state"], state["adapter"]) == ("failed", None)
    assert state["workers"][DECODE.worker]["state"] == "failed" and state["load"]["reason"]
    await until(lambda: not sources.held, "nothing is left")


@pytest.mark.parametrize("name", ["../x", "a/b", "", "x" * 300, MODEL, "a@b", "\u00e9"])
async def test_names_that_no_adapter_has(http: httpx.AsyncClient, members: list[Member], name: str) -> None:
    refused = await http.post("/v1/loras", json=SQL | {"lora_name": name})
    assert refused.status_code == 400, refused.text
    assert not any(one.engine.loaded for one in members)
    assert (await http.get("/v1/loras")).json()["count"] == 0


@pytest.mark.parametrize("body", [{"lora_name": "sql"}, {"source": {"uri": "x"}}, {"lora_name": 5, "lora_path": "x"}])
async def test_bodies_that_say_too_little(http: httpx.AsyncClient, members: list[Member], body: Any) -> None:
    assert (await http.post("/v1/loras", json=body)).status_code == 400


async def test_without_workers_there_is_nobody_to_load_it(http: httpx.AsyncClient) -> None:
    found = await http.post("/v1/loras", json=SQL)
    assert (found.status_code, found.json()["error"]["code"]) == (503, "no_worker")


async def test_who_may(redis: Any) -> None:
    async def status(headers: dict[str, str] | None = None, at: str = "127.0.0.1", **guard: Any) -> int:
        async with client(redis, at, **guard) as http:
            return (await http.get("/v1/loras", headers=headers)).status_code

    admin = {"Authorization": "Bearer sk-admin"}
    assert await status() == 200
    assert await status(at="::1") == 200
    assert await status(at="10.0.0.7") == 403
    assert await status({"Origin": "http://evil.example"}) == 403
    assert await status({"X-Forwarded-For": "10.0.0.7"}) == 403
    for host in ("127.0.0.1", "localhost:8000", "LOCALHOST", "[::1]", "[::1]:80"):
        assert await status({"Host": host}) == 200, host
    for host in ("api.example", "api.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "", "[::2]"):
        assert await status({"Host": host}) == 403, host
    assert await status(keys=("sk-user",)) == 401
    assert await status({"x-api-key": "sk-user"}, keys=("sk-user",)) == 403
    assert await status(admin_key="sk-admin") == 403
    assert await status(admin, "10.0.0.7", admin_key="sk-admin") == 200
    assert await status(admin | {"Host": "api.example"}, admin_key="sk-admin") == 200
    assert await status(admin, "10.0.0.7", admin_key="sk-admin", keys=("sk-user",)) == 200


async def test_a_request_uses_what_it_names_until_it_is_closed(
    redis: Any, http: httpx.AsyncClient, members: list[Member]
) -> None:
    gate = members[0].engine.gate = asyncio.Event()
    loading = asyncio.create_task(http.post("/v1/loras", json=SQL))
    await until(lambda: members[1].engine.loaded, "a worker has it")
    process = adapters(redis)
    asked = RequestContext("r", time.time() + 60)
    with pytest.raises(AdapterLoading):
        await process.enter(asked, "sql")
    gate.set()
    assert (await loading).status_code == 200
    await process.enter(asked, "sql")
    assert asked.adapter == ("sql", "sql@v1")
    await http.delete("/v1/loras/sql")
    for one in members:
        await one.adapters._reconcile()
        assert one.engine.loaded == ["sql@v1"]
    await asked.close()
    await until(lambda: not any(one.engine.loaded for one in members), "its last user has ended")
    for name in ("sql", "../x", "x" * 300):
        with pytest.raises(ModelNotFound):
            await process.enter(RequestContext("s", time.time() + 60), name)
    for model in (None, "", MODEL, 5):
        await process.enter(other := RequestContext("s", time.time() + 60), model)
        assert other.adapter is None and not other.on_close
