"""Messages for tests."""

import time
from typing import Any

from app.messages.media import MediaRef
from app.messages.plans import Assignment, Plan
from app.messages.prompts import Prompt
from app.messages.tasks import DecodeTask, EncodeTask, PrefillTask
from app.messages.tensors import Descriptor
from app.registry import EngineState, WorkerRecord
from app.roles import Role

ENGINE = EngineState(vllm="0", max_model_len=100, block_size=16, kv_tokens=1600)
AGG = Assignment(worker="agg@gpu0", incarnation="a1")
PREFILL = Assignment(worker="prefill@gpu0", incarnation="p1")
FINGERPRINT = "f" * 32
ENCODE = Assignment(worker="encode@gpu2", incarnation="e1")
DECODE = Assignment(worker="decode@gpu1", incarnation="d1")


def worker(assignment: Assignment, *roles: Role, **changes: Any) -> WorkerRecord:
    fields: dict[str, Any] = {
        "id": assignment.worker,
        "incarnation": assignment.incarnation,
        "roles": frozenset(roles),
        "model": "m",
        "multimodal": True,
        "fingerprint": FINGERPRINT,
        "spliceable": True,
        "pid": 1,
        "host": "h",
        "concurrency": 8,
        "metrics": "",
        "engine": ENGINE,
        "started": time.time(),
    }
    return WorkerRecord(**fields | changes)


def decode_task(request_id: str, deadline: float | None = None, **changes: Any) -> DecodeTask:
    return DecodeTask(**_common(request_id, deadline) | {"prompt": Prompt(token_ids=[1, 2, 3])} | changes)


def prefill_task(request_id: str, deadline: float | None = None, **changes: Any) -> PrefillTask:
    return PrefillTask(prompt=Prompt(token_ids=[1, 2, 3]), **_common(request_id, deadline) | changes)


def descriptor(nbytes: int = 5, **changes: Any) -> Descriptor:
    fields: dict[str, Any] = {
        "agent": "api-1",
        "host": "here",
        "path": "/dev/shm/none",
        "address": 4096,
        "metadata": "",
        "name": "medium",
        "nonce": "0" * 16,
        "dtype": "uint8",
        "shape": [nbytes],
        "nbytes": nbytes,
        "expires_at": time.time() + 60,
    }
    return Descriptor(**fields | changes)


def media_ref(identity: str = "a" * 32, **changes: Any) -> MediaRef:
    fields: dict[str, Any] = {
        "modality": "image",
        "identity": identity,
        "size": 5,
        "param": "messages[0].content[0].image_url",
        "source": descriptor(),
    }
    return MediaRef(**fields | changes)


def encode_task(request_id: str, assigned: Assignment, **changes: Any) -> EncodeTask:
    known = {key: value for key, value in _common(request_id, None).items() if key not in ("plan", "params")}
    return EncodeTask(**known | {"item": media_ref(), "assigned": assigned} | changes)


def _common(request_id: str, deadline: float | None) -> dict[str, Any]:
    return {
        "request_id": request_id,
        "attempt": 0,
        "api": "api-1",
        "model": "m",
        "plan": Plan(prefill=AGG, decode=AGG),
        "deadline": time.time() + 60 if deadline is None else deadline,
        "params": {"max_tokens": 4},
    }
