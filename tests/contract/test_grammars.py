"""api.grammars with the real process and vLLM's own compilers: what passes, what is refused, what is stopped."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from api import metrics
from api.grammars import Grammars
from app.errors.requests import InvalidRequest
from app.errors.serving import GrammarsUnavailable
from tests.contract.conftest import settings
from tests.polling import until

#: Minutes of compiling, even for the tiny vocabulary.
PATHOLOGICAL = {"json": {"enum": ["x" * 50 + str(number) for number in range(8000)]}}


def spec(**given: Any) -> dict[str, Any]:
    """As a request's job has it."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    params = SamplingParams(structured_outputs=StructuredOutputsParams(**given))
    made: dict[str, Any] = msgspec.to_builtins(params)["structured_outputs"]
    return made


def counted(outcome: str) -> float:
    return metrics.REGISTRY.get_sample_value("trivet_grammars_total", {"outcome": outcome}) or 0.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def grammars(tiny: Path) -> AsyncIterator[Grammars]:
    made = Grammars(settings(tiny, grammar_timeout_s=2.0))
    yield made
    await made.close()


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize(
    ("given", "backend"),
    [
        ({"json": {"type": "object", "properties": {"a": {"type": "integer"}}}}, "xgrammar"),
        ({"json": '{"type": "string"}'}, "xgrammar"),
        ({"regex": "a{1,5}b"}, "xgrammar"),
        ({"grammar": 'root ::= "a" | "b"'}, "xgrammar"),
        ({"json_object": True}, "xgrammar"),
        ({"choice": ["red", "blue"]}, "xgrammar"),
        ({"json": {"type": "integer", "multipleOf": 5}}, "guidance"),
        ({"regex": "(a|a)*{1000}{1000}"}, "guidance"),
    ],
)
async def test_what_compiles_is_as_vllm_would_leave_it(grammars: Grammars, given: Any, backend: str) -> None:
    from vllm import SamplingParams
    from vllm.tokenizers import cached_tokenizer_from_config

    from api import vllm_grammars
    from api.vllm_serving import config_of

    known = await grammars.known(spec(**given))
    made = vllm_grammars.chosen(spec(**given), known)
    assert made["_backend"] == backend
    params: Any = msgspec.convert({"structured_outputs": spec(**given)}, SamplingParams)
    config = config_of(grammars._settings)
    tokenizer = cached_tokenizer_from_config(config.model_config)
    params._validate_structured_outputs(config.model_config, config.structured_outputs_config, tokenizer)
    assert made == msgspec.to_builtins(params)["structured_outputs"]


@pytest.mark.parametrize(
    "given",
    [
        {"regex": "(("},
        {"regex": "(" * 5000 + "a" + ")" * 5000},
        {"grammar": "root ::= ("},
        {"grammar": "root ::= " + "(" * 20000 + '"a"' + ")" * 20000},
        {"json": {"type": "nothing"}},
    ],
    ids=lambda given: json.dumps(given)[:30],
)
async def test_what_is_no_grammar_is_refused(grammars: Grammars, given: Any) -> None:
    before = counted("refused")
    with pytest.raises(InvalidRequest, match="cannot be compiled"):
        await grammars.known(spec(**given))
    assert counted("refused") == before + 1


async def test_what_takes_too_long_is_stopped_and_nobody_waits_for_it(grammars: Grammars) -> None:
    await grammars.known(spec(regex="warm"))
    slow = asyncio.create_task(grammars.known(spec(**PATHOLOGICAL)))
    for number in range(5):
        await grammars.known(spec(regex=f"quick{number}"))
    assert not slow.done(), "the others came first"
    with pytest.raises(InvalidRequest, match=r"api\.grammar_timeout_s \(2 s\).*simpler"):
        await slow
    assert counted("too_slow") == 1


async def test_the_same_one_is_tried_once(grammars: Grammars) -> None:
    compiled, known = counted("compiled"), counted("known")
    wanted = spec(regex="once")
    await asyncio.gather(*(grammars.known(wanted) for _ in range(5)))
    assert (counted("compiled"), counted("known")) == (compiled + 1, known + 4)


async def test_one_that_is_too_large_is_not_even_tried(grammars: Grammars) -> None:
    with pytest.raises(InvalidRequest, match="larger than 512 KB"):
        await grammars.known(spec(choice=["x" * 600_000]))


async def test_who_leaves_leaves_the_others_their_answer(grammars: Grammars) -> None:
    wanted = spec(regex="left")
    leaving, staying = (asyncio.create_task(grammars.known(wanted)) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    assert (await staying)["_backend"] == "xgrammar"


async def test_a_process_that_died_is_started_anew(grammars: Grammars) -> None:
    await grammars.known(spec(regex="before"))
    assert grammars._started is not None
    slow = asyncio.create_task(grammars.known(spec(**PATHOLOGICAL)))
    await until(lambda: grammars._waiting, "the trial")
    os.kill(grammars._started.result().pid, signal.SIGKILL)
    with pytest.raises(GrammarsUnavailable):
        await slow
    assert (await grammars.known(spec(regex="after")))["_backend"] == "xgrammar"


async def test_a_worker_does_not_validate_it_again(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.structured_output import backend_xgrammar

    from api import vllm_grammars
    from api.vllm_serving import config_of
    from workers import vllm_sampling

    def again(_: Any) -> None:
        raise AssertionError("validated again")

    monkeypatch.setattr(backend_xgrammar, "validate_xgrammar_grammar", again)
    config = config_of(grammars._settings)
    checked = vllm_grammars.chosen(spec(regex="a+"), await grammars.known(spec(regex="a+")))
    params = vllm_sampling.params({"structured_outputs": checked}).clone()
    params.verify(config.model_config, None, config.structured_outputs_config, object())
    with pytest.raises(AssertionError):
        vllm_sampling.params({"structured_outputs": spec(regex="a+")}).verify(
            config.model_config, None, config.structured_outputs_config, object()
        )
