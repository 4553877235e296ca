"""api.main: what is wrong with a start is said, and nothing of it is left."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fastapi import FastAPI

from api import main, processes, services

VARIABLE = "VLLM_IMAGE_FETCH_TIMEOUT"


@pytest.fixture
def variable_that_is_none(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from vllm import envs

    monkeypatch.setenv(VARIABLE, "soon")
    yield
    envs.disable_envs_cache()


@pytest.mark.usefixtures("variable_that_is_none")
async def test_a_variable_that_vllm_does_not_take_ends_the_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    happened: list[str] = []

    @asynccontextmanager
    async def running(_: Any) -> AsyncIterator[str]:
        try:
            yield "services"
        finally:
            happened.append("stopped")

    monkeypatch.setattr(services, "running", running)
    monkeypatch.setattr(processes, "end_siblings", lambda: happened.append("siblings ended"))
    with caplog.at_level(logging.CRITICAL, "api.main"), pytest.raises(ValueError, match="soon"):
        async with main.lifespan(FastAPI()):
            happened.append("served")
    assert happened == ["siblings ended", "stopped"]
    assert "the API cannot start: ValueError: " in caplog.text
