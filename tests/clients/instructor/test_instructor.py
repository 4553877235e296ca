"""instructor in its mode for JSON schemas: its tools are not strict, so a random model's arguments are anything."""

from __future__ import annotations

from typing import Any, Literal

import instructor
import pytest
from instructor import Mode
from openai import OpenAI
from pydantic import BaseModel

QUESTION: Any = [{"role": "user", "content": "Is it warm in Lima?"}]


class Place(BaseModel):
    city: Literal["Oslo", "Lima"]
    warm: bool


class Weather(BaseModel):
    """The weather of a place."""

    place: Place
    unit: Literal["celsius", "fahrenheit"]
    note: str | None = None


@pytest.fixture
def plain(server_url: str) -> Any:
    with OpenAI(base_url=f"{server_url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def ask(model_name: str, short_json: dict[str, int]) -> dict[str, Any]:
    return {"model": model_name, "messages": QUESTION, "max_tokens": 200, "temperature": 0, "logit_bias": short_json}


def test_a_model(plain: OpenAI, ask: dict[str, Any]) -> None:
    client = instructor.from_openai(plain, mode=Mode.JSON_SCHEMA)
    answer, raw = client.create_with_completion(response_model=Weather, max_retries=0, **ask)
    assert isinstance(answer, Weather) and raw.usage.completion_tokens > 0


def test_a_model_that_grows(plain: OpenAI, ask: dict[str, Any]) -> None:
    client = instructor.from_openai(plain, mode=Mode.JSON_SCHEMA)
    whole = client.create(response_model=Weather, max_retries=0, **ask)
    parts = list(client.create_partial(response_model=Weather, max_retries=0, **ask))
    assert len(parts) > 1 and parts[-1].model_dump() == whole.model_dump()


def test_a_list_of_models(plain: OpenAI, ask: dict[str, Any]) -> None:
    client = instructor.from_openai(plain, mode=Mode.JSON_SCHEMA)
    places = client.create(response_model=list[Place], max_retries=0, **ask)
    assert [type(place) for place in places] == [Place]
