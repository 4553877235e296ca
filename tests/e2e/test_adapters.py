"""Adapters on real engines: answers are the merged model's, in every topology, and the model's own do not change."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from app.roles import TOPOLOGIES
from tests.adapters import WEIGHTS, make_adapter
from tests.e2e import adapters
from tests.e2e.adapters import ASKED, Expected, ask, ask_to_load, call, listed, load, unload
from tests.e2e.prompts import PROMPTS
from tests.e2e.second_api import second_api
from tests.e2e.stack import MODEL, Stack, trivet

TALKERS = 4


@pytest.fixture(params=TOPOLOGIES)
def stack(request: pytest.FixtureRequest, stacks: Mapping[str, Stack]) -> Iterator[Stack]:
    yield stacks[request.param]
    adapters.clear(stacks[request.param])


@pytest.fixture
def agg(stacks: Mapping[str, Stack]) -> Iterator[Stack]:
    yield stacks["agg"]
    adapters.clear(stacks["agg"])


@contextmanager
def talking(talk: Callable[[int], object]) -> Iterator[None]:
    """Threads that each call `talk` with their number again and again, and then tell how often. What goes wrong in one
    is raised in the end."""
    ending = False

    def again(number: int) -> int:
        times = 0
        while not ending:
            talk(number + times)
            times += 1
        return times

    with ThreadPoolExecutor(TALKERS) as pool:
        talks = [pool.submit(again, number) for number in range(TALKERS)]
        try:
            yield
        finally:
            ending = True
    assert all(one.result() > 0 for one in talks)


def test_answers_are_the_merged_models(stack: Stack, merged: Expected) -> None:
    before = {prompt: ask(stack, MODEL, prompt) for prompt in ASKED}
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        ask(stack, "sql", "text")
    load(stack, "sql")
    load(stack, "other")
    for prompt in ASKED:
        for name, answers in merged.items():
            found = ask(stack, name, prompt)
            assert found.same_as(answers[prompt]), (name, prompt, found, answers[prompt])
        assert ask(stack, MODEL, prompt).tokens == before[prompt].tokens


def test_requests_with_and_without_adapters_share_batches(stack: Stack, merged: Expected) -> None:
    load(stack, "sql")
    load(stack, "other")
    asked = [(name, prompt) for name in merged for prompt in ASKED] * 3
    with ThreadPoolExecutor(len(asked)) as pool:
        found = list(pool.map(lambda one: ask(stack, *one), asked))
    for (name, prompt), answer in zip(asked, found, strict=True):
        assert answer.same_as(merged[name][prompt]), (name, prompt, answer, merged[name][prompt])


@pytest.mark.parametrize("stack", ["agg", "e_p_d"], indirect=True)
def test_a_prompt_is_scored_beside_requests_with_adapters(stack: Stack, merged: Expected) -> None:
    """Its rows of logits are not those of the batch."""
    load(stack, "sql")

    def scores() -> list[float]:
        body = {"model": MODEL, "messages": PROMPTS["long text"], "max_tokens": 2, "prompt_logprobs": 1}
        answer = call(stack, "POST", "/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        return [max(one["logprob"] for one in place.values()) for place in answer.json()["prompt_logprobs"][1:]]

    alone = scores()
    with talking(lambda number: ask(stack, ("sql", MODEL)[number % 2], "text")):
        together = [scores() for _ in range(3)]
    for one in together:
        assert one == pytest.approx(alone, abs=1e-3)


def test_as_many_as_the_engine_holds(agg: Stack, merged: Expected) -> None:
    """More than run at once take turns; one more than it holds is refused, and told why."""
    names = ["one", "two", "three", "four"]
    contents = ["sql", "other", "sql", "other"]
    for name, content in zip(names, contents, strict=True):
        load(agg, name, content)
    asked = [*zip(names, contents, strict=True), (MODEL, MODEL)] * 2
    with ThreadPoolExecutor(len(asked)) as pool:
        found = list(pool.map(lambda one: ask(agg, one[0], "text"), asked))
    for (name, content), answer in zip(asked, found, strict=True):
        assert answer.same_as(merged[content]["text"]), (name, answer, merged[content]["text"])
    refused = ask_to_load(agg, "five", adapters.root() / "sql")
    assert (refused.status_code, refused.json()["error"]["code"]) == (502, "adapter_load_failed")
    assert "--max-cpu-loras" in refused.json()["error"]["message"] and listed(agg) == sorted(names)
    unload(agg, "one")
    load(agg, "five", "sql")
    assert ask(agg, "five", "text").same_as(merged["sql"]["text"])


def test_the_models_are_listed_with_their_parent(agg: Stack, merged: Expected) -> None:
    load(agg, "sql")
    found = {one["id"]: one["parent"] for one in call(agg, "GET", "/v1/models").json()["data"]}
    assert found == {MODEL: None, "sql": MODEL}


def test_the_command_line(agg: Stack, merged: Expected) -> None:
    def told(*words: str) -> str:
        ended = trivet(*words, "--name", agg.name, timeout=120)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    loaded = told("lora", "load", "sql", str(adapters.root() / "sql"))
    (held,) = agg.workers()["agg"].adapters
    assert held in loaded and "sql" in told("lora", "list")
    assert f"holds adapters {held}; 4 is most" in told("status")
    assert told("chat", "Which tables are there?", "--model", "sql", "--max-tokens", "8").strip()
    told("lora", "unload", "sql")
    assert told("lora", "list") == "no adapters\n"
    refused = trivet("lora", "load", "sql", "/etc", "--name", agg.name, timeout=120)
    assert refused.returncode == 1 and "adapters.allowed_root" in refused.stderr


def test_adapters_come_and_go_under_traffic(agg: Stack, merged: Expected, model: Path) -> None:
    """No request fails, and the next one after each answer uses the name, from another API process."""

    def talk(number: int) -> None:
        prompt = ASKED[number % 2]
        found = ask(agg, MODEL, prompt)
        assert found.same_as(merged[MODEL][prompt]), (prompt, found)

    with second_api(agg.redis_url, model) as other, talking(talk):
        for _ in range(3):
            load(agg, "other")
            body = {"model": "other", "messages": PROMPTS["text"], "max_tokens": 4}
            answer = httpx.post(f"{other}/v1/chat/completions", json=body, timeout=60)
            assert answer.status_code == 200 and answer.json()["model"] == "other", answer.text
            unload(agg, "other")


@pytest.mark.parametrize("stack", ["agg", "e_p_d"], indirect=True)
def test_each_answer_is_of_one_version(stack: Stack, merged: Expected) -> None:
    """While other content takes the name over, again and again: of the old or of the new, and never the model's."""
    load(stack, "poet", "sql")

    def talk(number: int) -> None:
        prompt, name = ASKED[number % 2], (MODEL, "poet", "poet")[number % 3]
        found = ask(stack, name, prompt)
        versions = [MODEL] if name == MODEL else ["sql", "other"]
        assert any(found.same_as(merged[one][prompt]) for one in versions), (name, prompt, found)

    with talking(talk):
        for content in ("other", "sql", "other"):
            load(stack, "poet", content)
            found = ask(stack, "poet", "text")
            assert found.same_as(merged[content]["text"]), (content, found)


#: A folder of the root, and what the answer says of it.
BAD = {
    "gone": "No such file",
    "rank": "the adapter's rank is 32, and the engine's --max-lora-rank is 16",
    "pickle": "pickle is refused",
    "truncated": "it is truncated",
}
BAD_NAMES = ["../x", "a/b", "", "x" * 300, MODEL, "a@b"]


@pytest.mark.parametrize("stack", ["agg", "e_pd"], indirect=True)
def test_what_is_refused_leaves_nothing(stack: Stack, merged: Expected, model: Path) -> None:
    root = adapters.root()
    make_adapter(root / "rank", model, rank=32)
    make_adapter(root / "pickle", model)
    (root / "pickle" / WEIGHTS).rename(root / "pickle" / "adapter_model.bin")
    make_adapter(root / "truncated", model)
    os.truncate(root / "truncated" / WEIGHTS, 100_000)
    cached = sorted(one.name for one in adapters.cache().glob("*/*"))
    bad = {name: (root / name, reason) for name, reason in BAD.items()}
    bad |= dict.fromkeys(BAD_NAMES, (root / "sql", "name"))
    for name, (uri, reason) in bad.items():
        refused = ask_to_load(stack, name, uri)
        assert refused.status_code == 400 and reason in refused.json()["error"]["message"], refused.text
    assert listed(stack) == [] and sorted(one.name for one in adapters.cache().glob("*/*")) == cached
    for kind, worker in stack.workers().items():
        assert (worker.adapters, worker.adapters_failed, worker.engine.resident_loras) == ([], {}, []), kind
    with stack.redis as redis:
        assert redis.keys("trivet:lora:*") == redis.keys("trivet:lora-users:*") == []
