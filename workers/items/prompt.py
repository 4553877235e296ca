"""A prompt with media as this worker's engine takes it, put together from item records."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from app.items import ItemRecord, splice
from app.messages import MediaRef, Prompt, StageTask
from workers import rendered
from workers.items.encoder import ItemEncoder, OwnItem
from workers.items.finder import ItemFinder
from workers.items.local import LocalItems
from workers.items.ready import Ready, ready_text
from workers.items.turns import Turns
from workers.renderer import NotAlone, Renderer

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class PromptItems:
    """Gets prompts ready: their items here and held, as long as the engine may need them.

    `spliceable` says that the model's prompts can be put together from records; else vLLM renders them whole, and it
    does so with a prompt that has an item which cannot be rendered alone.
    """

    renderer: Renderer
    encoder: ItemEncoder
    finder: ItemFinder
    local: LocalItems
    spliceable: bool = False
    rendered_whole: int = 0

    @asynccontextmanager
    async def ready(self, task: StageTask, prompt: Prompt) -> AsyncIterator[Ready]:
        if not prompt.media:
            yield ready_text(self.renderer, prompt)
            return
        async with AsyncExitStack() as held:
            yield await self._with_media(task, prompt, held)

    async def _with_media(self, task: StageTask, prompt: Prompt, held: AsyncExitStack) -> Ready:
        if self.spliceable:
            try:
                return await held.enter_async_context(self._spliced(task, prompt))
            except NotAlone as error:
                log.warning("a prompt of request %s is rendered whole: %s", task.request_id, error)
        return await self._whole(prompt)

    async def _whole(self, prompt: Prompt) -> Ready:
        self.rendered_whole += 1
        refs = {ref.identity: ref for ref in prompt.media}
        loaded = await _all(self.encoder.load(ref) for ref in refs.values())
        engine_input = await self.renderer.whole(prompt, dict(zip(refs, loaded, strict=True)))
        return Ready(rendered.without_pixels(engine_input), engine_input)

    @asynccontextmanager
    async def _spliced(self, task: StageTask, prompt: Prompt) -> AsyncIterator[Ready]:
        refs = {ref.identity: ref for ref in prompt.media}
        own: list[OwnItem] = []
        for identity in refs:
            self.local.store.hold(identity)
        try:
            records = await self._records(task, refs.values(), own)
            yield self._assembled(prompt, records, own)
        finally:
            for one in own:
                self.encoder.drop(one)
            for identity in refs:
                self.local.store.release(identity)

    async def _records(self, task: StageTask, refs: Iterable[MediaRef], own: list[OwnItem]) -> dict[str, ItemRecord]:
        """All items at once; the first that cannot be had ends the search for the others."""
        records: dict[str, ItemRecord] = {}
        turns = Turns(ref.identity for ref in refs)

        async def one(ref: MediaRef) -> None:
            try:
                found = await self.finder.find(task, ref, turns)
            finally:
                turns.settle(ref.identity)
            if isinstance(found, OwnItem):
                own.append(found)
            records[ref.identity] = found.record if isinstance(found, OwnItem) else found

        await _all(one(ref) for ref in refs)
        return records

    def _assembled(self, prompt: Prompt, records: dict[str, ItemRecord], own: list[OwnItem]) -> Ready:
        spliced = splice(prompt, records)
        self.renderer.check_length(len(spliced.token_ids))
        pixels = {one.record.identity: one.kwargs for one in own}

        async def encoded() -> None:
            await asyncio.gather(*(self.encoder.share(one) for one in own if one.reserved or one.claimed))

        return Ready(spliced, rendered.engine_input(spliced, pixels), encoded)


async def _all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results; the first failure ends what still runs."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
