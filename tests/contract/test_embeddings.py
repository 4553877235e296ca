"""POST /v1/embeddings over vLLM's serving layer, of a model that makes embeddings, and of one that does not."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from openai.types import CreateEmbeddingResponse

from api import context
from app.errors.serving import NoWorker
from app.messages.deltas import Delta
from tests.contract.serving import Surface

PATH = "/v1/embeddings"
CONTEXT = 2048
HI = [{"role": "user", "content": "hi"}]


def numbers(tokens: list[int]) -> tuple[float, float]:
    """What the stand-in for the workers makes of a prompt."""
    return float(len(tokens)), tokens[0] + 0.5


class Workers:
    """In the place of the pipeline's: later prompts have their vectors earlier. `most` were here at once."""

    def __init__(self) -> None:
        self.jobs: list[Any] = []
        self.here = self.most = 0
        self.failing: list[int] | None = None
        #: Without it vectors come at once, with it when it is set.
        self.gate: asyncio.Event | None = None

    async def stream(self, job: Any) -> AsyncGenerator[list[Delta], None]:
        self.jobs.append(job)
        self.here += 1
        self.most = max(self.most, self.here)
        try:
            if job.prompt.token_ids == self.failing:
                raise NoWorker("no worker for: prefill")
            if self.gate is not None:
                await self.gate.wait()
            for _ in range(10 - len(self.jobs)):
                await asyncio.sleep(0)
            vector = struct.pack("<2f", *numbers(job.prompt.token_ids))
            measured = {"prefill": 1.5} if job.on_plan else None
            delta = Delta(request=job.request_id, seq=0, vector=vector, cached_tokens=1, measured=measured)
            delta.finish_reason = "stop"
            yield [delta]
        finally:
            self.here -= 1


@pytest.fixture
def workers(embedding: Surface, monkeypatch: pytest.MonkeyPatch) -> Workers:
    made = Workers()
    monkeypatch.setattr(embedding.pipeline, "stream", made.stream)
    return made


def vectors(found: Any) -> list[tuple[float, ...]]:
    """Of a whole answer, in its order."""
    answer = CreateEmbeddingResponse.model_validate(found)
    assert [one.index for one in answer.data] == list(range(len(answer.data)))
    return [tuple(one.embedding) for one in answer.data]


async def test_a_text(embedding: Surface, workers: Workers) -> None:
    tokens = embedding.tokenizer.encode("hi there")
    found = (await embedding.post(PATH, model="tiny", input="hi there", encoding_format=None, user="u")).json()
    assert (found["id"], found["object"], found["model"]) == ("embd-mine", "list", "tiny")
    assert vectors(found) == [numbers(tokens)]
    assert (found["usage"]["prompt_tokens"], found["usage"]["total_tokens"]) == (len(tokens), len(tokens))
    (job,) = workers.jobs
    assert (job.prompt.token_ids, job.does) == (tokens, "embed")
    # What vLLM would default is settled here and in the engine alike.
    assert job.params == {"dimensions": None, "use_activation": True}


@pytest.mark.parametrize("given", ["hi", ["hi"], [5, 6, 7], [[5, 6, 7]]])
async def test_each_form_of_an_input(embedding: Surface, workers: Workers, given: Any) -> None:
    found = await embedding.post(PATH, input=given)
    assert found.status_code == 200, found.text
    tokens = embedding.tokenizer.encode("hi") if "hi" in given else [5, 6, 7]
    assert [job.prompt.token_ids for job in workers.jobs] == [tokens]


@pytest.mark.parametrize("given", [["hi", "you there", "hi"], [[5, 6], [7], [5, 6]]])
async def test_several_come_in_their_order_and_are_counted_together(
    embedding: Surface, workers: Workers, given: Any
) -> None:
    found = (await embedding.post(PATH, input=given)).json()
    tokens = [embedding.tokenizer.encode(one) if isinstance(one, str) else one for one in given]
    assert vectors(found) == [numbers(one) for one in tokens]
    assert found["usage"]["prompt_tokens"] == sum(map(len, tokens))
    assert len({job.request_id for job in workers.jobs}) == 3


async def test_base64_and_bytes_are_the_same_numbers(embedding: Surface, workers: Workers) -> None:
    body = {"input": [[5, 6], [7]]}
    plain = vectors((await embedding.post(PATH, **body)).json())
    coded = (await embedding.post(PATH, **body, encoding_format="base64")).json()["data"]
    assert [struct.unpack("<2f", base64.b64decode(one["embedding"])) for one in coded] == plain
    raw = await embedding.post(PATH, **body, encoding_format="bytes")
    assert raw.headers["content-type"] == "application/octet-stream"
    assert raw.content == b"".join(struct.pack("<2f", *one) for one in plain)
    assert json.loads(raw.headers["metadata"])["usage"]["prompt_tokens"] == 3


async def test_no_more_than_so_many_are_with_the_workers_at_once(
    embedding: Surface, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "INPUTS_AT_ONCE", 3)
    found = (await embedding.post(PATH, input=[[n + 1] for n in range(20)])).json()
    assert vectors(found) == [(1.0, n + 1.5) for n in range(20)]
    assert workers.most == 3


async def test_the_number_of_inputs_is_limited(embedding: Surface, workers: Workers) -> None:
    embedding.services.settings.api.max_embedding_inputs = 2
    assert (await embedding.post(PATH, input=["a", "b"])).status_code == 200
    found = await embedding.post(PATH, input=["a", "b", "c"])
    assert (found.status_code, found.json()["error"]["param"]) == (400, "input")
    assert "api.max_embedding_inputs" in found.json()["error"]["message"]
    assert (await embedding.post(PATH, input=[5, 6, 7])).status_code == 200, "one input of three tokens"


@pytest.mark.parametrize("padding", [True, "longest", "max_length"])
async def test_no_word_becomes_a_context_of_padding(embedding: Surface, workers: Workers, padding: Any) -> None:
    found = await embedding.post(PATH, input=["a"], padding=padding)
    assert (found.status_code, found.json()["error"]["param"]) == (400, "padding")
    assert (await embedding.post(PATH, input=["a"], padding="do_not_pad")).status_code == 200
    assert (await embedding.post(PATH, input=["a"], padding=None)).status_code == 200


async def test_no_header_describes_thousands_of_inputs(embedding: Surface, workers: Workers) -> None:
    inputs = [[5]] * 65
    found = await embedding.post(PATH, input=inputs, encoding_format="bytes")
    assert (found.status_code, found.json()["error"]["param"]) == (400, "encoding_format")
    assert len((await embedding.post(PATH, input=inputs, encoding_format="bytes_only")).content) == 65 * 8
    assert (await embedding.post(PATH, input=inputs[1:], encoding_format="bytes")).status_code == 200


@pytest.mark.parametrize("dimensions", [32, 64, 128])
async def test_dimensions_are_for_the_worker(embedding: Surface, workers: Workers, dimensions: int) -> None:
    found = await embedding.post(PATH, input="hi", dimensions=dimensions, use_activation=False)
    assert found.status_code == 200, found.text
    assert workers.jobs[0].params == {"dimensions": dimensions, "use_activation": False}


async def test_an_input_may_fill_the_context(embedding: Surface, workers: Workers) -> None:
    assert (await embedding.post(PATH, input=[5] * CONTEXT)).status_code == 200
    for longer in ([5] * (CONTEXT + 1), "x?" * CONTEXT):
        found = await embedding.post(PATH, input=longer)
        assert (found.status_code, found.json()["error"]["code"]) == (400, "context_length_exceeded")
        kept = await embedding.post(PATH, input=longer, truncate_prompt_tokens=-1)
        assert kept.json()["usage"]["prompt_tokens"] == CONTEXT


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": {"text": "hi"}}, "input"),
        ({"input": ["hi", ""]}, None),
        ({"input": ["hi", 5]}, "input"),
        ({"input": [[5], []]}, None),
        ({"input": "hi", "dimensions": 33}, "dimensions"),
        ({"input": "hi", "dimensions": 0}, "dimensions"),
        ({"input": "hi", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "hi", "normalize": False}, "normalize"),
        ({"input": "hi", "truncate_prompt_tokens": CONTEXT + 1}, None),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "data:,"}]}]}, "messages[0]"),
    ],
)
async def test_what_is_refused(embedding: Surface, workers: Workers, body: dict[str, Any], param: str | None) -> None:
    found = await embedding.post(PATH, **body)
    error = found.json()["error"]
    assert found.status_code == 400, found.text
    assert param is None or (error["param"] or "").startswith(param), error
    assert error["message"] and "/" not in error["message"], "no path of this host"
    assert workers.here == 0


async def test_a_conversation(embedding: Surface, workers: Workers) -> None:
    assert (await embedding.post(PATH, messages=HI)).status_code == 200
    expected = embedding.tokenizer.apply_chat_template(HI, add_generation_prompt=False)["input_ids"]
    assert workers.jobs[0].prompt.token_ids == expected


async def test_one_that_fails_ends_the_others(embedding: Surface, workers: Workers) -> None:
    workers.gate, workers.failing = asyncio.Event(), [7]
    found = await embedding.post(PATH, input=[[5], [6], [7]])
    assert (found.status_code, found.json()["error"]["code"]) == (503, "no_worker")
    assert (len(workers.jobs), workers.here) == (3, 0)


async def test_the_deadline_ends_them_all(embedding: Surface, workers: Workers) -> None:
    workers.gate = asyncio.Event()
    headers = {"X-Request-Timeout": "0.3"}
    found = await embedding.http.post(PATH, json={"input": [[5], [6]]}, headers=headers)
    assert (found.status_code, found.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert (len(workers.jobs), workers.here, embedding.services.in_flight) == (2, 0, 0)


async def test_those_that_wait_for_their_turn_never_begin(
    embedding: Surface, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "INPUTS_AT_ONCE", 3)
    workers.gate, workers.failing = asyncio.Event(), [3]
    many = [[n + 4] for n in range(20)]
    found = await embedding.http.post(PATH, json={"input": many}, headers={"X-Request-Timeout": "0.3"})
    assert (found.status_code, len(workers.jobs)) == (504, 3)
    found = await embedding.post(PATH, input=[[3], *many])
    assert (found.status_code, len(workers.jobs), workers.here) == (503, 4, 0)


async def test_timings(embedding: Surface, workers: Workers) -> None:
    found = await embedding.http.post(PATH, json={"input": ["a", "b"]}, headers={"X-Trivet-Timings": "1"})
    told = json.loads(found.headers["X-Trivet-Timings"])
    assert (told["prefill_ms"], told["cached_tokens"], told["decode_ms"]) == (1.5, 2, 0.0)


async def test_another_model_is_not_found(embedding: Surface, workers: Workers) -> None:
    found = await embedding.post(PATH, model="other", input="hi")
    assert (found.status_code, found.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/chat/completions", {"messages": HI, "stream": True}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"model": "tiny", "messages": HI, "max_tokens": 5}),
        ("/v1/messages/count_tokens", {"model": "tiny", "messages": HI}),
    ],
)
async def test_it_writes_no_text(embedding: Surface, workers: Workers, path: str, body: dict[str, Any]) -> None:
    found = await embedding.post(path, **body)
    assert found.status_code == 404 and "/v1/embeddings" in found.json()["error"]["message"], found.text
    assert found.json()["error"].get("code", "wrong_endpoint") == "wrong_endpoint"
    assert workers.jobs == []


async def test_its_tokens_and_its_name_are_told(embedding: Surface) -> None:
    found = (await embedding.post("/tokenize", prompt="hi there")).json()
    assert found["tokens"] == embedding.tokenizer.encode("hi there")
    assert (await embedding.post("/detokenize", tokens=found["tokens"])).json() == {"prompt": "hi there"}
    (listed,) = (await embedding.http.get("/v1/models")).json()["data"]
    assert (listed["id"], listed["max_model_len"]) == ("tiny", CONTEXT)
    assert await embedding.serving.client.get_supported_tasks() == ("embed",)


@pytest.mark.parametrize("body", [{"input": "hi"}, {}])
async def test_a_model_that_writes_makes_none(surface: Surface, body: dict[str, Any]) -> None:
    found = await surface.post(PATH, **body)
    assert (found.status_code, found.json()["error"]["code"]) == (404, "wrong_endpoint")
    assert "does not make embeddings" in found.json()["error"]["message"]
    assert await surface.serving.client.get_supported_tasks() == ("generate",)
