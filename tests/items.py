"""Item records and descriptors for tests, and what is said of them."""

import json
from typing import Any

from app import keys
from app.items.index import ItemIndex
from app.items.record import ItemRecord
from app.messages.plans import Assignment
from app.messages.prompts import FieldValue
from app.messages.tensors import Descriptor

MODEL = "f" * 16
E0 = Assignment(worker="encode@gpu0", incarnation="e0")


def identity(number: int) -> str:
    return f"{number:032x}"


def record(of: str, **changes: Any) -> ItemRecord:
    fields: dict[str, Any] = {
        "modality": "image",
        "identity": of,
        "target": [7],
        "replacement": [(5, 1), (7, 64), (6, 1)],
        "embed_runs": [1, 64, 1],
        "fields": {"grid": FieldValue(kind="batched", dtype="int64", shape=[3], data=[1, 16, 16])},
        "embeds": 64,
        "width": 8,
        "dtype": "float32",
        "model": "m",
        "worker": "encode@gpu0",
        "written": 1.0,
    }
    return ItemRecord(**fields | changes)


def descriptor(of: str, holder: Assignment, **changes: Any) -> Descriptor:
    fields: dict[str, Any] = {
        "agent": holder.worker,
        "host": "h",
        "path": f"/dev/shm/{of}",
        "address": 4096,
        "metadata": "",
        "name": of,
        "nonce": "0" * 16,
        "dtype": "float32",
        "shape": [64, 8],
        "nbytes": 2048,
        "expires_at": 2e9,
    }
    return Descriptor(**fields | changes)


async def publish(index: ItemIndex, owner: Assignment, of: str) -> None:
    await index.publish(of, owner, record(of), descriptor(of, owner))


async def heard(redis: Any, act: Any) -> list[dict[str, Any]]:
    """What is announced while `act` runs."""
    async with redis.pubsub() as pubsub:
        await pubsub.subscribe(keys.ITEMS_CHANNEL)
        await pubsub.get_message(timeout=5)
        await act
        await redis.publish(keys.ITEMS_CHANNEL, "end")
        said: list[dict[str, Any]] = []
        while (message := await pubsub.get_message(timeout=5))["data"] != b"end":
            said.append(json.loads(message["data"]))
        return said
