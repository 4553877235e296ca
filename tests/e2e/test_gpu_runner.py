"""vLLM's model runner V2, which engines have on GPUs, on a CPU: Triton's interpreter runs its kernels.

Its attention, its samplers' kernels and those of adapters are not those of GPUs, but what it does with requests is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e import adapters, client_venvs
from tests.e2e.adapters import ASKED, Expected, ask, load
from tests.e2e.prompts import PROMPTS
from tests.e2e.stack import LORA, MODEL, Stack, up

#: What it is compared with.
pytestmark = pytest.mark.topology("agg")
HERE = Path(__file__).parents[1] / "gpu_runner"
NAME = "e2e-gpu-runner"


@pytest.fixture(scope="module")
def environment() -> Iterator[None]:
    """What makes engines take it."""
    found = client_venvs.made(HERE / "requirements.lock").glob("lib/python*/site-packages")
    more = {
        "PYTHONPATH": os.pathsep.join([*map(str, found), str(HERE)]),
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in more.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def stack(home: Path, environment: None, model: Path) -> Iterator[Stack]:
    with up(NAME, "pd", model, *LORA) as running:
        for kind in ("prefill", "decode"):
            log = home / NAME / "logs" / f"{kind}@{NAME}-cpu0.log"
            assert "Using V2 Model Runner" in log.read_text()
        yield running


@pytest.mark.parametrize("prompt", PROMPTS)
def test_tokens_are_those_of_the_runner_on_cpus(stack: Stack, stacks: Mapping[str, Stack], prompt: str) -> None:
    found, expected = (ask(one, MODEL, prompt) for one in (stack, stacks["agg"]))
    assert found.same_as(expected), (found, expected)


def test_answers_are_the_merged_models(stack: Stack, merged: Expected) -> None:
    for name in adapters.SEEDS:
        load(stack, name)
    asked = [(name, prompt) for name in merged for prompt in ASKED] * 2
    with ThreadPoolExecutor(len(asked)) as pool:
        found = list(pool.map(lambda one: ask(stack, *one), asked))
    for (name, prompt), answer in zip(asked, found, strict=True):
        assert answer.same_as(merged[name][prompt]), (name, prompt, answer, merged[name][prompt])
