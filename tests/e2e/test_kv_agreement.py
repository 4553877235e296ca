"""What the router thinks that an engine holds of a prompt is what the engine then finds in its cache, to the token."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from PIL import Image

from app import keys
from app.items.index import ItemIndex
from app.items.splice import splice
from app.launch import shared_memory
from app.messages.plans import Assignment
from app.messages.prompts import Prompt, RenderedPrompt
from app.redis import connect
from app.registry import Fleet
from app.roles import ALL
from app.routing import Ask, RedisRouter
from app.routing.blocks import Span, chain
from app.routing.view import Views
from app.settings import Settings
from app.settings_sections import ItemSettings
from tests.adapters import make_adapter
from tests.messages import FINGERPRINT, descriptor, media_ref, worker
from tests.polling import until

pytestmark = [
    pytest.mark.usefixtures("vllm"),
    pytest.mark.asyncio(loop_scope="module"),
    # This process has the engine's front half, and vLLM's warnings are its own affair.
    pytest.mark.filterwarnings("default"),
]

BLOCK = 32
#: So few that random prompts push each other out.
BLOCKS = 80
WORKER = Assignment(worker="agg@gpu0", incarnation="a1")
ADAPTER = "poet"
TEXT = range(300, 700)


@dataclasses.dataclass(frozen=True)
class Given:
    """A prompt as a client gives it."""

    prompt: Prompt
    adapter: str = ""


class Worker:
    """One engine, the parts that tell Redis what it holds, and a router that reads it."""

    def __init__(self, settings: Settings, redis: Any, lora: Path) -> None:
        from prometheus_client import CollectorRegistry

        from workers.engine import Engine
        from workers.kv_events.service import KVEvents

        self.redis = redis
        self._files = shared_memory.Ledger()
        self.kv = KVEvents(settings, WORKER.worker, redis, CollectorRegistry())
        self.engine = Engine(settings, None, self.kv.sockets)
        self.engine.reporting = self.kv.reporting
        self.index = ItemIndex(redis, FINGERPRINT, ItemSettings())
        self.items: dict[str, Any] = {}  # RenderedAlone
        self._lora = lora
        self._views = Views(self.index)
        self._router = RedisRouter(redis, settings.routing, 60.0)
        self._numbers = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        work = self.kv.start(self.engine.kv_event_sources, self.engine.event_block_size)
        self._tasks = [asyncio.create_task(one) for one in work]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self.kv.close()
        # Its process is killed if it takes longer than a second, and leaves what a supervisor would remove.
        self._files.note(process.pid for process in psutil.Process().children(recursive=True))
        self.engine.shutdown()
        self._files.remove()
        self.kv.folder.remove()

    async def encode(self, number: int) -> str:
        """Let the cluster see a picture; answers its identity."""
        identity = f"{number:032x}"
        picture = Image.effect_noise((64 + 32 * number, 64), 50 + number).convert("RGB")
        self.items[identity] = await self.engine.renderer.item(media_ref(identity), picture)
        record = self.items[identity].record(width=1, dtype="float32", worker=WORKER.worker, model="tiny")
        await self.index.publish(identity, WORKER, record, descriptor())
        return identity

    @property
    def _fleet(self) -> Fleet:
        targets = {one.modality: one.target for one in self.items.values()}
        return Fleet((worker(WORKER, *ALL, model="tiny", engine=self.engine.state(), placeholders=targets),))

    async def overlap(self, given: Given) -> int:
        """Tokens of the prompt that its router thinks are here."""
        view = await self._views.of(given.prompt, self._fleet, adapter=given.adapter)
        assert view.exact
        ask = Ask("r", time.time() + 60, "api", fingerprint=FINGERPRINT, view=view)
        (candidate,) = (await self._router.explain(self._fleet, ask)).candidates
        return candidate.held * BLOCK

    def spliced(self, given: Given) -> RenderedPrompt:
        records = {one: self.items[one].record(width=1, dtype="", worker="", model="") for one in self.items}
        return splice(given.prompt, records)

    async def run(self, given: Given, engine_input: Any = None, answer: int = 4) -> tuple[int, RenderedPrompt]:
        """(tokens found in the cache, the prompt with its answer), once Redis has its blocks."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        from workers import rendered
        from workers.engine import REPORT

        whole = self.spliced(given)
        if engine_input is None:
            engine_input = rendered.engine_input(whole, {one: item.kwargs for one, item in self.items.items()})
        mode = "full" if self.engine.reporting() else "incremental"
        params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True, extra_args={REPORT: mode})
        lora = LoRARequest(ADAPTER, 1, str(self._lora)) if given.adapter else None
        final: Any = None
        async for output in self.engine._llm.generate(
            engine_input, params, f"r{next(self._numbers)}", lora_request=lora
        ):
            final = output
        tokens = [*whole.token_ids, *final.outputs[0].token_ids]
        done = whole.model_copy(update={"token_ids": tokens})
        # The last token was sampled and never computed.
        await self.has(names(done.model_copy(update={"token_ids": tokens[:-1]}), given.adapter))
        return final.num_cached_tokens, done

    async def has(self, blocks: list[str]) -> None:
        async def all_there() -> bool:
            return not blocks or all(await self.redis.smismember(keys.kv(WORKER.worker, 0), blocks))

        await until(all_there, f"{len(blocks)} blocks are in Redis", 30.0)

    async def count(self) -> int:
        return int(await self.redis.scard(keys.kv(WORKER.worker, 0)))


def names(prompt: RenderedPrompt, adapter: str = "") -> list[str]:
    spans = [Span(one.identity, one.offset, one.length) for one in prompt.items]
    return chain(prompt.token_ids, BLOCK, items=spans, adapter=adapter, salt=prompt.cache_salt or "")


def findable(prompt: RenderedPrompt, held: int) -> int:
    """What vLLM takes of `held` tokens: it computes the last one in any case, and so the whole block that it is in."""
    return min(held, (len(prompt.token_ids) - 1) // BLOCK * BLOCK)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(vllm: Any, model: Path, redis_url: str, tmp_path_factory: Any) -> AsyncIterator[Worker]:
    lora = make_adapter(tmp_path_factory.mktemp("lora") / ADAPTER, model)
    bytes_per_block = BLOCK * 3 * 2 * 2 * 32 * 4
    settings = Settings(
        model=str(model),
        served_model_name="tiny",
        enable_multimodal=True,
        engine={
            "per_host": 2,
            "args": f"--dtype float32 --max-model-len 1024 --enforce-eager --skip-mm-profiling --block-size {BLOCK} "
            f"--kv-cache-memory-bytes {BLOCKS * bytes_per_block} --enable-lora --max-lora-rank 8 --max-num-seqs 4",
        },
        routing={"timeout_s": 30.0},
    )
    redis = connect(redis_url, 5.0, name="test")
    await redis.flushall()
    made = Worker(settings, redis, lora)
    made.start()
    assert made.engine.kv_tokens < 2 * BLOCKS * BLOCK
    for number in range(1, 5):
        await made.encode(number)
    yield made
    await made.close()
    await redis.aclose()


def random_prompt(chance: random.Random, seen: list[Given], items: dict[str, Any]) -> Given:
    """Something new, or the beginning of something seen and then something new, with and without pictures."""
    if seen and chance.random() < 0.7:
        old = chance.choice(seen)
        tokens = old.prompt.token_ids[: chance.randrange(1, len(old.prompt.token_ids) + 1)]
        if chance.random() < 0.2:
            tokens = list(old.prompt.token_ids)
        targets = {one.target[0] for one in items.values()}
        media = old.prompt.media[: sum(token in targets for token in tokens)]
        salt = old.prompt.cache_salt if chance.random() < 0.8 else chance.choice([None, "mine", "yours"])
        adapter = old.adapter if chance.random() < 0.8 else chance.choice(["", ADAPTER])
    else:
        tokens, media, salt, adapter = [], [], chance.choice([None, "mine", "yours"]), chance.choice(["", ADAPTER])
    tokens, media = [*tokens], [*media]
    for _ in range(chance.choice([0, 1, 1, 2]) if tokens else 2):
        tokens += chance.choices(TEXT, k=chance.randrange(1, 90))
        if chance.random() < 0.5 and len(media) < 3:
            identity = chance.choice([*items])
            media.append(media_ref(identity))
            tokens += items[identity].target
    return Given(Prompt(token_ids=tokens, media=media, cache_salt=salt), adapter)


async def test_random_prompts(running: Worker) -> None:
    chance = random.Random(7)
    seen: list[Given] = []
    overlaps: list[tuple[int, int, int]] = []
    for number in range(150):
        given = random_prompt(chance, seen, running.items)
        thought = await running.overlap(given)
        found, _ = await running.run(given, answer=chance.randrange(1, 40))
        whole = running.spliced(given)
        assert found == findable(whole, thought), (number, given, thought)
        overlaps.append((found, len(whole.token_ids), len(whole.items)))
        seen.append(given)
    hits = [one for one in overlaps if one[0]]
    assert len(hits) > 30 and any(items for _, _, items in hits), "nothing was compared"
    assert running.kv.counts()["removed"] > BLOCKS, "nothing was pushed out"
    assert await running.count() < BLOCKS
    wrong = ("lost", "orphans", "unnamed", "ignored", "rebuilds", "failed")
    assert {name: running.kv.counts()[name] for name in wrong} == dict.fromkeys(wrong, 0)


async def test_a_whole_prompt_and_the_tokens_that_were_generated(running: Worker) -> None:
    given = Given(Prompt(token_ids=[*TEXT][: 3 * BLOCK]))
    _, whole = await running.run(given, answer=3 * BLOCK)
    again = Given(Prompt(token_ids=whole.token_ids))
    assert await running.overlap(given) == 3 * BLOCK
    assert (await running.run(given))[0] == 2 * BLOCK
    assert await running.overlap(again) == (await running.run(again))[0] == 5 * BLOCK


async def test_a_picture_in_a_prompt_that_vllm_rendered_has_the_same_name(running: Worker) -> None:
    identity = next(iter(running.items))
    target = running.items[identity].target
    given = Given(Prompt(token_ids=[*TEXT][100:150] + target + [*TEXT][:100], media=[media_ref(identity)]))
    picture = Image.effect_noise((96, 64), 51).convert("RGB")  # it goes by its name alone
    await running.run(given)
    whole = await running.engine.renderer.whole(given.prompt, {identity: picture})
    found, _ = await running.run(given, whole)
    assert found == findable(running.spliced(given), await running.overlap(given)) > 3 * BLOCK


async def test_requests_at_once_hold_a_block_until_the_last_copy_is_gone(running: Worker) -> None:
    given = Given(Prompt(token_ids=random.Random(1).choices(TEXT, k=10 * BLOCK)))
    await asyncio.gather(*(running.run(given) for _ in range(4)))
    for number in range(30):
        thought = await running.overlap(given)
        if not thought:
            break
        await running.run(Given(Prompt(token_ids=random.Random(100 + number).choices(TEXT, k=4 * BLOCK))))
    assert number > 3 and not thought
    found, _ = await running.run(given)
    assert found == 0


async def test_a_cleared_cache_is_an_empty_one(running: Worker) -> None:
    given = Given(Prompt(token_ids=[*TEXT][: 4 * BLOCK]))
    await running.run(given)
    assert await running.engine._llm.reset_prefix_cache()
    # vLLM tells of it with the next step.
    other = Given(Prompt(token_ids=[*TEXT][50 : 50 + 2 * BLOCK]))
    await running.run(other, answer=1)
    await until(lambda: _is(running, 2), "only the new blocks are there")
    assert await running.overlap(given) == 0
    assert (await running.run(given))[0] == 0


async def _is(running: Worker, count: int) -> bool:
    return await running.count() == count


async def test_what_was_forgotten_is_known_again_when_it_is_used(running: Worker) -> None:
    """Last: copies are counted no more from here on."""
    given = Given(Prompt(token_ids=random.Random(2).choices(TEXT, k=6 * BLOCK + 5)))
    await running.run(given, answer=1)
    running.kv.ranks[0]._begin_anew()
    await until(lambda: _is(running, 0), "all is forgotten")
    longer = Given(Prompt(token_ids=given.prompt.token_ids + [*TEXT][: 2 * BLOCK]))
    assert running.engine.reporting()
    found, whole = await running.run(longer, answer=1)
    assert found == 6 * BLOCK
    assert await running.overlap(longer) == 8 * BLOCK
