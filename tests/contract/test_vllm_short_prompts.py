"""api.vllm_short_prompts: what is rendered in the event loop and what in vLLM's thread is the same."""

from __future__ import annotations

from typing import Any

import pytest

from api import context
from api.context import RequestContext

USER = {"role": "user", "content": "what is a red circle?"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "what is"}, {"type": "text", "text": "a red circle?"}]}
SYSTEM = {"role": "system", "content": "be brief"}
LONG = {"role": "user", "content": "what is a red circle? " * 60}
MANY = [USER, {"role": "assistant", "content": "it is round"}] * 60
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


def handed_on(serving: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What vLLM's thread gets to do."""
    found: list[Any] = []
    executor = serving.client.renderer._executor
    submit = executor.submit

    def noted(work: Any, /, *arguments: Any, **named: Any) -> Any:
        found.append(work)
        return submit(work, *arguments, **named)

    monkeypatch.setattr(executor, "submit", noted)
    return found


@pytest.fixture
def handed(serving: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    return handed_on(serving, monkeypatch)


async def rendered(serving: Any, messages: list[Any], **body: Any) -> list[int]:
    context.enter(RequestContext("test", 2e9))
    request = serving.chat_request({"model": "tiny", "messages": messages, **body}, "test")
    tokens: list[int] = (await serving.chat_prompt(request)).token_ids
    return tokens


@pytest.mark.parametrize(
    ("messages", "times"), [([USER], 0), ([PARTS], 0), ([SYSTEM, USER], 0), ([LONG], 2), ([*MANY, USER], 2)]
)
async def test_only_long_prompts_go_to_vllms_thread(
    serving: Any, handed: list[Any], messages: list[Any], times: int
) -> None:
    tokens = await rendered(serving, messages)
    assert len(handed) == times
    tokenizer = serving.client.renderer.tokenizer
    plain = [one if isinstance(one["content"], str) else {**one, "content": _joined(one)} for one in messages]
    text = tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    assert tokens == tokenizer.encode(text, add_special_tokens=False)


def _joined(message: dict[str, Any]) -> str:
    return "".join(part["text"] for part in message["content"])


@pytest.mark.parametrize("more", [{"chat_template_kwargs": {"about": {"a": 1}}}, {"chat_template_kwargs": {"a": [1]}}])
async def test_what_a_template_may_go_through_by_itself_goes_there_too(
    serving: Any, handed: list[Any], more: dict[str, Any]
) -> None:
    assert await rendered(serving, [USER], **more) == await rendered(serving, [USER])
    assert len(handed) == 1, "the text is short all the same"


async def test_tools_go_there(parsing_serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = handed_on(parsing_serving, monkeypatch)
    await rendered(parsing_serving, [USER], tools=TOOLS)
    assert found


@pytest.mark.usefixtures("vllm")
async def test_what_a_template_refuses_is_refused() -> None:
    from vllm.exceptions import VLLMValidationError

    from api import vllm_short_prompts

    def fail(*_: Any, **__: Any) -> Any:
        raise VLLMValidationError("the template refuses it")

    render = vllm_short_prompts._here_if(vllm_short_prompts._Turn(), lambda *_, **__: 1, fail, fail)
    with pytest.raises(VLLMValidationError):
        await render(None, None, [USER])


async def texts(serving: Any, prompts: list[str]) -> list[list[int]]:
    params = serving.client.renderer.default_cmpl_tok_params
    found = await serving.client.renderer.tokenize_prompts_async([{"prompt": one} for one in prompts], params)
    return [one["prompt_token_ids"] for one in found]


@pytest.mark.parametrize("text", ["a circle", "what is a red circle? " * 40])
async def test_of_many_prompts_that_come_together_most_go_to_vllms_thread(
    serving: Any, handed: list[Any], text: str
) -> None:
    tokenizer = serving.client.renderer.tokenizer
    prompts = [f"{text} {number}" for number in range(100)]
    assert await texts(serving, prompts) == [tokenizer.encode(one) for one in prompts]
    assert 60 < len(handed) < 100
    handed.clear()
    await texts(serving, prompts[:2])
    assert not handed, "the next turn has as much for them"
