"""Tokens, models, and what `/openapi.json` says."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.serving import Surface

LONG = {"type": "text", "text": "x" * 8192}
HI = [{"role": "user", "content": "hi"}]


async def test_a_prompts_tokens_and_back(surface: Surface) -> None:
    found = (await surface.post("/tokenize", model="tiny", prompt="hi there", return_token_strs=True)).json()
    assert found["tokens"] == surface.tokenizer.encode("hi there")
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 2048)
    assert "".join(found["token_strs"]).replace("Ġ", " ") == "hi there"
    assert (await surface.post("/detokenize", tokens=found["tokens"])).json() == {"prompt": "hi there"}


async def test_a_conversations_tokens(surface: Surface) -> None:
    found = (await surface.post("/tokenize", messages=HI)).json()
    assert found["tokens"] == surface.tokenizer.apply_chat_template(HI, add_generation_prompt=True)["input_ids"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
            400,
            "messages[0].content[0]",
        ),
        ("/tokenize", {"prompt": "x" * 16385}, 400, "prompt"),
        ("/tokenize", {"messages": [*HI, {"role": "user", "content": "x" * 16384}]}, 400, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": [LONG, LONG]}]}, 400, "messages"),
        ("/tokenize", {"messages": HI, "tools": [{"type": "function", "function": {"x" * 16384: 1}}]}, 400, "messages"),
        ("/detokenize", {"tokens": [1] * 2049}, 400, "tokens"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [2**70]}, 400, "tokens[0]"),
    ],
)
async def test_what_is_refused(surface: Surface, path: str, body: dict[str, Any], status: int, param: str) -> None:
    found = await surface.post(path, **body)
    assert (found.status_code, found.json()["error"]["param"]) == (status, param), found.text


async def test_as_much_as_fits_is_taken(surface: Surface) -> None:
    word = max((one for one in surface.tokenizer.get_vocab() if one.isascii() and one.isalpha()), key=len)
    found = await surface.post("/tokenize", prompt=(word * 16384)[:16384])
    assert found.status_code == 200, found.text
    assert (await surface.post("/detokenize", tokens=[71] * 2048)).json() == {
        "prompt": surface.tokenizer.decode([71] * 2048)
    }


async def test_models(surface: Surface) -> None:
    (listed,) = (await surface.http.get("/v1/models")).json()["data"]
    one = (await surface.http.get("/v1/models/tiny")).json()
    assert one["id"] == listed["id"] == "tiny" and one["object"] == "model"
    for name in ("other", "some/other", "tiny/"):
        found = await surface.http.get(f"/v1/models/{name}")
        assert (found.status_code, found.json()["error"]["code"]) == (404, "model_not_found")


async def test_openapi_names_every_body(surface: Surface) -> None:
    described = (await surface.http.get("/openapi.json")).json()
    posts = {path: methods["post"] for path, methods in described["paths"].items() if "post" in methods}
    assert posts.keys() == {
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/responses/{response_id}/cancel",
        "/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings", "/tokenize", "/detokenize",
    }  # fmt: skip
    for path, operation in posts.items():
        assert {"200", "4XX", "5XX"} <= operation["responses"].keys()
        if not path.endswith("cancel"):
            schema = operation["requestBody"]["content"]["application/json"]["schema"]
            assert schema["required"] == [name for name in schema["required"] if name in schema["properties"]]
