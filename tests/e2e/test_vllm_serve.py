"""The embedding cache in vLLM's own server, with no other part of Trivet, as the connector's documentation has it."""

from __future__ import annotations

import base64
import io
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from app import ports
from tests.e2e.stack import ENGINE, MODEL
from tests.pictures import data_url
from workers.embeddings.store import NEW

START_S = 240.0
STOP_S = 60.0
CAPACITY_GB = 0.02
CONNECTOR = {
    "ec_connector": "TrivetECConnector",
    "ec_connector_module_path": "workers.ec_connector",
    "ec_role": "ec_both",
}
#: Enough pictures for vLLM's own encoder cache, of as many tokens as the longest prompt, to forget the first.
OTHERS = 40


@dataclass
class Server:
    url: str
    root: Path
    process: subprocess.Popen[bytes]

    def ask(self, text: str, *parts: dict[str, Any]) -> httpx.Response:
        content = [*parts, {"type": "text", "text": text}]
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 12,
            "temperature": 0,
        }
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=60)

    def answer(self, text: str, *parts: dict[str, Any]) -> str:
        response = self.ask(text, *parts)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["message"]["content"])

    def counts(self) -> dict[str, int]:
        """The connector's Prometheus counters that are not 0."""
        found = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=10).text.splitlines():
            name, _, value = line.partition("{")[0], "", line.rpartition(" ")[2]
            if name.startswith("trivet:ec_") and name.endswith("_total") and float(value):
                found[name.removeprefix("trivet:ec_").removesuffix("_total")] = int(float(value))
        return found

    def files(self) -> list[Path]:
        return [path for path in self.root.rglob("*") if path.is_file() and path.name != ".lock"]


@pytest.fixture(scope="module")
def server(home: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("shm")
    port = ports.reserve()
    extra = {"capacity_gb": CAPACITY_GB, "directory": str(root)}
    # What `vllm serve` runs; that command itself does not start with the CPU build.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)]
    command += [*shlex.split(ENGINE), '{"image":4}', "--no-enable-prefix-caching"]
    command += ["--ec-transfer-config", json.dumps({**CONNECTOR, "ec_connector_extra_config": extra})]
    environment = os.environ | {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    log = root.with_name("vllm.log")
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        _wait_until_healthy(process, f"http://127.0.0.1:{port}", log)
        yield Server(f"http://127.0.0.1:{port}", root, process)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        finally:
            process.kill()


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    pytest.fail(f"vLLM did not start:\n{log.read_text(errors='replace')[-3000:]}")


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


def test_an_image_is_encoded_once(server: Server) -> None:
    """Asked about again long after, with other words, a picture is loaded; the answer is the same as it was."""
    name = "../../etc/x"
    first = server.answer("What is it?", picture(0, uuid=name))
    assert server.counts() == {"encoded_items": 1, "encode_steps": 1, "saved_items": 1}
    for start in range(1, OTHERS, 4):
        server.answer("Compare.", *map(picture, range(start, start + 4)))
    encoded = server.counts()
    assert encoded["encoded_items"] == encoded["saved_items"] == 1 + OTHERS
    assert encoded["encode_steps"] <= encoded["encoded_items"] and "loaded_items" not in encoded

    assert server.answer("Which colours has it?", picture(0, uuid=name))
    assert server.counts() == {**encoded, "loaded_items": 1}
    assert server.answer("What is it?", picture(0, uuid=name)) == first
    # Without pixels too, since the embedding is all that it takes.
    assert server.answer("What is it?", without_pixels(name)) == first
    assert server.counts()["encoded_items"] == encoded["encoded_items"]

    names = {path.name for path in server.files()}
    assert len(names) == 1 + OTHERS
    assert all(set(one.removesuffix(NEW)) <= set("0123456789abcdef") for one in names)
    assert sum(path.stat().st_size for path in server.files()) <= CAPACITY_GB * 1e9


def test_an_item_without_pixels_or_embedding_fails_alone(server: Server) -> None:
    """Its encoder would have to run on nothing, which ends an engine."""
    lost = server.ask("What is it?", without_pixels("nobody has encoded it"))
    assert lost.status_code == 500
    assert server.counts()["unavailable"] == 1
    assert server.answer("What is it?", picture(0))


def test_nothing_is_left(server: Server) -> None:
    assert server.files()
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(STOP_S)
    end = time.monotonic() + 10
    while left := list(server.root.glob("*/*")):
        assert time.monotonic() < end, f"left behind: {left}"
        time.sleep(0.05)
