"""app.cli.status: what it tells of workers that are in Redis."""

import json
from typing import Any

import pytest

from app.cli import status
from app.registry import Registry
from app.roles import ALL
from app.settings import Settings
from tests.messages import AGG, ENGINE, PREFILL, worker


async def told(redis_url: str) -> dict[str, Any]:
    return {**await status.collect(Settings(redis={"broker_url": redis_url})), "up": None}


async def test_adapters_of_workers(redis: Any, redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    registry = Registry(redis, 60.0)
    engine = ENGINE.model_copy(update={"max_loras": 2, "max_cpu_loras": 4})
    failed = {"poet@v2": "not in time"}
    await registry.announce(worker(AGG, *ALL, engine=engine, adapters=["sql@v1", "tars@v3"], adapters_failed=failed))
    await registry.announce(worker(PREFILL, *ALL))
    found = await told(redis_url)
    with_them, without = json.loads(json.dumps(found))["workers"]
    assert (with_them["adapters"], with_them["adapters_failed"]) == (["sql@v1", "tars@v3"], failed)
    assert (with_them["max_adapters"], without["max_adapters"]) == (4, 0)
    status._print(found)
    lines = capsys.readouterr().out.splitlines()
    assert f"{AGG.worker}: holds adapters sql@v1, tars@v3; 4 is most" in lines
    assert f"{AGG.worker}: lacks adapter poet@v2: not in time" in lines
    assert not [one for one in lines if "adapter" in one and PREFILL.worker in one]
