"""vLLM's model runner V2, which engines have on GPUs, on a CPU: Triton's interpreter runs its kernels.

Attention and adapters have other kernels there, and the interpreter cannot run that of grammars, but what it does with
requests is the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
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


def environment() -> dict[str, str]:
    """What makes engines take it."""
    found = client_venvs.made(HERE / "requirements.lock").glob("lib/python*/site-packages")
    return {
        "PYTHONPATH": os.pathsep.join([*map(str, found), str(HERE)]),
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }


@pytest.fixture(scope="module")
def stack(home: Path, model: Path) -> Iterator[Stack]:
    with ExitStack() as end:
        with pytest.MonkeyPatch.context() as patch:  # for these engines alone: others may be started next
            for name, value in environment().items():
                patch.setenv(name, value)
            running = end.enter_context(up(NAME, "pd", model, *LORA))
        for kind in ("prefill", "decode"):
            assert uses_it(home / NAME / "logs" / f"{kind}@{NAME}-cpu0.log")
        yield running


def uses_it(log: Path) -> bool:
    return "Using V2 Model Runner" in log.read_text()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_tokens_are_those_of_the_runner_on_cpus(
    stack: Stack, stacks: Mapping[str, Stack], home: Path, prompt: str
) -> None:
    found, expected = (ask(one, MODEL, prompt) for one in (stack, stacks["agg"]))
    assert not uses_it(home / "e2e-agg" / "logs" / "agg@e2e-agg-cpu0.log")
    assert found.same_as(expected), (found, expected)


def test_answers_are_the_merged_models(stack: Stack, merged: Expected) -> None:
    for name in adapters.SEEDS:
        load(stack, name)
    asked = [(name, prompt) for name in merged for prompt in ASKED] * 2
    with ThreadPoolExecutor(len(asked)) as pool:
        found = list(pool.map(lambda one: ask(stack, *one), asked))
    for (name, prompt), answer in zip(asked, found, strict=True):
        assert answer.same_as(merged[name][prompt]), (name, prompt, answer, merged[name][prompt])
