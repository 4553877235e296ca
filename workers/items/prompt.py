"""A prompt with media as this worker's engine takes it, put together from item records."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass

from app.items import ItemRecord, splice
from app.messages.media import MediaRef
from app.messages.prompts import Prompt
from app.messages.tasks import StageTask
from app.together import together
from workers import rendered
from workers.items.encoder import ItemEncoder, OwnItem
from workers.items.finder import ItemFinder
from workers.items.local import Gathered, LocalItems
from workers.items.ready import Ready, ready_text
from workers.items.turns import Turns
from workers.renderer import NotAlone, Renderer

log = logging.getLogger(__name__)

#: How often a prompt's items are searched for, while those that were found are evicted before they are held.
ROUNDS = 3


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
        async with self.encoder.loaded([*refs.values()]) as loaded:
            engine_input = await self.renderer.whole(prompt, dict(zip(refs, loaded, strict=True)))
        for identity, embeds in rendered.embeds(engine_input):
            self.encoder.check_tokens(refs[identity], embeds)
        return Ready(rendered.without_pixels(engine_input), engine_input, encoded_items=len(refs))

    @asynccontextmanager
    async def _spliced(self, task: StageTask, prompt: Prompt) -> AsyncIterator[Ready]:
        refs = {ref.identity: ref for ref in prompt.media}
        own: dict[str, OwnItem] = {}
        with self.local.room.wanting(refs):
            async with AsyncExitStack() as held:
                try:
                    records = await self._gather(task, refs, own, held)
                    yield self._assembled(prompt, records, [*own.values()])
                finally:
                    for one in own.values():
                        self.encoder.drop(one)

    async def _gather(
        self, task: StageTask, refs: dict[str, MediaRef], own: dict[str, OwnItem], held: AsyncExitStack
    ) -> dict[str, ItemRecord]:
        """The records of all items, which are then here and held, or among the prompt's `own`.

        Nothing is held while an item is searched for, or waits for room: two prompts could wait for each other.
        """
        records: dict[str, ItemRecord] = {}
        for left in reversed(range(ROUNDS)):
            wanted = [ref for identity, ref in refs.items() if identity not in own and identity not in records]
            records |= await self._search(task, wanted, own)
            async with AsyncExitStack() as attempt:
                gathering = self.local.gathered(records, self.finder.timeout_s)
                gathered = await attempt.enter_async_context(gathering)
                if not gathered.lost or not left:
                    held.push_async_callback(attempt.pop_all().aclose)
                    break
            for identity in gathered.lost:
                del records[identity]
            for one in own.values():
                self.encoder.disclaim(one)
        await self._encode_here(refs, gathered, own)
        for one in own.values():
            held.enter_context(self._held(one))
            await self.encoder.reserve(one)
        return records | {identity: one.record for identity, one in own.items()}

    async def _search(self, task: StageTask, refs: list[MediaRef], own: dict[str, OwnItem]) -> dict[str, ItemRecord]:
        """All items at once; the first that cannot be had ends the search for the others."""
        records: dict[str, ItemRecord] = {}
        turns = Turns(ref.identity for ref in refs)

        async def one(ref: MediaRef) -> None:
            try:
                found = await self.finder.find(task, ref, turns)
            finally:
                turns.settle(ref.identity)
            if isinstance(found, OwnItem):
                own[ref.identity] = found
            else:
                records[ref.identity] = found

        await together(one(ref) for ref in refs)
        return records

    async def _encode_here(self, refs: dict[str, MediaRef], gathered: Gathered, own: dict[str, OwnItem]) -> None:
        """What was found and could not be brought here."""

        async def one(identity: str) -> None:
            if identity in gathered.unplaced:
                why = "everything in the embedding cache is in use, or it is too small"
                own[identity] = await self.finder.without_room(refs[identity], why)
            else:
                own[identity] = await self.finder.encode_here(refs[identity], claimed=False)

        await together(one(identity) for identity in gathered.lost | gathered.unplaced)

    @contextmanager
    def _held(self, own: OwnItem) -> Iterator[None]:
        self.local.store.hold(own.record.identity)
        try:
            yield
        finally:
            self.local.store.release(own.record.identity)

    def _assembled(self, prompt: Prompt, records: dict[str, ItemRecord], own: list[OwnItem]) -> Ready:
        spliced = splice(prompt, records)
        self.renderer.check_length(len(spliced.token_ids))
        pixels = {one.record.identity: one.kwargs for one in own}

        async def encoded() -> None:
            await asyncio.gather(*(self.encoder.share(one) for one in own if one.reserved or one.claimed))

        return Ready(spliced, rendered.engine_input(spliced, pixels), encoded, len(own))
