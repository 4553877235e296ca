"""The encode stage with real engines: who encodes what, how often, and what the cluster knows of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from app import keys
from bench.deployment import metric
from tests.e2e.prompts import greedy, image, user, video
from tests.e2e.stack import Stack

ENCODED = "trivet:ec_encoded_items_total"
STEPS = "trivet:ec_encode_steps_total"


def ask(stack: Stack, messages: list[dict[str, Any]], tokens: int = 4) -> str:
    with stack.client as client:
        answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=tokens, temperature=0)
    return answer.choices[0].message.content or ""


def all_at_once(stack: Stack, prompts: list[list[dict[str, Any]]]) -> list[str]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda messages: ask(stack, messages), prompts))


def events(stack: Stack, worker: str, metric: str, event: str) -> float:
    return stack.counter(worker, f"{metric}_total", f'event="{event}"')


@pytest.fixture(params=["e_pd", "e_p_d"])
def split(request: pytest.FixtureRequest, stacks: Mapping[str, Stack]) -> Stack:
    return stacks[request.param]


def consumer(stack: Stack) -> str:
    """The worker that prefills."""
    return "prefill" if "prefill" in stack.workers() else "pd"


@pytest.mark.parametrize("medium", [image(101), video(102)], ids=["image", "video"])
def test_the_encode_worker_encodes_and_nobody_else(split: Stack, medium: dict[str, Any]) -> None:
    prefill = consumer(split)
    before = split.counter("encode", ENCODED)
    ask(split, user(medium, "What is it?"))
    assert split.counter("encode", ENCODED) == before + 1
    assert split.counter(prefill, ENCODED) == 2, "its own self-check, of an image and a video"


def test_a_requests_items_go_to_several_encode_workers(e_pd: Stack) -> None:
    encoders = [worker for worker in e_pd.all_workers() if worker.id.startswith("encode@")]
    assert len(encoders) == 2
    before = [metric(worker, ENCODED) for worker in encoders]
    ask(e_pd, user(*(image(150 + number) for number in range(4)), "Which is first?"))
    assert [metric(worker, ENCODED) - old for worker, old in zip(encoders, before, strict=True)] == [2, 2]


def test_nixl_brings_embeddings_where_the_setting_forces_it(split: Stack) -> None:
    """The tests run E/PD that way; the other topologies share files."""
    ask(split, user(image(103), "What is it?"))
    used, unused = ("nixl", "mapped") if split.topology == "e_pd" else ("mapped", "nixl")
    assert events(split, consumer(split), "trivet_tensor_plane", used) > 0
    assert events(split, consumer(split), "trivet_tensor_plane", unused) == 0


def test_200_requests_with_20_pictures_are_20_encodes(e_p_d: Stack) -> None:
    before, steps = e_p_d.counter("encode", ENCODED), e_p_d.counter("encode", STEPS)
    pids = {worker.pid for worker in e_p_d.all_workers()}
    # So large that the encoder takes longer than the processor: items wait for it, and go together.
    prompts = [user(image(200 + number % 20, (512, 512)), f"Question {number}?") for number in range(200)]
    assert len(all_at_once(e_p_d, prompts)) == 200
    assert e_p_d.counter("encode", ENCODED) - before == 20
    assert 1 <= e_p_d.counter("encode", STEPS) - steps < 20, "the engine takes items of several requests in one step"
    assert {worker.pid for worker in e_p_d.all_workers()} == pids


@pytest.mark.parametrize("topology", ["agg", "pd", "e_pd", "e_p_d"])
def test_50_requests_with_one_picture_are_one_encode(stacks: Mapping[str, Stack], topology: str) -> None:
    stack = stacks[topology]
    encoder = {"agg": "agg", "pd": "prefill"}.get(topology, "encode")
    before = stack.counter(encoder, ENCODED)
    all_at_once(stack, [user(image(300), f"Question {number}?") for number in range(50)])
    assert stack.counter(encoder, ENCODED) - before == 1


def test_a_picture_that_the_processor_refuses_fails_its_own_request(e_p_d: Stack) -> None:
    """Qwen's processor takes no picture 200 times as long as wide. Those batched with it are answered."""
    bad = {"model": "tiny", "messages": user(image(400), "and", image(401, (4, 1200)), "?"), "max_tokens": 2}
    with ThreadPoolExecutor(9) as pool:
        good = [pool.submit(ask, e_p_d, user(image(410 + number), "What is it?")) for number in range(8)]
        refused = pool.submit(e_p_d.post, bad)
        assert all(one.result(60) for one in good)
    answer = refused.result(60)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "messages[0].content[2].image_url"
    assert answer.json()["error"]["code"] == "invalid_media"
    assert ask(e_p_d, user(image(420), "Still there?"))


def test_the_item_record_is_readable(e_p_d: Stack) -> None:
    ask(e_p_d, user(image(430, (128, 96)), "What is it?"))
    with e_p_d.redis as redis:
        names = list(redis.scan_iter(f"{keys.PREFIX}item:*"))
        records = [json.loads(redis.get(name)) for name in names]
        held = [redis.hgetall(name.replace(b":item:", b":emb:", 1)) for name in names]
        assert all(redis.ttl(name) > 80_000 for name in names)
    record = next(one for one in records if one["modality"] == "image" and one["embeds"] == 12)
    assert record["dtype"] == "float32" and record["width"] == 384
    assert [times for _, times in record["replacement"]] == [12], "run-length coded"
    assert record["fields"]["image_grid_thw"]["data"] == [1, 6, 8]
    assert record["worker"].startswith("encode@")
    kinds = [{worker.partition(b"@")[0] for worker in one} for one in held]
    assert {b"encode", b"prefill"} in kinds, "both hold one"


def test_a_second_request_finds_the_embedding_without_its_medium(e_p_d: Stack) -> None:
    """From the prefill worker's own cache, which the first request filled."""
    first = greedy(e_p_d.client, user(image(440), "Describe it."), tokens=8)
    encoded = e_p_d.counter("encode", ENCODED)
    here = events(e_p_d, "prefill", "trivet_items", "here")
    assert greedy(e_p_d.client, user(image(440), "Describe it."), tokens=8).same_as(first)
    assert events(e_p_d, "prefill", "trivet_items", "here") == here + 1
    assert e_p_d.counter("encode", ENCODED) == encoded


@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params"])
def test_what_only_stages_may_say_is_refused(e_p_d: Stack, name: str) -> None:
    answer = e_p_d.post({"model": "tiny", "messages": user("hi"), "max_tokens": 1, name: {"do_remote_prefill": True}})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == name
