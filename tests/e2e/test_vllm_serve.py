"""The embedding cache in vLLM's own server, with no other part of Trivet, as the connector's documentation has it."""

from __future__ import annotations

import base64
import io
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.e2e.stack import MODEL
from tests.e2e.vllm_server import CAPACITY_GB, Server
from tests.pictures import data_url
from workers.embeddings.store import NEW

#: Enough pictures for vLLM's own encoder cache, of as many tokens as the longest prompt, to forget the first.
OTHERS = 40


@dataclass
class Conversation:
    """With the server, about pictures. Its counters begin where they were before."""

    server: Server
    before: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.before = self.counts()

    def ask(self, text: str, *parts: dict[str, Any]) -> httpx.Response:
        content = [*parts, {"type": "text", "text": text}]
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 12,
            "temperature": 0,
        }
        return httpx.post(f"{self.server.url}/v1/chat/completions", json=body, timeout=60)

    def answer(self, text: str, *parts: dict[str, Any]) -> str:
        response = self.ask(text, *parts)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["message"]["content"])

    def counts(self) -> dict[str, int]:
        """The connector's Prometheus counters that have risen."""
        found = {}
        for line in httpx.get(f"{self.server.url}/metrics", timeout=10).text.splitlines():
            name, value = line.partition("{")[0], line.rpartition(" ")[2]
            if name.startswith("trivet:ec_") and name.endswith("_total"):
                name = name.removeprefix("trivet:ec_").removesuffix("_total")
                found[name] = int(float(value)) - self.before.get(name, 0)
        return {name: value for name, value in found.items() if value}

    def files(self) -> set[Path]:
        return {path for path in self.server.root.rglob("*") if path.is_file() and path.name != ".lock"}


@pytest.fixture
def talk(vllm_server: Server) -> Conversation:
    return Conversation(vllm_server)


def picture(seed: int, **more: str) -> dict[str, Any]:
    """A part with a picture of 64 tokens."""
    pixels = random.Random(seed).randbytes(256 * 256 * 3)
    out = io.BytesIO()
    Image.frombytes("RGB", (256, 256), pixels).save(out, "PNG", compress_level=1)
    return {"type": "image_url", "image_url": {"url": data_url(out.getvalue())}, **more}


def without_pixels(uuid: str) -> dict[str, Any]:
    """The same part as a consumer of embeddings gets it: the grid alone."""
    import torch

    out = io.BytesIO()
    torch.save(torch.tensor([1, 16, 16]), out)
    grid = base64.b64encode(out.getvalue()).decode()
    return {"type": "image_embeds", "image_embeds": {"image_grid_thw": grid}, "uuid": uuid}


def test_an_image_is_encoded_once(talk: Conversation) -> None:
    """Asked about again long after, with other words, a picture is loaded; the answer is the same as it was."""
    name, files = "../../etc/x", talk.files()
    first = talk.answer("What is it?", picture(0, uuid=name))
    assert talk.counts() == {"encoded_items": 1, "encode_steps": 1, "saved_items": 1}
    for start in range(1, OTHERS, 4):
        talk.answer("Compare.", *map(picture, range(start, start + 4)))
    encoded = talk.counts()
    assert encoded["encoded_items"] == encoded["saved_items"] == 1 + OTHERS
    assert encoded["encode_steps"] <= encoded["encoded_items"] and "loaded_items" not in encoded

    assert talk.answer("Which colours has it?", picture(0, uuid=name))
    assert talk.counts() == {**encoded, "loaded_items": 1}
    assert talk.answer("What is it?", picture(0, uuid=name)) == first
    # Without pixels too, since the embedding is all that it takes.
    assert talk.answer("What is it?", without_pixels(name)) == first
    assert talk.counts()["encoded_items"] == encoded["encoded_items"]

    names = {path.name for path in talk.files() - files}
    assert len(names) == 1 + OTHERS
    assert all(set(one.removesuffix(NEW)) <= set("0123456789abcdef") for one in names)
    assert sum(path.stat().st_size for path in talk.files()) <= CAPACITY_GB * 1e9


def test_an_item_without_pixels_or_embedding_fails_alone(talk: Conversation) -> None:
    """Its encoder would have to run on nothing, which ends an engine."""
    lost = talk.ask("What is it?", without_pixels("nobody has encoded it"))
    assert lost.status_code == 500
    assert talk.counts()["unavailable"] == 1
    assert talk.answer("What is it?", picture(0))


def test_nothing_is_left(talk: Conversation) -> None:
    assert talk.files()
    talk.server.stop()
    end = time.monotonic() + 10
    while left := list(talk.server.root.glob("*/*")):
        assert time.monotonic() < end, f"left behind: {left}"
        time.sleep(0.05)
