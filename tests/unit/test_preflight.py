"""workers.preflight: what a worker refuses to start with."""

from __future__ import annotations

import re

import pytest

from app.registry import EngineState, WorkerRecord
from app.roles import Role
from workers.preflight import MisconfiguredWorker, check_blocks

E, P, D = Role.ENCODE, Role.PREFILL, Role.DECODE


def record(worker_id: str, block_size: int, *roles: Role, model: str = "m") -> WorkerRecord:
    return WorkerRecord(
        id=worker_id,
        incarnation="1",
        roles=frozenset(roles or {P, D}),
        model=model,
        multimodal=False,
        pid=1,
        host="h",
        concurrency=1,
        metrics="",
        engine=EngineState(vllm="0", max_model_len=10, block_size=block_size, kv_tokens=160),
        started=0.0,
    )


def test_other_blocks_than_the_fleets_are_refused_with_both_sizes() -> None:
    with pytest.raises(MisconfiguredWorker, match=re.escape("16 tokens here, of 32 in worker b@2")) as refused:
        check_blocks(record("a@1", 16), [record("c@3", 16), record("b@2", 32)])
    assert "--block-size" in str(refused.value), "what to do"


@pytest.mark.parametrize(
    "other",
    [
        record("b@2", 16),
        record("b@2", 32, model="another"),
        record("b@2", 32, E),
        record("a@1", 32),  # an earlier self, whose lease has not run out
    ],
)
def test_workers_that_share_no_blocks_may_have_others(other: WorkerRecord) -> None:
    check_blocks(record("a@1", 16), [other])
    check_blocks(record("a@1", 16, D), [other])


def test_a_worker_that_only_encodes_has_no_blocks() -> None:
    check_blocks(record("a@1", 16, E), [record("b@2", 32)])
