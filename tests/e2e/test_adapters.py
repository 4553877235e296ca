"""Adapters on real engines: answers are the merged model's, in every topology, and the model's own do not change.

A topology at a time, by themselves: engines that take adapters are not those of the other tests.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from app.registry import WorkerRecord
from tests.adapters import make_adapter, merge
from tests.e2e.merged import Merged
from tests.e2e.prompts import PROMPTS, Greedy, greedy
from tests.e2e.second_api import second_api
from tests.e2e.stack import MODEL, Stack, up

FLAGS = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--max-cpu-loras", "4")
ASKED = ("text", "image")


@pytest.fixture(scope="module")
def folder(home: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The adapters' root, with two of them."""
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("sql", "other"), 1):
        make_adapter(root / name, model, seed=seed)
    settings = {"ALLOWED_ROOT": str(root), "CACHE_DIRECTORY": str(tmp_path_factory.mktemp("cache"))}
    variables = {f"TRIVET_ADAPTERS__{name}": value for name, value in settings.items()}
    os.environ |= variables
    yield root
    for name in variables:
        del os.environ[name]


@pytest.fixture(scope="module")
def expected(folder: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Greedy]]:
    """adapter, or the model itself -> prompt -> transformers' answer."""
    merged = tmp_path_factory.mktemp("merged")
    folders = {MODEL: model} | {name: merge(model, folder / name, merged / name) for name in ("sql", "other")}
    answers = {}
    for name, path in folders.items():
        one = Merged(path)
        answers[name] = {prompt: one.greedy(PROMPTS[prompt]) for prompt in ASKED}
    return answers


@pytest.fixture(scope="module", params=["agg", "pd", "e_p_d"])
def stack(request: pytest.FixtureRequest, folder: Path, model: Path) -> Iterator[Stack]:
    with up(f"e2e-lora-{request.param}", request.param, model, *FLAGS) as made:
        yield made


def call(stack: Stack, method: str, path: str, body: Any = None) -> httpx.Response:
    return httpx.request(method, f"{stack.base_url}{path}", json=body, timeout=120)


def load(stack: Stack, folder: Path, name: str) -> dict[str, Any]:
    answer = call(stack, "POST", "/v1/loras", {"lora_name": name, "source": {"uri": str(folder / name)}})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def ask(stack: Stack, model: str, prompt: str) -> Greedy:
    return greedy(stack.client, PROMPTS[prompt], model=model)


def test_answers_are_the_merged_models(stack: Stack, folder: Path, expected: dict[str, dict[str, Greedy]]) -> None:
    before = {prompt: ask(stack, MODEL, prompt) for prompt in ASKED}
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        ask(stack, "sql", "text")
    load(stack, folder, "sql")
    load(stack, folder, "other")
    for prompt in ASKED:
        for name in ("sql", "other", MODEL):
            found = ask(stack, name, prompt)
            assert found.same_as(expected[name][prompt]), (name, prompt, found, expected[name][prompt])
        assert ask(stack, MODEL, prompt).tokens == before[prompt].tokens
        answers = [expected[name][prompt].tokens for name in ("sql", "other", MODEL)]
        assert len({tuple(one) for one in answers}) == 3


def test_the_models_are_listed_with_their_parent(stack: Stack, folder: Path) -> None:
    load(stack, folder, "sql")
    listed = {one["id"]: one["parent"] for one in call(stack, "GET", "/v1/models").json()["data"]}
    assert listed[MODEL] is None and listed["sql"] == MODEL


def test_adapters_come_and_go_under_traffic(stack: Stack, folder: Path, model: Path) -> None:
    """No request fails, and the next one after each answer uses the name, from another API process."""
    ending = False

    def talk(number: int) -> int:
        asked = 0
        while not ending:
            answer = stack.client.chat.completions.create(
                model=MODEL, messages=PROMPTS[ASKED[number % 2]], max_tokens=16, extra_body={"ignore_eos": True}
            )
            assert answer.usage is not None and answer.usage.completion_tokens == 16
            asked += 1
        return asked

    with ThreadPoolExecutor(4) as pool, second_api(stack.redis_url, model) as other:
        talks = [pool.submit(talk, number) for number in range(4)]
        try:
            for _ in range(3):
                load(stack, folder, "other")
                body = {"model": "other", "messages": PROMPTS["text"], "max_tokens": 4}
                answer = httpx.post(f"{other}/v1/chat/completions", json=body, timeout=60)
                assert answer.status_code == 200 and answer.json()["model"] == "other", answer.text
                assert call(stack, "DELETE", "/v1/loras/other").status_code == 200
        finally:
            ending = True
        assert all(one.result(timeout=120) > 0 for one in talks)


def test_a_worker_that_is_started_anew_has_them_before_it_serves(stack: Stack, folder: Path) -> None:
    adapter = load(stack, folder, "sql")["id"]
    victim = stack.workers().get("decode") or stack.workers()["agg"]
    os.kill(victim.pid, signal.SIGKILL)
    back = _back(stack, victim)
    assert back.adapters == [adapter]
    assert len(ask(stack, "sql", "text").tokens) == 24


def _back(stack: Stack, victim: WorkerRecord) -> WorkerRecord:
    """The first record of the worker's next incarnation."""
    until = time.monotonic() + 200
    while time.monotonic() < until:
        for one in stack.all_workers():
            if one.id == victim.id and one.incarnation != victim.incarnation:
                return one
        time.sleep(0.05)
    pytest.fail(f"{victim.id} is not back")


def test_what_is_refused_leaves_nothing(stack: Stack, folder: Path) -> None:
    (folder / "broken").mkdir(exist_ok=True)
    for name, uri in (("broken", folder / "broken"), ("gone", folder / "gone"), ("../x", folder / "sql")):
        answer = call(stack, "POST", "/v1/loras", {"lora_name": name, "source": {"uri": str(uri)}})
        assert answer.status_code == 400, answer.text
    names = call(stack, "GET", "/v1/loras").json()["loras"]
    assert not {"broken", "gone", "../x"} & set(names)
