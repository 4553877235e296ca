"""Clients that leave, deadlines, and workers that die. Last in the session, since workers start again here."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from app import keys
from tests.e2e.prompts import image, user
from tests.e2e.stack import Stack

LONG = {
    "model": "tiny",
    "messages": user("Tell me a long story."),
    "max_tokens": 1900,
    "stream": True,
    "ignore_eos": True,
}


def eventually(condition: Callable[[], bool], limit_s: float, what: str) -> None:
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until, f"not within {limit_s} s: {what}"
        time.sleep(0.1)


def idle(stack: Stack) -> bool:
    """No engine runs or waits, and no reservation is left."""
    with stack.redis as client:
        loads = [client.exists(keys.load(worker.id, worker.incarnation)) for worker in stack.workers().values()]
    busy = [
        stack.counter(name, f"vllm:num_requests_{state}")
        for name in stack.workers()
        for state in ("running", "waiting")
    ]
    return not any(loads) and not any(busy)


def test_a_client_that_leaves_stops_the_work(stack: Stack) -> None:
    with httpx.stream("POST", f"{stack.base_url}/v1/chat/completions", json=LONG, timeout=60) as answer:
        next(answer.iter_lines())
    eventually(lambda: idle(stack), 10, "the engine is idle and the reservation gone")


def test_a_client_that_leaves_before_the_whole_answer_stops_the_work(stack: Stack) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{stack.base_url}/v1/chat/completions", json={**LONG, "stream": False}, timeout=1.0)
    eventually(lambda: idle(stack), 10, "the engine is idle and the reservation gone")


def test_deadline_of_a_stream(stack: Stack) -> None:
    with pytest.raises(openai.APIError, match="deadline"):
        for _ in stack.client.chat.completions.create(
            model="tiny",
            messages=LONG["messages"],
            max_tokens=1900,
            stream=True,
            extra_body={"ignore_eos": True},
            extra_headers={"X-Request-Timeout": "1"},
        ):
            pass
    eventually(lambda: idle(stack), 10, "the engine is idle and the reservation gone")


def test_deadline_of_a_whole_answer(stack: Stack) -> None:
    answer = stack.post({**LONG, "stream": False}, headers={"X-Request-Timeout": "0.5"})
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    # The same request would fail again, and openai's client would send it twice more.
    assert answer.headers["x-should-retry"] == "false"
    eventually(lambda: idle(stack), 10, "the engine is idle and the reservation gone")


@pytest.mark.parametrize("value", ["soon", "-1", "0", "inf", "nan"])
def test_deadline_that_is_none(stack: Stack, value: str) -> None:
    answer = stack.post({**LONG, "stream": False}, headers={"X-Request-Timeout": value})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "x-request-timeout"


@pytest.mark.parametrize(("topology", "victim"), [("agg", "agg"), ("pd", "decode")])
def test_a_worker_killed_in_the_middle_of_a_stream(stacks: Mapping[str, Stack], topology: str, victim: str) -> None:
    """The client gets an error frame and its end; new requests get 503 at once, and answers once it is back."""
    stack = stacks[topology]
    before = stack.workers()[victim]
    frames: list[str] = []
    with httpx.stream("POST", f"{stack.base_url}/v1/chat/completions", json=LONG, timeout=60) as answer:
        for line in answer.iter_lines():
            if not line:
                continue
            frames.append(line)
            if len(frames) == 3:
                os.kill(before.pid, signal.SIGKILL)
                killed = time.monotonic()
    assert time.monotonic() - killed < 15
    assert frames[-1] == "data: [DONE]"
    assert '"code":"worker_lost"' in frames[-2]
    _refused_at_once(stack, victim)
    _comes_back(stack, victim, before.incarnation)


def test_a_prefill_worker_killed(pd: Stack) -> None:
    """Streams that decode already go on; requests that come now are refused until it is back."""
    before = pd.workers()["prefill"]
    frames: list[str] = []
    with httpx.stream(
        "POST", f"{pd.base_url}/v1/chat/completions", json={**LONG, "max_tokens": 600}, timeout=60
    ) as answer:
        for line in answer.iter_lines():
            if not line:
                continue
            frames.append(line)
            if len(frames) == 3:
                os.kill(before.pid, signal.SIGKILL)
    assert frames[-1] == "data: [DONE]" and '"finish_reason":"length"' in frames[-2]
    _refused_at_once(pd, "prefill")
    _comes_back(pd, "prefill", before.incarnation)


def test_a_whole_answer_outlives_its_prefill_worker(pd: Stack) -> None:
    """From the first token on only the decode worker matters, also when the client waits for the whole."""
    before = pd.workers()["prefill"]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(pd.post, {**LONG, "max_tokens": 800, "stream": False})
        eventually(lambda: pd.counter("decode", "vllm:num_requests_running") == 1, 10, "the request decodes")
        eventually(lambda: pd.counter("decode", "vllm:generation_tokens_total") > 0, 10, "there are tokens")
        os.kill(before.pid, signal.SIGKILL)
        answer = asked.result(60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 800
    _comes_back(pd, "prefill", before.incarnation)


def test_an_engine_killed_ends_its_worker(agg: Stack) -> None:
    """The worker notices, tells its clients, ends, and is started again."""
    import psutil

    before = agg.workers()["agg"]
    engine = next(
        c for c in psutil.Process(before.pid).children(recursive=True) if "EngineCore" in c.name() + str(c.cmdline())
    )
    frames: list[str] = []
    with httpx.stream("POST", f"{agg.base_url}/v1/chat/completions", json=LONG, timeout=60) as answer:
        for line in answer.iter_lines():
            if not line:
                continue
            frames.append(line)
            if len(frames) == 3:
                engine.kill()
    assert frames[-1] == "data: [DONE]" and '"error"' in frames[-2]
    _comes_back(agg, "agg", before.incarnation)


def test_an_encode_worker_killed(e_p_d: Stack) -> None:
    """20 requests with pictures that nobody has seen are under way: all are answered, by way of the prefill worker."""
    stack = e_p_d
    before = stack.workers()["encode"]
    prompts = [user(image(900 + number, (256, 256)), f"Question {number}?") for number in range(20)]
    with ThreadPoolExecutor(20) as pool:
        asked = [
            pool.submit(stack.post, {"model": "tiny", "messages": messages, "max_tokens": 8}) for messages in prompts
        ]
        with stack.redis as client:
            eventually(lambda: client.exists(keys.load(before.id, before.incarnation)) > 0, 10, "it has work")
        os.kill(before.pid, signal.SIGKILL)
        answers = [one.result(100) for one in asked]
    assert [answer.status_code for answer in answers] == [200] * 20, [answer.text[:200] for answer in answers]
    assert stack.counter("prefill", "trivet_items_total", 'event="fallbacks"') > 0, "counted"
    answer = stack.post({"model": "tiny", "messages": user(image(950), "hi"), "max_tokens": 2})
    assert answer.status_code == 200, "also while there is no encode worker"
    _comes_back(stack, "encode", before.incarnation)
    numbers = iter(range(951, 1000))

    def encodes_again() -> bool:
        encoded = stack.counter("encode", "trivet:ec_encoded_items_total")
        assert (
            stack.post({"model": "tiny", "messages": user(image(next(numbers)), "hi"), "max_tokens": 2}).status_code
            == 200
        )
        return stack.counter("encode", "trivet:ec_encoded_items_total") == encoded + 1

    eventually(encodes_again, 10, "the encode worker has its part again")


def test_one_of_two_encode_workers_killed(e_pd: Stack) -> None:
    """What it owed goes to the other one."""
    stack = e_pd
    encoders = [worker for worker in stack.all_workers() if worker.id.startswith("encode@")]
    again = stack.counter("pd", "trivet_items_total", 'event="sent_again"')
    prompts = [user(image(1000 + number, (256, 256)), f"Question {number}?") for number in range(20)]
    with ThreadPoolExecutor(20) as pool:
        asked = [
            pool.submit(stack.post, {"model": "tiny", "messages": messages, "max_tokens": 8}) for messages in prompts
        ]
        with stack.redis as client:
            eventually(lambda: client.exists(keys.load(encoders[0].id, encoders[0].incarnation)) > 0, 10, "it has work")
        os.kill(encoders[0].pid, signal.SIGKILL)
        answers = [one.result(100) for one in asked]
    assert [answer.status_code for answer in answers] == [200] * 20, [answer.text[:200] for answer in answers]
    assert stack.counter("pd", "trivet_items_total", 'event="sent_again"') > again
    _comes_back(stack, "encode", encoders[0].incarnation, number=2)


def _refused_at_once(stack: Stack, victim: str) -> None:
    eventually(lambda: victim not in stack.workers(), 10, "the dead worker is out of the registry")
    eventually(lambda: httpx.get(f"{stack.base_url}/health/ready").status_code == 503, 5, "not ready")
    ready = httpx.get(f"{stack.base_url}/health/ready").json()
    assert set(ready["missing"]) & {"decode", "prefill"}
    started = time.monotonic()
    refused = stack.post({"model": "tiny", "messages": user("hi"), "max_tokens": 1})
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "no_worker"
    assert int(refused.headers["retry-after"]) > 0
    assert time.monotonic() - started < 2


def _comes_back(stack: Stack, victim: str, old: str, number: int = 1) -> None:
    """All workers of its kind are there, and the one that was killed is another."""
    eventually(
        lambda: (
            [worker.id.startswith(f"{victim}@") and worker.incarnation != old for worker in stack.all_workers()].count(
                True
            )
            == number
        ),
        300,
        f"{victim} is started again",
    )
    eventually(lambda: httpx.get(f"{stack.base_url}/health/ready").status_code == 200, 10, "ready again")
    answer = stack.post({"model": "tiny", "messages": user(image(1), "hi"), "max_tokens": 2})
    assert answer.status_code == 200
