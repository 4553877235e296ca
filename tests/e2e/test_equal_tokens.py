"""Prefill and decode apart give the tokens of the aggregated engine, and the KV cache really moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest

from tests.e2e.prompts import PROMPTS, Greedy, greedy, image, user
from tests.e2e.stack import Stack

#: KV bytes of a token of the tiny model: 3 layers, K and V, 2 heads of 32 float32 values.
KV_BYTES_PER_TOKEN = 3 * 2 * 2 * 32 * 4
BLOCK = 32


SPLIT = ["pd", "e_pd", "e_p_d"]


@pytest.fixture(scope="session")
def aggregated(stacks: Mapping[str, Stack]) -> Callable[[str], Greedy]:
    """The aggregated engine's answer to one of PROMPTS, asked for once."""
    return cache(lambda name: greedy(stacks["agg"].client, PROMPTS[name]))


@pytest.mark.parametrize("topology", SPLIT)
@pytest.mark.parametrize("name", PROMPTS)
def test_every_topology_equals_agg(
    stacks: Mapping[str, Stack], aggregated: Callable[[str], Greedy], topology: str, name: str
) -> None:
    there, here = greedy(stacks[topology].client, PROMPTS[name]), aggregated(name)
    assert there.prompt_tokens == here.prompt_tokens
    assert there.same_as(here), (there, here)


@pytest.mark.parametrize("topology", SPLIT)
def test_each_request_gets_its_own_pictures(stacks: Mapping[str, Stack], topology: str) -> None:
    """Two at once with each other's pictures, new to everybody."""
    prompts = [user(image(a), "and", image(b), "Which is first?") for a, b in ((31, 32), (32, 31))]
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda messages: greedy(stacks[topology].client, messages), prompts))
    expected = [greedy(stacks["agg"].client, messages) for messages in prompts]
    assert expected[0].tokens != expected[1].tokens
    for there, here in zip(answers, expected, strict=True):
        assert there.same_as(here), (there, here)


@pytest.mark.parametrize("topology", SPLIT)
@pytest.mark.parametrize("name", ["text", "image", "video"])
def test_sampling_with_a_seed_equals_agg(stacks: Mapping[str, Stack], topology: str, name: str) -> None:
    def sampled(stack: Stack) -> list[int]:
        answer = stack.client.chat.completions.create(
            model="tiny",
            messages=PROMPTS[name],
            max_tokens=16,
            temperature=0.8,
            seed=7,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        return list(answer.choices[0].token_ids)

    assert sampled(stacks[topology]) == sampled(stacks["agg"])


@pytest.mark.parametrize(
    "messages",
    [user("Where does the train go tonight? " * 12), user(image(21), "Count them. " * 12)],
    ids=["text", "image"],
)
def test_kv_blocks_move(pd: Stack, messages: list[dict[str, Any]]) -> None:
    """From the engines' own counters: a decode engine that had prefilled again would give the same tokens."""
    moved = pd.counter("decode", "vllm:nixl_bytes_transferred_sum")
    pulled = pd.counter("decode", "vllm:external_prefix_cache_hits_total")
    computed = pd.counter("decode", "vllm:prompt_tokens_by_source_total", 'source="local_compute"')
    answer = greedy(pd.client, messages, tokens=4)
    blocks = -(-answer.prompt_tokens // BLOCK)
    assert pd.counter("decode", "vllm:external_prefix_cache_hits_total") - pulled >= answer.prompt_tokens - 1
    assert pd.counter("decode", "vllm:nixl_bytes_transferred_sum") - moved >= (blocks - 1) * BLOCK * KV_BYTES_PER_TOKEN
    # All that the decode engine computes of a prompt is its last token, to sample from.
    assert pd.counter("decode", "vllm:prompt_tokens_by_source_total", 'source="local_compute"') - computed <= 1


def test_decode_never_encodes(pd: Stack) -> None:
    """The decode worker has no encode role, and no picture reaches its vision tower."""
    assert "encode" not in pd.workers()["decode"].roles
    greedy(pd.client, user(image(22), "What is it?"), tokens=4)
    assert pd.counter("decode", "vllm:mm_cache_queries_total") == 0


def test_64_at_once(stack: Stack) -> None:
    """64 streams together, each with the tokens that it gets alone."""
    prompts = [
        user(image(index % 8), f"Question number {index}?")
        if index % 4 == 0
        else user(f"Tell me about number {index}.")
        for index in range(64)
    ]
    alone = [greedy(stack.client, messages, tokens=16) for messages in prompts]
    with ThreadPoolExecutor(64) as pool:
        together = list(pool.map(lambda messages: _streamed(stack, messages), prompts))
    assert len(together) == 64
    for tokens, expected in zip(together, alone, strict=True):
        difference = next(
            (at for at, pair in enumerate(zip(tokens, expected.tokens, strict=True)) if len(set(pair)) > 1), None
        )
        if difference is not None:
            best, second = expected.best[difference]
            assert best - second < 2e-3, f"differs at {difference}, and no tie: {best} against {second}"


def test_64_plain_streams_at_once(stack: Stack) -> None:
    """The same through the fast lane, which writes text and no token ids: as many tokens, and each its own text."""
    prompts = [user(f"Tell me about number {index}.") for index in range(64)]
    alone = [greedy(stack.client, messages, tokens=16) for messages in prompts]
    with ThreadPoolExecutor(64) as pool:
        together = list(pool.map(lambda messages: _plain(stack, messages), prompts))
    assert [tokens for _, tokens in together] == [16] * 64
    for (text, _), expected in zip(together, alone, strict=True):
        assert text == expected.text or min(best - second for best, second in expected.best) < 2e-3


def _plain(stack: Stack, messages: list[dict[str, Any]]) -> tuple[str, int]:
    """The text of a stream, and how many tokens its usage counts."""
    chunks = stack.client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_tokens=16,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    text, tokens = "", 0
    for chunk in chunks:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        tokens = chunk.usage.completion_tokens if chunk.usage else tokens
    return text, tokens


def _streamed(stack: Stack, messages: list[dict[str, Any]]) -> list[int]:
    chunks = stack.client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_tokens=16,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    return [token for chunk in chunks for choice in chunk.choices for token in getattr(choice, "token_ids", None) or []]
