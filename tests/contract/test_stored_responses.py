"""Stored responses over vLLM's serving layer and a real Redis, in two API processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from api import metrics
from api.middleware import ApiKeyGuard
from api.stored import Background, ResponseStore
from app import keys
from app.errors.serving import WorkerLost
from app.media import MediaHolder
from app.redis import connect
from app.settings_sections import ApiSettings
from tests.contract.conftest import settings
from tests.contract.serving import Surface, answer, events, spoken
from tests.pictures import data_url, encoded
from tests.planes import Plane
from tests.polling import until
from tests.redis_server import free_port

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
PICTURE = {"type": "input_image", "image_url": data_url(encoded()), "detail": "high"}
LOOK: Any = [{"role": "user", "content": [{"type": "input_text", "text": "what?"}, PICTURE]}]
ON = {"response_store_ttl_s": 60, "response_store_max_kb": 20}


class Process:
    """One API process; `api` names it in Redis."""

    def __init__(self, surface: Surface, redis: Any, api: str, **changed: Any) -> None:
        self.surface = surface
        self.pipeline, self.services, self.http = surface.pipeline, surface.services, surface.http
        self.services.store = ResponseStore(redis, api, ApiSettings(**{**ON, **changed}))
        self.services.background = Background(redis)

    async def create(self, **body: Any) -> dict[str, Any]:
        found = await self.http.post(PATH, json={"input": "hi", **body})
        assert found.status_code == 200, found.text
        made: dict[str, Any] = found.json()
        return made

    async def get(self, response_id: str, more: str = "") -> httpx.Response:
        return await self.http.get(f"{PATH}/{response_id}{more}")

    async def cancel(self, response_id: str) -> httpx.Response:
        return await self.http.post(f"{PATH}/{response_id}/cancel")

    async def is_now(self, response_id: str, status: str) -> dict[str, Any]:
        async def reached() -> Any:
            found = (await self.get(response_id)).json()
            return found if found["status"] == status else None

        found: dict[str, Any] = await until(reached, f"{response_id} is {status}")
        return found

    def prompt(self) -> tuple[str, list[str]]:
        """What the last job was asked, and its media."""
        job = self.pipeline.jobs[-1]
        return self.surface.tokenizer.decode(job.prompt.token_ids), [ref.identity for ref in job.prompt.media]


@pytest.fixture
async def processes(serving: Any, tmp_path: Path, redis: Any) -> AsyncIterator[tuple[Process, Process]]:
    async for one in _processes(serving, tmp_path, redis):
        yield one


@pytest.fixture
async def parsing_processes(parsing_serving: Any, tmp_path: Path, redis: Any) -> AsyncIterator[tuple[Process, Process]]:
    async for one in _processes(parsing_serving, tmp_path, redis):
        yield one


async def _processes(serving: Any, folder: Path, redis: Any) -> AsyncIterator[tuple[Process, Process]]:
    """They share the model, the pipeline and the media, as real ones would through Redis and shared memory."""
    serving.client._pipeline.__init__()
    holder = MediaHolder(Plane(), folder, 10_000_000)
    surfaces = [Surface(serving, settings(folder), holder) for _ in range(2)]
    surfaces[1].services.intake = surfaces[0].services.intake
    for surface in surfaces:
        surface.app.add_middleware(ApiKeyGuard, keys=("ada", "bob"), open_metrics=False)
        surface.http.headers["x-api-key"] = "ada"
    for api in ("a", "b"):
        await redis.set(keys.api(api), "{}")
    pair = Process(surfaces[0], redis, "a"), Process(surfaces[1], redis, "b")
    listening = [asyncio.create_task(one.services.background.listen()) for one in pair]
    yield pair
    for task, one in zip(listening, pair, strict=True):
        await one.services.background.stop()
        task.cancel()
        await one.http.aclose()
        assert one.services.in_flight == 0
    await asyncio.gather(*listening, return_exceptions=True)
    assert holder.users == 0, "media that nobody released"
    await holder.close()


def counted(outcome: str) -> float:
    return metrics.REGISTRY.get_sample_value("trivet_responses_stored_total", {"outcome": outcome}) or 0.0


async def test_a_response_is_found_until_it_is_deleted(processes: tuple[Process, Process], redis: Any) -> None:
    one, other = processes
    one.pipeline.deltas = answer("a", " b")
    made = await one.create(metadata={"a": "b"}, instructions="be brief")
    assert (made["status"], made["store"], made["background"]) == ("completed", True, False)
    assert (await other.get(made["id"])).json() == made
    (key,) = await redis.keys("trivet:response:*")
    assert 50 < await redis.ttl(key) <= 60
    assert json.loads(await redis.hget(key, "response")) == made
    gone = await other.http.delete(f"{PATH}/{made['id']}")
    assert gone.json() == {"id": made["id"], "object": "response", "deleted": True}
    for found in (await one.get(made["id"]), await one.get(made["id"], "/input_items"), await one.cancel(made["id"])):
        assert (found.status_code, found.json()["error"]["param"]) == (404, "response_id")


async def test_a_streams_response_is_stored_when_its_last_event_comes(processes: tuple[Process, Process]) -> None:
    one, other = processes
    one.pipeline.deltas = answer("a", " b", finish="length")
    found = events((await one.http.post(PATH, json={"input": "hi", "stream": True})).text)
    first, last = found[0].data["response"], found[-1].data["response"]
    assert (first["id"], first["store"], last["store"]) == (last["id"], True, True)
    assert [event.data["sequence_number"] for event in found] == list(range(len(found)))
    stored = (await other.get(last["id"])).json()
    assert stored == last and stored["status"] == "incomplete"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_that_is_not_to_be_stored(
    processes: tuple[Process, Process], stream: bool, redis: Any
) -> None:
    one, _ = processes
    one.pipeline.deltas = answer("a")
    found = await one.http.post(PATH, json={"input": "hi", "stream": stream, "store": False})
    made = events(found.text)[-1].data["response"] if stream else found.json()
    assert made["store"] is False
    assert (await one.get(made["id"])).status_code == 404
    assert await redis.keys("trivet:response:*") == []


async def test_a_request_id_that_comes_twice_is_two_responses(processes: tuple[Process, Process]) -> None:
    one, _ = processes
    one.pipeline.deltas = answer("a")
    one.http.headers["x-request-id"] = "mine"
    ids = [(await one.create(input=text))["id"] for text in ("first", "second")]
    assert len(set(ids)) == 2 and all(made.startswith("resp_mine.") for made in ids)
    items = [(await one.get(made, "/input_items")).json()["data"] for made in ids]
    assert [found[0]["content"][0]["text"] for found in items] == ["first", "second"]


async def test_the_next_turn_is_what_the_whole_talk_as_input_is(
    parsing_processes: tuple[Process, Process], redis: Any
) -> None:
    one, other = parsing_processes
    first_words = f"<think>hm</think>Wait.{CALL}"
    one.pipeline.deltas = spoken(one.surface.tokenizer, first_words)
    first = await one.create(input=LOOK, tools=[TOOL], instructions="be brief")
    assert [item["type"] for item in first["output"]] == ["reasoning", "message", "function_call"]
    call = first["output"][-1]["call_id"]
    result = [{"type": "function_call_output", "call_id": call, "output": "rain"}]
    second = await other.create(input=result, tools=[TOOL], previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    continued = other.prompt()
    await other.create(input=[*LOOK, *first["output"], *result], tools=[TOOL])
    assert continued == other.prompt() and "rain" in continued[0] and len(continued[1]) == 1
    assert "be brief" not in continued[0]
    await one.http.delete(f"{PATH}/{first['id']}")
    # What came before is part of the second, whatever becomes of the first.
    third = await one.create(input="and now?", previous_response_id=second["id"], instructions="be kind")
    continued = one.prompt()
    talk = [*LOOK, *first["output"], *result, *second["output"], {"role": "user", "content": "and now?"}]
    await one.create(input=talk, instructions="be kind")
    assert continued == one.prompt() and "be kind" in continued[0]
    assert third["instructions"] == "be kind"
    for key in await redis.keys("trivet:response:*"):
        assert b"base64" not in await redis.hget(key, "input")


async def test_an_answer_without_a_word_can_be_continued(processes: tuple[Process, Process]) -> None:
    one, _ = processes
    one.pipeline.deltas = answer("")
    first = await one.create()
    one.pipeline.deltas = answer("a")
    await one.create(input="well?", previous_response_id=first["id"])
    assert "well?" in one.prompt()[0]


async def test_what_a_response_was_made_from(processes: tuple[Process, Process]) -> None:
    one, other = processes
    one.pipeline.deltas = answer("a")
    first = await one.create(input=LOOK)
    second = await one.create(input="and now?", previous_response_id=first["id"])
    listed = (await other.get(second["id"], "/input_items?order=asc")).json()
    asked, said, again = listed["data"]
    assert (listed["object"], listed["has_more"]) == ("list", False)
    assert (listed["first_id"], listed["last_id"]) == (asked["id"], again["id"])
    assert asked["content"][0] == {"type": "input_text", "text": "what?"}
    picture = asked["content"][1]
    assert (picture["type"], picture["image_url"], picture["detail"]) == ("input_image", None, "high")
    assert said == first["output"][0]
    assert again["content"] == [{"type": "input_text", "text": "and now?"}] and again["type"] == "message"
    newest = (await other.get(second["id"], "/input_items?limit=1")).json()
    assert (newest["data"], newest["has_more"]) == ([again], True)
    rest = (await other.get(second["id"], f"/input_items?after={again['id']}")).json()
    assert rest["data"] == [said, asked]
    # What is listed can be sent: a medium goes by its name.
    await one.create(input=listed["data"], store=False)
    assert len(one.prompt()[1]) == 1
    for wrong in ("limit=0", "limit=101", "order=up", "after=nobody"):
        assert (await other.get(second["id"], f"/input_items?{wrong}")).status_code == 400


async def test_each_tenant_has_its_own(processes: tuple[Process, Process]) -> None:
    one, other = processes
    one.pipeline.deltas = answer("a")
    made = await one.create()
    other.http.headers["x-api-key"] = "bob"
    for found in (
        await other.get(made["id"]),
        await other.get(made["id"], "/input_items"),
        await other.cancel(made["id"]),
        await other.http.delete(f"{PATH}/{made['id']}"),
        await other.http.post(PATH, json={"input": "hi", "previous_response_id": made["id"]}),
    ):
        assert found.status_code == 404, found.text
    assert (await one.get(made["id"])).status_code == 200


async def test_a_response_in_the_background(processes: tuple[Process, Process]) -> None:
    one, other = processes
    gate = one.pipeline.gate = asyncio.Event()
    one.pipeline.deltas = answer("a", " b")
    before = counted("stored")
    made = await one.create(background=True, input=LOOK)
    assert (made["status"], made["output"], made["background"], made["store"]) == ("queued", [], True, True)
    assert (await other.get(made["id"], "/input_items")).json()["data"][0]["role"] == "user"
    await other.is_now(made["id"], "in_progress")
    assert one.services.in_flight == 1
    waiting = await other.http.post(PATH, json={"input": "hi", "previous_response_id": made["id"]})
    assert (waiting.status_code, waiting.json()["error"]["param"]) == (400, "previous_response_id")
    gate.set()
    done = await other.is_now(made["id"], "completed")
    assert done["output"][0]["content"][0]["text"] == "a b" and done["usage"]["output_tokens"] == 2
    assert (done["id"], done["created_at"], done["background"]) == (made["id"], made["created_at"], True)
    await until(lambda: one.services.in_flight == 0, "the request has ended")
    assert counted("stored") == before + 1
    assert (await one.cancel(made["id"])).json() == done
    assert (await other.create(previous_response_id=made["id"]))["status"] == "completed"


async def test_a_response_in_the_background_is_cancelled_by_any_process(
    processes: tuple[Process, Process],
) -> None:
    one, other = processes
    one.pipeline.gate = asyncio.Event()
    one.pipeline.deltas = answer("a", " b")
    for asked in (one, other):
        made = await one.create(background=True)
        await other.is_now(made["id"], "in_progress")
        cancelled = (await asked.cancel(made["id"])).json()
        assert (cancelled["id"], cancelled["status"]) == (made["id"], "cancelled")
        await until(lambda: one.services.in_flight == 0, "the request has ended")
        assert (await one.get(made["id"])).json() == cancelled == (await other.cancel(made["id"])).json()


async def test_one_that_is_deleted_is_not_made_on(processes: tuple[Process, Process], redis: Any) -> None:
    one, other = processes
    one.pipeline.gate = asyncio.Event()
    one.pipeline.deltas = answer("a", " b")
    made = await one.create(background=True)
    assert (await other.http.delete(f"{PATH}/{made['id']}")).status_code == 200
    await until(lambda: one.services.in_flight == 0, "the request has ended")
    assert await redis.keys("trivet:response:*") == []


async def test_what_fails_in_the_background_says_why(processes: tuple[Process, Process]) -> None:
    one, other = processes
    one.pipeline.deltas = answer("a", finish=None)
    one.pipeline.error = WorkerLost("the worker died")
    made = await one.create(background=True)
    failed = await other.is_now(made["id"], "failed")
    assert failed["error"] == {"code": "server_error", "message": "the worker died"}
    assert failed["output"] == []


async def test_a_process_that_stops_leaves_no_response_open(processes: tuple[Process, Process]) -> None:
    one, other = processes
    one.pipeline.gate = asyncio.Event()
    one.pipeline.deltas = answer("a", " b")
    made = await one.create(background=True)
    await one.services.background.stop()
    assert (await other.get(made["id"])).json()["status"] == "failed"
    assert one.services.in_flight == 0


async def test_a_process_that_dies_takes_its_responses_with_it(processes: tuple[Process, Process], redis: Any) -> None:
    one, other = processes
    one.pipeline.gate = asyncio.Event()
    one.pipeline.deltas = answer("a", " b")
    made = await one.create(background=True)
    await redis.delete(keys.api("a"))
    lost = (await other.get(made["id"])).json()
    assert lost["status"] == "failed" and "API process" in lost["error"]["message"]
    assert (await other.cancel(made["id"])).json()["status"] == "failed"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"background": True, "store": False}, 400, "store"),
        ({"background": True, "stream": True}, 400, "stream"),
        ({"background": True, "max_output_tokens": "many"}, 400, "max_output_tokens"),
        ({"background": True, "input": "word " * 3000}, 400, None),
        ({"background": "maybe"}, 400, "background"),
        ({"store": "maybe"}, 400, "store"),
        ({"previous_response_id": 5}, 400, "previous_response_id"),
        ({"previous_response_id": "resp_1"}, 404, "previous_response_id"),
        ({"previous_response_id": "x" * 500}, 404, "previous_response_id"),
        ({"input": "x" * 20_001}, 400, "input"),
        ({"input": json.loads("[" * 300 + "]" * 300)}, 400, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 400, "input[0].type"),
    ],
)
async def test_what_is_refused(
    processes: tuple[Process, Process], redis: Any, body: dict[str, Any], status: int, param: str | None
) -> None:
    one, _ = processes
    one.pipeline.deltas = answer("a")
    found = await one.http.post(PATH, json={"input": "hi", **body})
    assert found.status_code == status, found.text
    if param is not None:
        assert found.json()["error"]["param"] == param
    assert one.services.in_flight == 0 and await redis.keys("trivet:response:*") == []


async def test_an_error_names_the_clients_own_field(processes: tuple[Process, Process]) -> None:
    one, _ = processes
    one.pipeline.deltas = answer("a")
    first = await one.create(input=LOOK)
    wrong = [{"role": "user", "content": "x"}, {"role": "assistant", "content": []}]
    found = await one.http.post(PATH, json={"input": wrong, "previous_response_id": first["id"]})
    assert (found.status_code, found.json()["error"]["param"]) == (400, "input[1].content")
    broken = [{"role": "user", "content": [{**PICTURE, "image_url": "data:image/png;base64,AAAA"}]}]
    found = await one.http.post(PATH, json={"input": broken, "previous_response_id": first["id"]})
    assert (found.status_code, found.json()["error"]["param"]) == (400, "input[0].content[0].image_url")


async def test_a_picture_that_is_gone_is_asked_for_again(processes: tuple[Process, Process]) -> None:
    one, _ = processes
    one.pipeline.deltas = answer("a")
    first = await one.create(input=LOOK)
    found = await one.http.post(
        PATH, json={"input": "and?", "previous_response_id": first["id"], "cache_salt": "another"}
    )
    error = found.json()["error"]
    assert (found.status_code, error["code"], error["param"]) == (400, "media_uuid_not_found", "previous_response_id")
    assert "send the conversation as input" in error["message"]


async def test_a_response_in_a_stream_is_not_cancelled_by_its_id(processes: tuple[Process, Process]) -> None:
    one, _ = processes
    one.pipeline.deltas = answer("a")
    made = await one.create()
    for found in (await one.cancel(made["id"]), await one.get(made["id"], "?stream=true")):
        assert found.status_code == 400, found.text


async def test_a_stream_that_fails_is_not_stored(processes: tuple[Process, Process]) -> None:
    one, _ = processes
    one.pipeline.deltas = answer("a", finish=None)
    one.pipeline.error = WorkerLost("the worker died")
    found = events((await one.http.post(PATH, json={"input": "hi", "stream": True})).text)
    last = found[-1].data["response"]
    assert (found[-1].kind, last["status"], last["store"]) == ("response.failed", "failed", False)
    assert (await one.get(last["id"])).status_code == 404


async def test_an_answer_too_large_is_given_and_not_stored(processes: tuple[Process, Process]) -> None:
    one, _ = processes
    one.pipeline.deltas = answer("x" * 30_000)
    before = counted("too_large")
    made = await one.create()
    assert made["store"] is False and len(made["output"][0]["content"][0]["text"]) == 30_000
    assert (await one.get(made["id"])).status_code == 404
    made = await one.create(background=True)
    failed = await one.is_now(made["id"], "failed")
    assert "20 KB" in failed["error"]["message"]
    assert counted("too_large") == before + 2


async def test_an_answer_comes_although_it_cannot_be_stored(processes: tuple[Process, Process]) -> None:
    one, _ = processes
    one.pipeline.deltas = answer("a")
    nobody = connect(f"redis://127.0.0.1:{free_port()}/0", 1.0, name="test")
    one.services.store = ResponseStore(nobody, "a", ApiSettings(**ON))
    before = counted("broker_unavailable")
    assert (await one.create())["store"] is False
    assert counted("broker_unavailable") == before + 1
    for found in (
        await one.get("resp_1"),
        await one.http.post(PATH, json={"input": "hi", "background": True}),
        await one.http.post(PATH, json={"input": "hi", "previous_response_id": "resp_1"}),
    ):
        assert (found.status_code, found.json()["error"]["code"]) == (503, "broker_unavailable")
    await nobody.aclose()
