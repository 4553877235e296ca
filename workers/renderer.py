"""Adapter to vLLM: its renderer, which turns prompts and media into what its engine takes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from vllm.inputs import tokens_input

from app.errors.media import MediaRefused
from app.errors.requests import PromptTooLong
from app.errors.serving import EncodeFailed
from app.messages.media import MediaRef, Modality
from app.messages.prompts import Prompt
from workers import audio_resampling, item_rendering, media_loading
from workers.item_rendering import NotSpliceable, RenderedAlone
from workers.vllm_errors import clean


class NotAlone(EncodeFailed):
    """The item has no rendering of its own: prompts with it are to be rendered whole."""


class Renderer:
    """`renderer` and `config` are the engine's own."""

    def __init__(self, renderer: Any, config: Any) -> None:
        self._renderer = renderer
        self._model = config.model_config
        audio_resampling.settle(renderer)

    @cached_property
    def media_io_kwargs(self) -> dict[str, dict[str, Any]]:
        """vLLM's `--media-io-kwargs`, by modality: how media are decoded."""
        return media_loading.io_kwargs(self._model)

    @property
    def processor_settings(self) -> dict[str, object]:
        """vLLM's `--mm-processor-kwargs`."""
        return dict(self._multimodal("mm_processor_kwargs"))

    @property
    def revision(self) -> str | None:
        return None if self._model.revision is None else str(self._model.revision)

    def _multimodal(self, name: str) -> Any:
        return getattr(self._model.multimodal_config, name, None) or {}

    def modalities(self) -> list[Modality]:
        """Media that the model takes, of those that this program knows."""
        return list(item_rendering.limits(self._renderer))

    async def spliceable(self) -> bool:
        """Whether prompts of this model can be put together from items that were rendered alone."""
        return await item_rendering.probe(self._renderer)

    async def item(self, ref: MediaRef, data: Any) -> RenderedAlone:
        """One item alone, as the processor makes it.

        Raises MediaRefused, which names the item, PromptTooLong, and NotAlone.
        """
        try:
            alone = await item_rendering.render_item(
                self._renderer, ref.modality, data, ref.identity, ref.processor_kwargs
            )
        except NotSpliceable as error:
            raise NotAlone(f"the {ref.modality} has no rendering of its own: {error}") from error
        except ValueError as error:
            raise MediaRefused(f"the model's processor refused the medium: {clean(error)}", param=ref.param) from error
        self.check_length(len(alone.engine_input["prompt_token_ids"]), ref.param)
        return alone

    async def sample(self, modality: Modality, identity: str) -> RenderedAlone:
        """A small made-up item, to try the engine with."""
        return await item_rendering.render_item(self._renderer, modality, item_rendering.sample(modality), identity)

    async def whole(self, prompt: Prompt, media: Mapping[str, Any]) -> Any:
        """The engine's input for the whole prompt, by vLLM itself. `media` are decoded, by identity."""
        items = [(ref.modality, media[ref.identity], ref.identity) for ref in prompt.media]
        try:
            # They are the request's, and so those of all its media.
            kwargs = prompt.media[0].processor_kwargs
            whole = await item_rendering.render(self._renderer, prompt.token_ids, items, kwargs)
        except ValueError as error:
            # With several media the processor does not tell which of them it was.
            named = {ref.identity for ref in prompt.media}
            param = prompt.media[0].param if len(named) == 1 else "messages"
            raise MediaRefused(f"the model's processor refused the media: {clean(error)}", param=param) from error
        if prompt.cache_salt is not None:
            whole["cache_salt"] = prompt.cache_salt
        self.check_length(len(whole["prompt_token_ids"]))
        return whole

    def text(self, prompt: Prompt, *, answer: int = 1, param: str = "messages") -> Any:
        """The engine's input for a prompt without media, whose answer has at least so many tokens."""
        self.check_length(len(prompt.token_ids), param, answer)
        return tokens_input(prompt.token_ids, cache_salt=prompt.cache_salt)

    def check_length(self, tokens: int, param: str = "messages", answer: int = 1) -> None:
        """Raise PromptTooLong if so many tokens leave no room for an answer."""
        limit = int(self._model.max_model_len)
        if tokens + answer > limit:
            raise PromptTooLong(f"{tokens} tokens; the model's context is {limit}", param=param)
