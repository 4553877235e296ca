"""A prompt as this worker's engine takes it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from app.errors.requests import MultimodalDisabled
from app.messages.prompts import Prompt, RenderedPrompt
from app.messages.tasks import StageTask

if TYPE_CHECKING:
    from workers.renderer import Renderer


async def nothing() -> None:
    """There was nothing to encode."""


@dataclass
class Ready:
    """`prompt` is what another engine has to know, `engine_input` what this one takes. Once the engine has answered,
    `encoded` tells the cluster of the items that it encoded for this prompt, `encoded_items` in number."""

    prompt: RenderedPrompt
    engine_input: Any
    encoded: Callable[[], Awaitable[None]] = nothing
    encoded_items: int = 0


class Prompts(Protocol):
    def ready(self, task: StageTask, prompt: Prompt) -> AbstractAsyncContextManager[Ready]:
        """The prompt for the engine; what it needs is held until the block ends."""


def ready_text(renderer: Renderer, prompt: Prompt) -> Ready:
    return Ready(RenderedPrompt(token_ids=prompt.token_ids, cache_salt=prompt.cache_salt), renderer.text(prompt))


@dataclass
class TextPrompts:
    """Of a worker that takes no media."""

    renderer: Renderer

    @asynccontextmanager
    async def ready(self, task: StageTask, prompt: Prompt) -> AsyncIterator[Ready]:
        if prompt.media:
            raise MultimodalDisabled("this worker takes no media; start it with --enable-multimodal", param="messages")
        yield ready_text(self.renderer, prompt)
