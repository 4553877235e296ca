"""api.dispatch, through the pipeline: encode workers get their tasks at once, or the items are free again."""

from typing import Any

import pytest

from app import keys
from app.errors.serving import BrokerUnavailable
from app.messages.prompts import Prompt
from app.messages.tasks import EncodeTask
from app.redis import connect
from app.roles import Role
from tests.integration.fake_api import answer, job, serving, split
from tests.integration.fake_worker import FakeWorker, silence
from tests.messages import DECODE, ENCODE, FINGERPRINT, PREFILL, media_ref
from tests.polling import until


async def test_encode_tasks_go_out_with_the_prefill_task(redis: Any) -> None:
    encode = FakeWorker(redis, ENCODE, (Role.ENCODE,), silence)
    prefill, decode = split(redis)
    media = [media_ref("a" * 32), media_ref("b" * 32), media_ref("a" * 32)]
    async with serving(redis, encode, prefill, decode) as api:
        asked = job(prompt=Prompt(token_ids=[1], media=media))
        assert await answer(api, asked) == list(range(5)), "nobody waits for the encode worker but who prefills"
        await until(lambda: len(encode.taken) == 2, "the encode tasks")
        assert all(isinstance(task, EncodeTask) and task.assigned == ENCODE for task in encode.taken)
        assert {task.item.identity for task in encode.taken} == {"a" * 32, "b" * 32}  # type: ignore[union-attr]
        assert prefill.taken[0].plan.encode == dict.fromkeys(("a" * 32, "b" * 32), ENCODE)  # type: ignore[union-attr]
        await api.clean(ENCODE, PREFILL, DECODE)


async def test_an_item_whose_request_was_never_sent_is_anybodys(redis: Any) -> None:
    """The broker fails between the plan and the tasks."""
    encode = FakeWorker(redis, ENCODE, (Role.ENCODE,), silence)
    broker = connect("redis://127.0.0.1:1/0", 0.2, name="test")
    async with serving(redis, encode, *split(redis), broker=broker) as api:
        with pytest.raises(BrokerUnavailable):
            await answer(api, job(prompt=Prompt(token_ids=[1], media=[media_ref()])))
        await api.clean(ENCODE, PREFILL, DECODE)
        assert not await redis.exists(keys.encoding(FINGERPRINT, "a" * 32))
    await broker.aclose()
