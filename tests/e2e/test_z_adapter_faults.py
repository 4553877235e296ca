"""Workers that die with adapters, and in the middle of loading one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

from app.adapters.intake import CONFIG
from app.registry import WorkerRecord
from tests.e2e import adapters
from tests.e2e.adapters import Expected, ask, ask_to_load, call, eventually, listed, load
from tests.e2e.prompts import PROMPTS
from tests.e2e.stack import MODEL, START_S, Stack
from tests.hub_server import Hub, hub_server

#: A worker that is killed is taken for alive until its lease has run out.
LEASE_S = 15.0
#: And a load for possible some seconds longer.
ENDS_S = 30.0


@pytest.fixture
def stack(request: pytest.FixtureRequest, stacks: Mapping[str, Stack]) -> Iterator[Stack]:
    yield stacks[request.param]
    adapters.clear(stacks[request.param])


@pytest.fixture
def server() -> Iterator[Hub]:
    """What workers take for S3. It gives no file before its gate is opened."""
    with hub_server(adapters.s3_port()) as hub:
        hub.gate.clear()
        yield hub


def kill(stack: Stack, kind: str) -> WorkerRecord:
    victim = stack.workers()[kind]
    os.kill(victim.pid, signal.SIGKILL)
    return victim


def gone(stack: Stack, victim: WorkerRecord) -> None:
    eventually(lambda: victim.id not in [one.id for one in stack.all_workers()], LEASE_S, f"{victim.id} is gone")


def back(stack: Stack, victim: WorkerRecord) -> WorkerRecord:
    """The first record of the worker's next incarnation."""
    found: list[WorkerRecord] = []

    def is_there() -> bool:
        found.extend(
            one for one in stack.all_workers() if one.id == victim.id and one.incarnation != victim.incarnation
        )
        return bool(found)

    eventually(is_there, START_S, f"{victim.id} is back")
    return found[0]


def serves(stack: Stack) -> None:
    eventually(lambda: call(stack, "GET", "/health/ready").status_code == 200, 30, "ready")


def refused(stack: Stack, model: str) -> tuple[int, str]:
    answer = stack.post({"model": model, "messages": PROMPTS["text"], "max_tokens": 2})
    return answer.status_code, answer.json()["error"]["code"]


@pytest.mark.parametrize("stack", ["e_p_d"], indirect=True)
def test_a_worker_that_is_started_anew_has_them_before_it_serves(stack: Stack, merged: Expected) -> None:
    wanted = sorted([load(stack, "sql")["id"], load(stack, "other")["id"]])
    killed = kill(stack, "decode")
    gone(stack, killed)
    eventually(lambda: call(stack, "GET", "/health/ready").status_code == 503, 10, "the API knows it")
    assert refused(stack, "sql") == (503, "no_worker"), "nobody answers in its place"
    assert back(stack, killed).adapters == wanted
    serves(stack)
    for name in ("sql", "other", MODEL):
        assert ask(stack, name, "image").same_as(merged[name]["image"]), name


@pytest.mark.parametrize("stack", ["pd"], indirect=True)
@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_a_load_goes_on_without_a_worker_that_is_killed(
    stack: Stack, victim: str, merged: Expected, server: Hub
) -> None:
    """One of the two fetches it, and the other waits for that: whichever dies. It has the adapter before it serves."""
    uri = adapters.put(server, adapters.root() / "sql")
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(ask_to_load, stack, "late", uri)
        try:
            eventually(lambda: server.asked_for(CONFIG) > 0, 30, "a worker fetches it")
            assert refused(stack, "late") == (503, "adapter_loading")
            killed = kill(stack, victim)
            gone(stack, killed)
            assert call(stack, "GET", "/v1/loras/late").json()["state"] == "loading" and listed(stack) == []
        finally:
            server.gate.set()
        answer = loading.result(120)
    assert answer.status_code == 200, answer.text
    (survivor,) = [one for one in stack.all_workers() if one.id != killed.id]
    assert answer.json()["workers"] == {survivor.id: "loaded"}
    asked = server.asked_for(CONFIG)
    assert back(stack, killed).adapters == survivor.adapters == [answer.json()["id"]]
    assert server.asked_for(CONFIG) == asked, "it is in the cache"
    assert not [*adapters.cache().glob("flights/*")]
    serves(stack)
    for prompt in adapters.ASKED:
        assert ask(stack, "late", prompt).same_as(merged["sql"][prompt]), prompt
        assert ask(stack, MODEL, prompt).same_as(merged[MODEL][prompt]), prompt


@pytest.mark.parametrize("stack", ["agg"], indirect=True)
def test_a_load_whose_last_worker_is_killed_ends(stack: Stack, merged: Expected, server: Hub) -> None:
    """And leaves neither a name nor a file; the next one is as the first."""
    uri = adapters.put(server, adapters.root() / "other")
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(ask_to_load, stack, "late", uri)
        try:
            eventually(lambda: server.asked_for(CONFIG) > 0, 30, "the worker fetches it")
            killed = kill(stack, "agg")
            answer = loading.result(ENDS_S)
        finally:
            server.gate.set()
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "adapter_load_failed")
    assert "gone" in answer.json()["error"]["message"]
    state = call(stack, "GET", "/v1/loras/late").json()
    assert (state["state"], state["adapter"], listed(stack)) == ("failed", None, [])
    again = back(stack, killed)
    assert (again.adapters, again.adapters_failed) == ([], {})
    serves(stack)
    assert refused(stack, "late") == (404, "model_not_found")
    load(stack, "late", "sql")
    assert not [*adapters.cache().glob("staging/*"), *adapters.cache().glob("flights/*")]
    assert ask(stack, "late", "text").same_as(merged["sql"]["text"])
    assert ask(stack, MODEL, "text").same_as(merged[MODEL]["text"])
