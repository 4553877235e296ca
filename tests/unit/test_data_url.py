"""app.media.data_url."""

import pybase64
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors.media import MediaRefused
from app.media import FRAMES, decode
from app.messages.media import Modality
from tests.pictures import data_url
from tests.videos import frame_list, frames_url

PARAM = "messages[0].content[1].image_url"
FRAMES_LIMIT = 6


def refusal(url: str, limit: int = 1000, modality: Modality = "image") -> str:
    with pytest.raises(MediaRefused) as caught:
        decode(url, modality, limit, FRAMES_LIMIT, PARAM)
    assert caught.value.param == PARAM
    assert caught.value.status == 400
    return caught.value.message


@pytest.mark.parametrize(
    ("modality", "head"),
    [
        ("image", "data:image/png;base64,"),
        ("image", "DATA:IMAGE/PNG;BASE64,"),
        ("image", "data:image/svg+xml;charset=utf-8;base64,"),
        ("image", "data:image/png ; base64,"),
        ("image", "data:application/octet-stream;base64,"),
        ("image", "data:;base64,"),
        ("video", "data:video/mp4;base64,"),
        ("video", 'data:video/webm;codecs="vp8";base64,'),
        ("video", "data:VIDEO/Quicktime;base64,"),
        ("video", "data:;base64,"),
        ("video", "data:application/mp4;base64,"),
        ("audio", "data:audio/mpeg;base64,"),
        ("audio", "data:application/ogg;base64,"),
        ("audio", "data:video/ogg;base64,"),
    ],
)
def test_heads_that_are_taken(modality: Modality, head: str) -> None:
    assert decode(head + "AAEC", modality, 3, FRAMES_LIMIT, PARAM) == (b"\0\1\2", "")


@given(st.binary(min_size=1, max_size=100))
def test_the_bytes_come_back(data: bytes) -> None:
    assert decode(data_url(data), "image", len(data), FRAMES_LIMIT, PARAM) == (data, "")
    assert decode(data_url(data, "video/mp4"), "video", len(data), FRAMES_LIMIT, PARAM) == (data, "")


@given(st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=6))
def test_frames_stay_text(frames: list[bytes]) -> None:
    """As vLLM's loader takes them: what comes after the first comma."""
    total = sum(map(len, frames))
    assert decode(frames_url(frames), "video", total, FRAMES_LIMIT, PARAM) == (frame_list(frames).encode(), FRAMES)
    assert "media.max_item_mb" in refusal(frames_url(frames), total - 1, "video")


BAD_HEADS = [
    ("data:", "no comma"),
    ("data:image/png;base64", "no comma"),
    ("data:" + "x" * 2000 + ",", "no comma"),
    ("data:image/png,secret", "must be base64"),
    ("data:image/png;base65,secret", "must be base64"),
]


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        *BAD_HEADS,
        ("data:text/html;base64,AAEC", "must have an image/ media type"),
        ("data:video/mp4;base64,AAEC", "must have an image/ media type"),
        ("data:video/jpeg;base64,AAEC", "must have an image/ media type"),
        ("data:image/png;base64,secret!", "base64 is not valid"),
        ("data:image/png;base64,AAE", "base64 is not valid"),
        ("data:image/png;base64,AA\nEC", "base64 is not valid"),
        ("data:image/png;base64,AA-_", "base64 is not valid"),
        ("data:image/png;base64,AAEC,AAEC", "base64 is not valid"),
        ("data:image/png;base64,sécret==", "base64 is not valid"),
        ("data:image/png;base64,", "is empty"),
    ],
)
def test_what_is_refused_and_why_without_an_echo(url: str, reason: str) -> None:
    said = refusal(url)
    assert reason in said
    assert "secret" not in said and "passwd" not in said


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        *BAD_HEADS,
        ("data:image/png;base64,AAEC", "must have a video/ media type"),
        ("data:image/jpeg;base64,AAEC,AAEC", "must have a video/ media type"),
        ("data:text/html;base64,AAEC", "must have a video/ media type"),
        ("data:video/mp4;base64,AAEC,AAEC", "base64 is not valid"),
        ("data:video/jpeg;base64,", "is empty"),
        ("data:video/jpeg;base64,AAEC,", "frame 1 (from 0) is empty or not valid"),
        ("data:video/jpeg;base64,,AAEC", "frame 0 (from 0) is empty or not valid"),
        ("data:video/jpeg;base64,AAEC,AAEC,secret!", "frame 2 (from 0) is empty or not valid"),
        ("data:video/jpeg;base64,AAEC, AAEC", "frame 1 (from 0) is empty or not valid"),
    ],
)
def test_what_is_refused_of_a_video(url: str, reason: str) -> None:
    said = refusal(url, modality="video")
    assert reason in said
    assert "secret" not in said and "passwd" not in said


@pytest.mark.parametrize("kind", ["image/png", "video/mp4", "text/html", "application/pdf"])
def test_what_is_refused_of_audio(kind: str) -> None:
    assert refusal(f"data:{kind};base64,AAEC", modality="audio") == "the data: URL must have an audio/ media type"


def test_frames_are_counted_before_any_is_decoded() -> None:
    assert "media.max_video_frames allows (6)" in refusal(frames_url([b"a"] * 7), modality="video")
    assert "media.max_video_frames" in refusal("data:video/jpeg;base64,,,,,,,!", modality="video")


def test_the_size_is_the_decoded_bytes() -> None:
    assert len(decode(data_url(bytes(1000)), "image", 1000, FRAMES_LIMIT, PARAM)[0]) == 1000
    assert refusal(data_url(bytes(1001))) == "larger than media.max_item_mb allows (0.001 MB)"


def test_too_large_is_found_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pybase64, "b64decode", lambda *_, **__: pytest.fail("decoded"))
    refusal(data_url(bytes(2000)))
    refusal(data_url(bytes(2000), "video/jpeg"), modality="video")
