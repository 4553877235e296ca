"""api.processor_kwargs: as much as a request may tell the model's processor, whatever else its body holds."""

from __future__ import annotations

from typing import Any

import pytest

from api import processor_kwargs
from api.processor_kwargs import FIELD, MAX_DEPTH, MAX_LENGTH, taken
from app.errors.requests import InvalidRequest


def nested(depth: int, kind: type, inner: Any = 1) -> Any:
    """As many objects, or an object and lists in it."""
    for _ in range(depth - 1):
        inner = [inner] if kind is list else {"a": inner}
    return {"a": inner}


def refusal(kwargs: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        taken({FIELD: kwargs}, trusted=True)
    assert caught.value.param == FIELD
    return caught.value.message


@pytest.mark.parametrize("kind", [dict, list])
def test_what_is_trusted_is_taken_as_it_is(kind: type) -> None:
    for kwargs in ({"min_pixels": 64, "size": {"a": [1.5, None, "x"]}}, nested(MAX_DEPTH, kind, "x" * 1900)):
        body = {FIELD: kwargs, "n": 1}
        assert taken(body, trusted=True) is kwargs and body == {"n": 1}


@pytest.mark.parametrize("kind", [dict, list])
@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 10_000])
def test_depth_has_an_end(kind: type, depth: int) -> None:
    assert "deep at most" in refusal(nested(depth, kind))


@pytest.mark.parametrize(
    "kwargs",
    [
        {"a": "x" * MAX_LENGTH},
        {"a": "\0" * (MAX_LENGTH // 6)},
        {"x" * MAX_LENGTH: 1},
        {"a": [0] * MAX_LENGTH},
        {str(at): None for at in range(MAX_LENGTH)},
        {"a": [{"b": []}] * (MAX_LENGTH // 8)},
        nested(MAX_DEPTH, dict, "x" * MAX_LENGTH),
    ],
)
def test_length_has_an_end(kwargs: Any) -> None:
    assert f"{MAX_LENGTH} characters at most" in refusal(kwargs)


@pytest.mark.parametrize("kwargs", [{"a": ["x" * 10**7]}, {"a": [0] * 10**6}, {"a": [[0] * 10**5] * 10}])
def test_nothing_long_is_written(kwargs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would keep the event loop waiting."""
    monkeypatch.delattr(processor_kwargs.json, "dumps")
    assert "characters at most" in refusal(kwargs)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"use_audio_in_video": True},
        {"videos_kwargs": {"use_audio_in_video": 1}},
        {"a": [{"b": {"use_audio_in_video": "x"}}]},
    ],
)
def test_no_audio_out_of_videos_wherever_it_is_asked_for(kwargs: Any) -> None:
    assert "audio out of a video" in refusal(kwargs)
