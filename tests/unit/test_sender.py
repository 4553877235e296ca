"""app.sender: its messages as Celery and kombu read them. tests/integration has a real worker take them."""

import asyncio
import base64
import json
import time
from typing import Any, ClassVar

import pytest
from celery import Celery
from celery.utils.time import maybe_iso8601
from celery.worker.request import Request
from kombu.transport.redis import Channel
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, ResponseError

from app.errors.serving import BrokerUnavailable
from app.messages.plans import Assignment, Plan
from app.messages.prompts import Prompt
from app.messages.tasks import DecodeTask, EmbedTask
from app.sender import TaskSender, envelope, envelope_of, summary

WORKER = Assignment(worker="agg@gpu0", incarnation="i")
TOKENS = [900_000_000 + n for n in range(50)]


def task(deadline: float | None = None, **params: Any) -> DecodeTask:
    return DecodeTask(
        request_id="chatcmpl-1.0",
        attempt=0,
        api="api-1",
        model="m",
        plan=Plan(prefill=WORKER, decode=WORKER),
        deadline=time.time() + 60 if deadline is None else deadline,
        params={"max_tokens": 16, **params},
        prompt=Prompt(token_ids=TOKENS),
    )


def received(sent: bytes) -> Any:
    """The message as kombu's Redis channel makes it of what lies in the queue."""
    channel = object.__new__(Channel)
    channel._cookie = None
    message = Channel.Message(json.loads(sent), channel=channel)
    message.accept = {"application/json"}
    return message


def test_kombu_decodes_it() -> None:
    message = received(envelope("decode", task(), "decode.agg@gpu0"))
    args, kwargs, embed = message.decode()
    assert (args, set(embed.values())) == ([], {None})
    assert DecodeTask.model_validate(kwargs["message"]).prompt == task().prompt
    assert message.properties["delivery_info"]["routing_key"] == "decode.agg@gpu0"
    assert message.content_type == "application/json"


def test_celery_takes_it_for_its_own() -> None:
    """The same headers as apply_async makes, and a Request of them."""
    app = Celery("test", broker="memory://", set_as_current=False)
    app.conf.task_serializer = "json"

    @app.task(name="decode")  # type: ignore[untyped-decorator]
    def decode(message: dict[str, Any]) -> None: ...

    own = app.amqp.as_task_v2("id", "decode", kwargs={"message": {}}, kwargsrepr="", ignore_result=True)
    sent = json.loads(envelope("decode", task(), "decode"))
    assert set(sent["headers"]) == set(own.headers)
    message = received(json.dumps(sent).encode())
    request = Request(message, app=app, task=decode, decoded=False)
    assert (request.name, request.id) == ("decode", sent["headers"]["id"])
    assert request.info()["hostname"] and request.kwargsrepr == summary(task())
    assert request.kwargs["message"]["request_id"] == "chatcmpl-1.0"


def test_every_message_has_its_own_id() -> None:
    first, second = (json.loads(envelope("decode", task(), "q")) for _ in range(2))
    assert first["headers"]["id"] != second["headers"]["id"]
    assert first["properties"]["delivery_tag"] != second["properties"]["delivery_tag"]


def test_it_expires_at_the_deadline() -> None:
    deadline = time.time() + 123.456
    headers = json.loads(envelope("decode", task(deadline), "q"))["headers"]
    assert maybe_iso8601(headers["expires"]).timestamp() == pytest.approx(deadline, abs=1e-3)
    assert json.loads(envelope_of("decode", {}, "q", "s"))["headers"]["expires"] is None


def test_what_flower_shows_is_short_and_nothing_that_a_user_wrote() -> None:
    message = task(stop=["a secret of the user"])
    headers = json.loads(envelope("decode", message, "q"))["headers"]
    assert headers["kwargsrepr"] == "request=chatcmpl-1.0 model=m prompt=50 tokens max=16"
    assert headers["argsrepr"] == "()"
    assert not any(str(token) in json.dumps(headers) for token in TOKENS)
    assert "secret" not in json.dumps(headers)


def test_parameters_with_numbers_as_names_survive() -> None:
    """vLLM's logit_bias: token id -> bias."""
    sent = json.loads(envelope("decode", task(logit_bias={5: -1.5}), "q"))
    (_, kwargs, _) = json.loads(base64.b64decode(sent["body"]))
    assert kwargs["message"]["params"]["logit_bias"] == {"5": -1.5}


class Connection:
    def __init__(self, redis: "Redis") -> None:
        self.retry = Retry(NoBackoff(), 0)
        self._redis = redis
        self._pushed: list[str] = []

    def pack_commands(self, commands: list[tuple[str, str, bytes]]) -> list[str]:
        assert {name for name, _, _ in commands} == {"LPUSH"}
        return [queue for _, queue, _ in commands]

    async def send_packed_command(self, packed: list[str]) -> None:
        await self._redis.gate.wait()
        self._redis.round_trips.append(len(packed))
        if self._redis.error is not None:
            raise self._redis.error
        self._pushed += packed

    async def read_response(self) -> int:
        if self._pushed.pop(0) == "bad":
            raise ResponseError("no")
        return 1

    async def disconnect(self, error: Exception) -> None:
        assert error is self._redis.error


class Redis:
    """Counts round trips; answers once the gate is open. Its own pool of one connection."""

    response_callbacks: ClassVar[dict[str, Any]] = {}

    def __init__(self, error: Exception | None = None) -> None:
        self.gate = asyncio.Event()
        self.error = error
        self.round_trips: list[int] = []
        self.connection_pool = self

    async def get_connection(self) -> Connection:
        return Connection(self)

    async def ensure_connection(self, _connection: Connection) -> None:
        """It is always there."""


async def sent_through(redis: Redis, queues: list[str]) -> list[BaseException | None]:
    sender = TaskSender(redis)
    sending = [asyncio.create_task(sender.send("decode", task(), queue)) for queue in queues]
    await asyncio.sleep(0)
    redis.gate.set()
    async with asyncio.timeout(5):
        return await asyncio.gather(*sending, return_exceptions=True)


async def test_sends_of_one_tick_share_a_round_trip() -> None:
    redis = Redis()
    assert await sent_through(redis, ["q"] * 64) == [None] * 64
    assert redis.round_trips == [64]


async def test_sends_during_a_round_trip_share_the_next() -> None:
    redis = Redis()
    sender = TaskSender(redis)
    first = asyncio.create_task(sender.send("decode", task(), "q"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    rest = [asyncio.create_task(sender.send("decode", task(), "q")) for _ in range(10)]
    await asyncio.sleep(0)
    redis.gate.set()
    async with asyncio.timeout(5):
        await asyncio.gather(first, *rest)
    assert redis.round_trips == [1, 10]


async def test_one_that_fails_does_not_fail_the_others() -> None:
    good, bad, other = await sent_through(Redis(), ["q", "bad", "q"])
    assert (good, other) == (None, None) and isinstance(bad, BrokerUnavailable)


@pytest.mark.parametrize("error", [ConnectionError("gone"), OSError("gone")])
async def test_no_redis_is_an_error_for_each(error: Exception) -> None:
    answers = await sent_through(Redis(error), ["q"] * 3)
    assert [type(answer) for answer in answers] == [BrokerUnavailable] * 3


async def test_an_unexpected_failure_leaves_nobody_waiting() -> None:
    answers = await sent_through(Redis(RuntimeError("bug")), ["q"] * 3)
    assert [type(answer) for answer in answers] == [RuntimeError] * 3


async def test_a_sender_that_left_is_no_obstacle() -> None:
    redis = Redis()
    sender = TaskSender(redis)
    leaving, staying = (asyncio.create_task(sender.send("decode", task(), "q")) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    redis.gate.set()
    async with asyncio.timeout(5):
        await staying
    assert leaving.cancelled()


def test_what_is_shown_of_a_task_that_embeds() -> None:
    shown = summary(EmbedTask(**task().model_dump(exclude={"kv", "seq"}) | {"params": {"dimensions": None}}))
    assert shown == "request=chatcmpl-1.0 model=m prompt=50 tokens"
