"""README.md's examples, run as they stand there but for addresses and names."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis as redis_client

from app import ports
from app.items.index import ItemIndex, Outcome
from app.messages.plans import Assignment
from app.redis import connect
from app.settings_sections import ItemSettings
from tests import pictures, readme
from tests.command_lines import ROOT
from tests.e2e.by_hand import ByHand
from tests.e2e.prompts import image, user
from tests.e2e.stack import MODEL, Stack

EXAMPLE = "The smallest example"
BY_HAND = "Each part by hand"

Shell = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def shell(home: Path, agg: Stack, tmp_path: Path) -> Shell:
    """Runs a README script in a folder with a picture, where redis-cli is at hand and defaults lead to `agg`."""
    (tmp_path / ".trivet").mkdir()
    (tmp_path / ".trivet" / "red-circle.png").write_bytes(pictures.encoded(size=(224, 224)))
    tools = tmp_path / "bin"
    tools.mkdir()
    _tool(tools / "redis-cli", f'exec {sys.executable} -m tests.e2e.redis_cli {agg.redis_url} "$@"')
    environment = os.environ | {
        "PATH": os.pathsep.join([str(tools), f"{sys.prefix}/bin", os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "TRIVET_API__PORT": agg.base_url.rpartition(":")[2],
        "TRIVET_REDIS__BROKER_URL": agg.redis_url,
    }

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        command = tuple(one.replace("http://127.0.0.1:8000", agg.base_url) for one in command)
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)

    return run


def _tool(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def example(language: str, word: str) -> str:
    """The one block of the smallest example that holds the word."""
    (found,) = [block for block in readme.blocks(language, readme.section(EXAMPLE)) if word in block]
    return found


def test_curl_streams_an_answer(shell: Shell) -> None:
    ended = shell("bash", "-euc", example("sh", "curl"))
    frames = [line.removeprefix("data: ") for line in ended.stdout.splitlines() if line]
    assert ended.returncode == 0 and frames[-1] == "[DONE]", ended.stdout + ended.stderr
    choices = [json.loads(frame)["choices"][0] for frame in frames[:-1]]
    assert "".join(one["delta"].get("content") or "" for one in choices).strip()
    assert choices[-1]["finish_reason"] in ("length", "stop")


def test_the_openai_client_asks_about_a_picture(shell: Shell, agg: Stack) -> None:
    before = agg.counter("agg", "vllm:prompt_tokens_total")
    of_the_picture = 49
    ended = shell(sys.executable, "-c", example("python", "OpenAI"))
    assert ended.returncode == 0 and ended.stdout.strip(), ended.stderr
    assert agg.counter("agg", "vllm:prompt_tokens_total") - before > of_the_picture


def test_chat_status_and_down(shell: Shell, agg: Stack) -> None:
    chat, status, down = [shell("bash", "-euc", line) for line in readme.commands(example("sh", "trivet chat"))]
    assert (chat.returncode, status.returncode, down.returncode) == (0, 0, 0), chat.stderr + status.stderr + down.stderr
    assert chat.stdout.strip()
    assert agg.workers()["agg"].id in status.stdout
    assert "nothing runs" in down.stdout, "these tests have another name for what they run"


def test_redis_cli_prints_what_is_shown(shell: Shell, agg: Stack) -> None:
    assert agg.post({"model": MODEL, "messages": user(image(1), "?"), "max_tokens": 1}).status_code == 200
    with agg.redis as client, under_load(agg):
        worker = agg.workers()["agg"]
        fingerprint, identity = _held_image(client)
        named = {
            "agg@gpu0": worker.id,
            "ff35c467a436": worker.incarnation,
            "box-4711-efbc2a": _first(client, "trivet:api:"),
            "8f88df3cecc26ebfbbd6a169f4aacf17": fingerprint,
            "9c1185a5c5e9fc54612808977ee8f548": identity,
        }
        shown = [step for block in readme.blocks("console") for step in readme.dialogue(block)]
        assert len(shown) >= 12
        with claimed(agg, "5d41402abc4b2a76b9719d911017c592", worker.assignment, fingerprint):
            for command, expected in shown:
                for stands_for, name in named.items():
                    command = command.replace(stands_for, name)
                    expected = [line.replace(stands_for, name) for line in expected]
                _until_it_prints(shell, command, shape(expected))


def _first(client: Any, prefix: str) -> str:
    """What follows the prefix in the name of a key."""
    key: bytes = next(client.scan_iter(f"{prefix}*"))
    return key.decode().removeprefix(prefix)


def _held_image(client: Any) -> tuple[str, str]:
    """Fingerprint and identity of an image that a worker holds."""
    for key in client.scan_iter("trivet:emb:*"):
        record = client.get(key.replace(b":emb:", b":item:", 1))
        if record is not None and json.loads(record)["modality"] == "image":
            fingerprint, identity = key.decode().split(":")[2:]
            return fingerprint, identity
    raise AssertionError("no image is held")


@contextmanager
def claimed(agg: Stack, identity: str, owner: Assignment, fingerprint: str) -> Iterator[None]:
    """A claim, made as a worker makes it: real ones last for milliseconds."""

    async def with_index(use: Callable[[ItemIndex], Awaitable[Any]]) -> Any:
        client = connect(agg.redis_url, 5.0, name="test")
        try:
            return await use(ItemIndex(client, fingerprint, ItemSettings()))
        finally:
            await client.aclose()

    answer = asyncio.run(with_index(lambda index: index.claim(identity, owner, 600)))
    assert answer.outcome is Outcome.YOURS
    try:
        yield
    finally:
        asyncio.run(with_index(lambda index: index.give_up(identity, owner)))


def _until_it_prints(shell: Shell, command: str, expected: list[Any]) -> None:
    until = time.monotonic() + 30
    while True:
        ended = shell("bash", "-euc", command)
        if shape(ended.stdout.splitlines()) == expected:
            return
        assert time.monotonic() < until, f"{command}\n{ended.stdout}{ended.stderr}"


def shape(lines: list[str]) -> list[Any]:
    """Lines without what differs from run to run: numbers, ids, values in JSON objects. Equal neighbours are one."""
    found: list[Any] = []
    for line in lines:
        one = _keys(json.loads(line)) if line.startswith("{") else _without_numbers(line)
        if found[-1:] != [one]:
            found.append(one)
    return found


def _without_numbers(line: str) -> str:
    number = r"\d+(\.\d+)?(e\+\d+)?"  # Valkey writes large scores with an exponent, Redis does not
    return "#" if re.fullmatch(number, line) else re.sub(r"[0-9a-f]{6,}|\d+", "#", line)


def _keys(value: Any) -> Any:
    return {name: _keys(one) for name, one in value.items()} if isinstance(value, dict) else type(value).__name__


@contextmanager
def under_load(agg: Stack) -> Iterator[None]:
    """One long streamed answer after another."""
    enough = threading.Event()
    failures: list[BaseException] = []

    def ask() -> None:
        body = {"model": MODEL, "messages": user("Tell me a story."), "max_tokens": 1500, "stream": True}
        try:
            while not enough.is_set():
                with httpx.stream("POST", f"{agg.base_url}/v1/chat/completions", json=body, timeout=60) as answer:
                    assert answer.status_code == 200
                    for _ in answer.iter_raw():
                        if enough.is_set():
                            break
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join(60)
    assert failures == []


def test_every_part_starts_by_hand(home: Path, tmp_path: Path) -> None:
    """An encode worker, one for prefill and decode, the API and Flower, by the README's lines; a picture passes all."""
    activate, redis, apart, together, rest = readme.blocks("sh", readme.section(BY_HAND))
    parts = ByHand(tmp_path)
    expected = {"encode@gpu0": ["encode"], "pd@gpu1": ["decode", "prefill"]}
    workers = [line for line in readme.commands(apart + together) if _name(line) in expected]
    assert len(workers) == 2
    try:
        parts.export(activate)
        parts.run(next(one for one in readme.commands(example("sh", "tiny_model")) if one.startswith("python")))
        for line in (*readme.commands(redis), *workers, *readme.commands(rest)):
            parts.start(line)
        # Ready is what can serve a request, and for that the encode worker is not needed.
        parts.wait_ready(f"{parts.base_url}/health/ready", lambda answer: answer.json()["workers"] == expected)
        parts.wait_ready(f"{parts.flower_url}/healthcheck")
        body = {"model": MODEL, "messages": user(image(2), "What is in this picture?"), "max_tokens": 5}
        answer = httpx.post(f"{parts.base_url}/v1/chat/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        with redis_client.Redis.from_url(parts.redis_url) as client:
            records = [json.loads(client.get(name)) for name in client.scan_iter("trivet:item:*")]
        assert [record["worker"] for record in records] == ["encode@gpu0"]
    finally:
        codes = parts.stop()
    assert {line: code for line, code in codes.items() if "worker" in line and code} == {}, parts.logs()


def _name(line: str) -> str:
    words = shlex.split(line)
    return words[words.index("-n") + 1]


@pytest.mark.parametrize(("part", "code"), [("agg", 70), ("uvicorn", 3)])
def test_exit_code_of_a_part_that_cannot_start(home: Path, tmp_path: Path, part: str, code: int) -> None:
    lines = [line for block in readme.blocks("sh", readme.section(BY_HAND)) for line in readme.commands(block)]
    (line,) = [line for line in lines if re.search(rf"\b{part}\b", line)]
    environment = os.environ | {
        "TRIVET_MODEL": "any",
        "TRIVET_ENABLE_MULTIMODAL": "true",
        "TRIVET_REDIS__BROKER_URL": f"redis://127.0.0.1:{ports.reserve()}/0",
        "TRIVET_REDIS__TIMEOUT_S": "1",
        "PATH": f"{sys.prefix}/bin{os.pathsep}{os.environ['PATH']}",
    }
    ended = subprocess.run(
        shlex.split(line), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == code, ended.stdout + ended.stderr
    assert "no Redis answers" in (ended.stdout + ended.stderr)
    assert str(code) in readme.section("Operations")
