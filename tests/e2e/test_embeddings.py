"""POST /v1/embeddings with a real engine, asked by the real client: vectors as transformers makes them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import openai
import pytest

from app import ports, tiny_model
from app.roles import Does
from app.tiny_model.qwen3_embedding import DIMENSIONS
from tests.e2e.stack import MODEL, START_S, Stack, trivet

ROOT = Path(__file__).parents[2]
CONTEXT = 512
MOST = 300
ENGINE = (
    f"--dtype float32 --max-model-len {CONTEXT} --max-num-seqs 64 --max-num-batched-tokens 1024 --enforce-eager "
    "--block-size 32 --kv-cache-memory-bytes 67108864 --seed 0"
)
TEXTS = [
    "the",
    "What is in the garden behind the house?",
    "A red circle, a blue square, a green triangle and a white cross on black.",
    "The quick brown fox jumps over the lazy dog. " * 10,
    "日本語 and 👩‍🚀",
]
#: In float32, of an engine that computes several prompts at once.
NEAR = 1e-4


@pytest.fixture(scope="module")
def embedding_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("embedding") / "tiny", "qwen3_embedding")


@pytest.fixture(scope="module")
def stack(home: Path, embedding_model: Path) -> Iterator[Stack]:
    name, api, redis = "e2e-embeddings", ports.reserve(), ports.reserve()
    url = f"redis://127.0.0.1:{redis}/0"
    flags = ["--model", str(embedding_model), "--served-model-name", MODEL, "--api-port", str(api), "--redis-url", url]
    flags += ["--no-flower", "--timeout", str(START_S), *ENGINE.split()]
    with mock.patch.dict(os.environ, {"TRIVET_API__MAX_EMBEDDING_INPUTS": str(MOST)}):
        started = trivet("up", "--detach", "--name", name, *flags, timeout=START_S + 60)
    try:
        assert started.returncode == 0, started.stdout[-3000:] + started.stderr[-3000:]
        yield Stack(name, "agg", f"http://127.0.0.1:{api}", "", url)
    finally:
        stopped = trivet("down", "--name", name, timeout=120)
        assert stopped.returncode == 0, stopped.stdout + stopped.stderr


class Reference:
    """The model in transformers, one prompt at a time."""

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import AutoModel, AutoTokenizer

        self._torch = torch
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self._model = AutoModel.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()

    def vector(self, tokens: list[int], dimensions: int | None = None) -> Any:
        with self._torch.inference_mode():
            hidden = self._model(input_ids=self._torch.tensor([tokens])).last_hidden_state
        last = hidden[0, -1][:dimensions].numpy()
        return last / np.linalg.norm(last)


@pytest.fixture(scope="module")
def reference(embedding_model: Path) -> Reference:
    from app import torchvision_ops

    torchvision_ops.define()
    return Reference(embedding_model)


def vectors(answer: Any) -> list[Any]:
    assert [one.index for one in answer.data] == list(range(len(answer.data)))
    return [np.asarray(one.embedding) for one in answer.data]


def test_they_are_those_of_transformers(stack: Stack, reference: Reference) -> None:
    answer = stack.client.embeddings.create(model=MODEL, input=TEXTS)
    tokens = [reference.tokenizer.encode(one) for one in TEXTS]
    for found, one in zip(vectors(answer), tokens, strict=True):
        np.testing.assert_allclose(found, reference.vector(one), atol=NEAR)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, tokens))


def test_other_texts_have_other_vectors(stack: Stack) -> None:
    found = vectors(stack.client.embeddings.create(model=MODEL, input=TEXTS))
    assert min(np.abs(a - b).max() for at, a in enumerate(found) for b in found[:at]) > 100 * NEAR


def test_numbers_and_base64_are_the_same(stack: Stack) -> None:
    coded = stack.client.embeddings.create(model=MODEL, input=TEXTS)  # the client asks for base64
    plain = stack.client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    for one, other in zip(vectors(coded), vectors(plain), strict=True):
        assert len(one) == len(other) == DIMENSIONS[-1]
        np.testing.assert_allclose(one, other, atol=NEAR)


def test_token_ids_are_as_good_as_text(stack: Stack, reference: Reference) -> None:
    tokens = [reference.tokenizer.encode(one) for one in TEXTS]
    answer = stack.client.embeddings.create(model=MODEL, input=tokens)
    for found, one in zip(vectors(answer), tokens, strict=True):
        np.testing.assert_allclose(found, reference.vector(one), atol=NEAR)
    (alone,) = vectors(stack.client.embeddings.create(model=MODEL, input=tokens[1]))
    np.testing.assert_allclose(alone, reference.vector(tokens[1]), atol=NEAR)


@pytest.mark.parametrize("dimensions", [32, 128])
def test_fewer_dimensions_are_normalized_anew(stack: Stack, reference: Reference, dimensions: int) -> None:
    answer = stack.client.embeddings.create(model=MODEL, input=TEXTS[1], dimensions=dimensions)
    (found,) = vectors(answer)
    assert len(found) == dimensions
    np.testing.assert_allclose(found, reference.vector(reference.tokenizer.encode(TEXTS[1]), dimensions), atol=NEAR)


def test_an_input_may_fill_the_context(stack: Stack, reference: Reference) -> None:
    tokens = [71 + n % 500 for n in range(CONTEXT)]
    answer = stack.client.embeddings.create(model=MODEL, input=[tokens])
    np.testing.assert_allclose(vectors(answer)[0], reference.vector(tokens), atol=NEAR)
    assert answer.usage.prompt_tokens == CONTEXT


def test_as_many_inputs_as_are_allowed_come_in_their_order(stack: Stack, reference: Reference) -> None:
    inputs = [[80 + n, 90 + n % 7] for n in range(MOST)]
    answer = stack.client.embeddings.create(model=MODEL, input=inputs)
    found = vectors(answer)
    assert (len(found), answer.usage.prompt_tokens) == (MOST, 2 * MOST)
    for at in (0, 1, 127, 128, MOST - 1):
        np.testing.assert_allclose(found[at], reference.vector(inputs[at]), atol=NEAR)


def test_requests_side_by_side_get_their_own(stack: Stack, reference: Reference) -> None:
    tokens = [[100 + n, 3 * n + 80, 200] for n in range(40)]

    def ask(one: list[int]) -> Any:
        return vectors(stack.client.embeddings.create(model=MODEL, input=one))[0]

    with ThreadPoolExecutor(16) as threads:
        for one, found in zip(tokens, threads.map(ask, tokens), strict=True):
            np.testing.assert_allclose(found, reference.vector(one), atol=NEAR)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"input": ["x"] * (MOST + 1)}, "invalid_request"),
        ({"input": [[80] * (CONTEXT + 1)]}, "context_length_exceeded"),
        ({"input": "word " * CONTEXT * 2}, "context_length_exceeded"),
        ({"input": ["fine", ""]}, "invalid_request"),
        ({"input": [[2**30]]}, "invalid_request"),
        ({"input": "x", "dimensions": 33}, "invalid_request"),
        ({"input": "x", "dimensions": 256}, "invalid_request"),
    ],
)
def test_what_is_refused_and_the_engine_lives(stack: Stack, body: dict[str, Any], code: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        stack.client.embeddings.create(model=MODEL, **body)
    assert refused.value.code == code
    assert stack.client.embeddings.create(model=MODEL, input="x").usage.prompt_tokens == 1


def test_it_writes_no_text(stack: Stack) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        stack.client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
    assert refused.value.code == "wrong_endpoint" and "/v1/embeddings" in refused.value.message
    with pytest.raises(openai.NotFoundError) as refused:
        stack.client.embeddings.create(model="other", input="x")
    assert refused.value.code == "model_not_found"


def test_its_worker_says_what_it_does(stack: Stack) -> None:
    record = stack.workers()["agg"]
    assert (record.does, sorted(record.roles)) == (Does.EMBED, ["decode", "prefill"])
    assert not stack.redis.exists(f"trivet:kv:{record.id}:0"), "nobody asks where its blocks are"
    answer = stack.client.embeddings.with_raw_response.create(
        model=MODEL, input="x", extra_headers={"X-Trivet-Timings": "1"}
    )
    told = json.loads(answer.headers["X-Trivet-Timings"])
    assert told["prefill_ms"] > 0 and told["workers"]["prefill"] == [record.id]


def test_half_a_worker_does_not_start(stack: Stack, embedding_model: Path) -> None:
    command = ["celery", "-A", "app.celery", "worker", "-n", "prefill@test", "--roles", "prefill"]
    ended = subprocess.run(
        [sys.executable, "-m", *command, "--model", str(embedding_model), "--engine-args", ENGINE],
        cwd=ROOT,
        env=os.environ | {"TRIVET_REDIS__BROKER_URL": stack.redis_url},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 70, ended.stderr[-3000:]
    assert "as topology agg does" in ended.stderr
