"""workers.renderer: what vLLM's renderer refuses, as errors that say whose fault it is."""

from types import SimpleNamespace
from typing import Any

import pytest

from app.errors.media import MediaRefused
from app.errors.requests import PromptTooLong
from app.errors.serving import EncodeFailed
from app.messages.prompts import Prompt
from tests.messages import media_ref

CONTEXT = 10


@pytest.fixture
def renderer(vllm: Any) -> Any:
    from workers.renderer import Renderer

    model = SimpleNamespace(max_model_len=CONTEXT, revision=None, multimodal_config=None)
    return Renderer(SimpleNamespace(mm_processor=None), SimpleNamespace(model_config=model))


def with_a_medium(**more: Any) -> tuple[Prompt, dict[str, Any]]:
    medium = media_ref()
    return Prompt(token_ids=[1], media=[medium], **more), {medium.identity: None}


@pytest.fixture
def answer(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What becomes of an item, or of a prompt: an error, or so many tokens."""
    from workers import item_rendering

    def set_to(outcome: Any) -> None:
        async def render(*_: Any) -> Any:
            if isinstance(outcome, Exception):
                raise outcome
            return SimpleNamespace(engine_input={"prompt_token_ids": [0] * outcome})

        async def whole(*_: Any) -> Any:
            return (await render()).engine_input

        monkeypatch.setattr(item_rendering, "render_item", render)
        monkeypatch.setattr(item_rendering, "render", whole)

    return set_to


async def test_an_item_that_the_processor_refuses_is_named(renderer: Any, answer: Any) -> None:
    answer(ValueError("too long and too thin"))
    with pytest.raises(MediaRefused, match="too long and too thin") as caught:
        await renderer.item(media_ref(param="here"), None)
    assert caught.value.param == "here"
    prompt, media = with_a_medium()
    with pytest.raises(MediaRefused) as caught:
        await renderer.whole(prompt, media)
    assert caught.value.param == prompt.media[0].param != "messages"
    several = prompt.model_copy(update={"media": [*prompt.media, media_ref(identity="b" * 32)]})
    with pytest.raises(MediaRefused) as caught:
        await renderer.whole(several, media | {"b" * 32: None})
    assert caught.value.param == "messages", "nobody knows which"


async def test_an_item_that_fills_the_context_is_named(renderer: Any, answer: Any) -> None:
    answer(CONTEXT)
    with pytest.raises(PromptTooLong) as caught:
        await renderer.item(media_ref(param="here"), None)
    assert caught.value.param == "here"
    with pytest.raises(PromptTooLong) as caught:
        await renderer.whole(*with_a_medium())
    assert caught.value.param == "messages"
    answer(CONTEXT - 1)
    assert await renderer.item(media_ref(), None)


async def test_an_item_without_a_rendering_of_its_own_is_no_fault_of_the_clients(renderer: Any, answer: Any) -> None:
    from workers.item_rendering import NotSpliceable
    from workers.renderer import NotAlone

    answer(NotSpliceable("it moves"))
    with pytest.raises(NotAlone, match="it moves") as caught:
        await renderer.item(media_ref(), None)
    assert isinstance(caught.value, EncodeFailed) and caught.value.status == 503


def test_text(renderer: Any) -> None:
    assert renderer.text(Prompt(token_ids=[1, 2], cache_salt="s"))["cache_salt"] == "s"
    with pytest.raises(PromptTooLong):
        renderer.text(Prompt(token_ids=[1] * CONTEXT))
    assert renderer.text(Prompt(token_ids=[1] * CONTEXT), answer=0), "a vector takes no place"
    with pytest.raises(PromptTooLong, match=f"{CONTEXT + 1} tokens") as caught:
        renderer.text(Prompt(token_ids=[1] * (CONTEXT + 1)), answer=0, param="input")
    assert caught.value.param == "input"
    assert (renderer.processor_settings, renderer.revision, renderer.modalities()) == ({}, None, [])


async def test_the_salt_of_a_prompt_that_is_rendered_whole(renderer: Any, answer: Any) -> None:
    answer(3)
    whole = await renderer.whole(*with_a_medium(cache_salt="s"))
    assert whole == {"prompt_token_ids": [0] * 3, "cache_salt": "s"}
