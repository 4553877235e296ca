"""app.messages.tasks: what is said on one side is understood on the other."""

import json
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from app.messages.plans import Assignment, Plan
from app.messages.prompts import FieldValue, Prompt, RenderedItem, RenderedPrompt
from app.messages.tasks import DecodeTask, EmbedTask, KVHandoff, PrefillTask, Task
from tests.messages import ENCODE, encode_task, media_ref

P = Assignment(worker="prefill@gpu0", incarnation="p1")
D = Assignment(worker="decode@gpu1", incarnation="d1")
PICTURE = media_ref("0123456789abcdef" * 2)
COMMON: dict[str, Any] = {
    "request_id": "chatcmpl-1.0",
    "attempt": 0,
    "api": "api-1",
    "model": "m",
    "plan": Plan(prefill=P, decode=D),
    "deadline": 1764428400.123456,
    "params": {"temperature": 0.7, "max_tokens": 5, "stop": ["\n", "é"], "seed": None},
}
GRID = FieldValue(kind="batched", dtype="int64", shape=[3], data=[1, 4, 6])
RENDERED = RenderedPrompt(
    token_ids=[1, 2, 2, 3],
    items=[
        RenderedItem(
            modality="image",
            identity=PICTURE.identity,
            offset=1,
            length=2,
            embed_runs=[0, 1, 1],
            fields={
                "grid": GRID,
                "fps": FieldValue(kind="shared", data=2.5),
                "seconds": FieldValue(kind="flat", dim=1, data=[[0.5], [1.5]]),
            },
        )
    ],
    cache_salt="s",
)

TASKS = [
    encode_task("chatcmpl-1.0", ENCODE),
    PrefillTask(
        prompt=Prompt(token_ids=[1], media=[PICTURE]),
        **COMMON | {"plan": Plan(prefill=P, decode=D, encode={PICTURE.identity: ENCODE})},
    ),
    PrefillTask(prompt=Prompt(token_ids=[1, 2], media=[PICTURE], cache_salt="s"), **COMMON),
    DecodeTask(prompt=Prompt(token_ids=[1]), **COMMON),
    DecodeTask(
        prompt=RENDERED, kv=KVHandoff(params={"remote_block_ids": [[1, 2]], "port": 5}, expires_at=1.5), **COMMON
    ),
    EmbedTask(prompt=Prompt(token_ids=[1, 2], cache_salt="s"), **COMMON | {"params": {"dimensions": 32}}),
    DecodeTask(prompt=RenderedPrompt(token_ids=[7]), reasoning_parser_kwargs={"a": {"b": [1]}}, **COMMON),
]


def through_json(message: BaseModel) -> BaseModel:
    return type(message).model_validate(json.loads(json.dumps(message.model_dump(mode="json"))))


@pytest.mark.parametrize("task", TASKS, ids=lambda task: type(task).__name__)
def test_tasks_survive_json(task: Task) -> None:
    back = through_json(task)
    assert back == task
    if isinstance(task, DecodeTask):
        assert isinstance(back, DecodeTask) and type(back.prompt) is type(task.prompt)


def parts(message: Any) -> list[dict[str, Any]]:
    """Every object in a message's JSON that is a message itself, outermost first."""
    found = []
    if isinstance(message, dict):
        found = [message] + [part for name, value in message.items() if name != "params" for part in parts(value)]
    elif isinstance(message, list):
        found = [part for value in message for part in parts(value)]
    return found


@pytest.mark.parametrize("task", TASKS, ids=lambda task: type(task).__name__)
def test_what_is_not_known_is_refused_at_every_depth(task: Task) -> None:
    for at in range(len(parts(task.model_dump(mode="json")))):
        tree = task.model_dump(mode="json")
        part = parts(tree)[at]
        if set(part) <= {"grid", "fps", "seconds"} or "b" in part or "a" in part or PICTURE.identity in part:
            continue  # names chosen by others
        part["surprise"] = 1
        with pytest.raises(ValidationError, match="surprise"):
            type(task).model_validate(tree)
