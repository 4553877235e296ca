"""An engine and its renderer without vLLM's: they take items, and take and leave embeddings as the real ones do."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from app.errors.media import MediaRefused
from app.errors.requests import PromptTooLong
from app.items import splice
from app.messages.media import MediaRef, Modality
from app.messages.prompts import FieldValue, Prompt
from app.registry import EngineState
from app.tensors import segment
from tests.messages import ENGINE
from workers.embeddings.holds import has_pixels
from workers.embeddings.store import NEW

TARGET, BEGIN, END = 7, 5, 6
ROWS, WIDTH = 4, 8
#: Bytes of an embedding in a store.
ITEM = segment.PAGE + ROWS * WIDTH * 4
CONTEXT = 100


class Lost(Exception):
    """What would have ended a real engine: neither pixels nor an embedding."""


def embedding(of: str, rows: int = ROWS) -> Any:
    """What every engine's encoder makes of an item."""
    import torch

    return torch.arange(rows * WIDTH, dtype=torch.float32).reshape(rows, WIDTH) + int(of[-4:], 16) * 1000


class FakeRenderer:
    """An item becomes `ROWS` placeholders between two marks. `refused` are those that the processor does not take,
    `large` those of more rows, `odd` those without a rendering of their own. `calls` are the items it was given, and
    `gate` holds them up until it is set."""

    media_io_kwargs: dict[str, dict[str, Any]] = {}
    processor_settings: dict[str, object] = {}
    revision = None

    def __init__(self) -> None:
        self.splices = True
        self.refused: set[str] = set()
        self.large: dict[str, int] = {}
        self.odd: set[str] = set()
        self.calls: Counter[str] = Counter()
        self.wholes: list[Prompt] = []
        self.gate = asyncio.Event()
        self.gate.set()

    def modalities(self) -> list[Modality]:
        return ["image"]

    async def spliceable(self) -> bool:
        return self.splices

    async def item(self, ref: MediaRef, data: Any) -> Any:
        from workers.renderer import NotAlone

        assert data.size == (8, 8)
        self.calls[ref.identity] += 1
        await self.gate.wait()
        await asyncio.sleep(0)
        if ref.identity in self.refused:
            raise MediaRefused("the model's processor refused the medium", param=ref.param)
        if ref.identity in self.odd:
            raise NotAlone("it has no rendering of its own")
        return self._alone(ref.identity)

    async def sample(self, modality: Modality, of: str) -> Any:
        return self._alone(of)

    async def whole(self, prompt: Prompt, media: dict[str, Any]) -> Any:
        from workers import rendered

        assert media.keys() == {ref.identity for ref in prompt.media}
        self.wholes.append(prompt)
        self.calls.update(media.keys())
        await self.gate.wait()
        alone = {of: self._alone(of) for of in media}
        records = {of: one.record(width=WIDTH, dtype="float32", worker="", model="") for of, one in alone.items()}
        return rendered.engine_input(splice(prompt, records), {of: one.kwargs for of, one in alone.items()})

    def text(self, prompt: Prompt) -> Any:
        from vllm.inputs import tokens_input

        self.check_length(len(prompt.token_ids))
        return tokens_input(prompt.token_ids, cache_salt=prompt.cache_salt)

    def check_length(self, tokens: int, param: str = "messages") -> None:
        if tokens >= CONTEXT:
            raise PromptTooLong(f"{tokens} tokens; the model's context is {CONTEXT}", param=param)

    def _alone(self, of: str) -> Any:
        import torch
        from vllm.inputs import mm_input
        from vllm.multimodal.inputs import (
            MultiModalBatchedField,
            MultiModalFieldElem,
            MultiModalKwargsItem,
            PlaceholderRange,
        )

        from workers.item_rendering import RenderedAlone

        rows = self.large.get(of, ROWS)
        tokens = [BEGIN, *[TARGET] * rows, END]
        pixels = MultiModalFieldElem(data=torch.zeros(1), field=MultiModalBatchedField())
        grid = MultiModalFieldElem(data=torch.tensor([1, 2, rows]), field=MultiModalBatchedField(keep_on_cpu=True))
        kwargs = MultiModalKwargsItem({"pixels": pixels, "grid": grid})
        mask = torch.tensor([False, *[True] * rows, False])
        place = PlaceholderRange(offset=0, length=len(tokens), is_embed=mask)
        return RenderedAlone(
            modality="image",
            identity=of,
            target=[TARGET],
            replacement=tokens,
            embed_runs=[1, rows, 1],
            fields={"grid": FieldValue(kind="batched", dtype="int64", shape=[3], data=[1, 2, rows])},
            embeds=rows,
            kwargs=kwargs,
            engine_input=mm_input(tokens, {"image": [kwargs]}, {"image": [of]}, {"image": [place]}),
        )


class FakeEngine:
    """Takes and leaves embeddings as the connector does, in its worker's folder.

    `encodes` and `loads` count items. `fault` is raised instead of an encode, `saves` says whether what was encoded is
    written, `gate` holds encodes up until it is set.
    """

    block_size, max_model_len, kv_tokens, dead = 16, CONTEXT, 1600, False

    def __init__(self, embeddings: Path | None) -> None:
        self.renderer = FakeRenderer()
        self.encodes: Counter[str] = Counter()
        self.loads: Counter[str] = Counter()
        self.fault: BaseException | None = None
        self.saves = True
        self.gate = asyncio.Event()
        self.gate.set()
        self.at_the_gate = 0
        self._folder = embeddings

    def state(self) -> EngineState:
        return ENGINE

    async def encode(self, engine_input: Any, name: str) -> None:
        await self.run(engine_input)

    async def run(self, engine_input: Any) -> None:
        """A step of the engine for one prompt. Raises Lost where a real engine would die."""
        places = (engine_input.get("mm_placeholders") or {}).get("image", [])
        for at, place in enumerate(places):
            of, kwargs = engine_input["mm_hashes"]["image"][at], engine_input["mm_kwargs"]["image"][at]
            rows = place.get_num_embeds()
            if not self._load(of, rows):
                await self._encode(of, rows, has_pixels(kwargs))

    def _load(self, of: str, rows: int) -> bool:
        path = self._folder and self._folder / segment.file_name(of)
        if path is None or not path.exists():
            return False
        import torch

        from workers.embeddings import tensor_files

        found = tensor_files.read(path, of, rows, torch.device("cpu"), pin=False)
        assert torch.equal(found, embedding(of, rows)), "the embedding of another item"
        self.loads[of] += 1
        return True

    async def _encode(self, of: str, rows: int, pixels: bool) -> None:
        self.at_the_gate += 1
        try:
            await self.gate.wait()
        finally:
            self.at_the_gate -= 1
        await asyncio.sleep(0)
        if self.fault is not None:
            raise self.fault
        if not pixels:
            raise Lost(of)
        if not of.startswith("self-check"):
            self.encodes[of] += 1
        reserved = self._folder and self._folder / (segment.file_name(of) + NEW)
        from workers.embeddings import tensor_files

        if self.saves and reserved is not None and reserved.exists():
            number = "0" if of.startswith("self-check") else of
            # An embedding that cannot be written ends no engine.
            with suppress(Exception):
                tensor_files.write(reserved, of, embedding(number, rows))

    def shutdown(self) -> None:
        return None
