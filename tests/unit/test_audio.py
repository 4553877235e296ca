"""app.media.audio."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors.media import MediaRefused
from app.media.audio import check_audio
from app.settings_media import MediaSettings
from tests import sounds, videos
from tests.pictures import encoded

PARAM = "messages[0].content[0].input_audio"


def refusal(data: bytes, **limits: float) -> str:
    with pytest.raises(MediaRefused) as caught:
        check_audio(data, MediaSettings(**limits), PARAM)
    assert caught.value.param == PARAM and caught.value.status == 400
    assert "0x" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("ending", sounds.CODECS)
@pytest.mark.parametrize("channels", [1, 2])
def test_every_format(ending: str, channels: int) -> None:
    check_audio(sounds.file(ending=ending, channels=channels), MediaSettings(), PARAM)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"RIFF",
        b"<html>no such file</html>",
        b"ID3",
        sounds.file()[:20],
        sounds.file(ending=".flac")[:10],
        encoded(),
        videos.file(),
        b"RIFF\0\0\0\0AVI ",
    ],
    ids=lambda data: repr(data[:12]),
)
def test_what_is_no_audio(data: bytes) -> None:
    assert refusal(data) == "not audio in a known format (WAV, MP3, FLAC, OGG)"


@given(st.binary(max_size=60))
def test_other_bytes_are_refused(data: bytes) -> None:
    assert len(refusal(data)) < 200


@pytest.mark.parametrize("ending", sounds.CODECS)
def test_too_long_by_the_header(ending: str) -> None:
    check_audio(sounds.file(ending=ending, seconds=0.4), MediaSettings(max_audio_seconds=0.5), PARAM)
    said = refusal(sounds.file(ending=ending, seconds=0.7), max_audio_seconds=0.5)
    assert said == "longer than media.max_audio_seconds allows (0.5 s)"


@pytest.mark.parametrize("ending", [".flac", ".opus", ".mp3"])
def test_half_an_hour_of_silence_is_too_long_however_small_its_file(ending: str) -> None:
    data = sounds.silence(1800, ending)
    assert len(data) < 2_000_000
    assert "media.max_audio_seconds allows (600 s)" in refusal(data)


def test_what_decodes_to_too_much_memory() -> None:
    """Few seconds can be many bytes: eight channels at a high rate."""
    data = sounds.silence(20, rate=192_000, channels=8)
    assert len(data) < 100_000
    said = refusal(data, max_audio_decoded_mb=100)
    assert said == "decoded, larger than media.max_audio_decoded_mb allows (100 MB)"
    check_audio(data, MediaSettings(max_audio_decoded_mb=123), PARAM)


def test_a_header_that_tells_no_length() -> None:
    data = bytearray(sounds.file(ending=".flac"))
    data[21] &= 0xF0
    data[22:26] = bytes(4)
    assert refusal(bytes(data)) == "the audio's header does not tell its length"


def test_a_header_that_lies_counts_as_it_is() -> None:
    data = bytearray(sounds.file(ending=".flac"))
    data[21] |= 0x0F
    data[22:26] = b"\xff" * 4
    assert "media.max_audio_seconds" in refusal(bytes(data))


@pytest.mark.parametrize("rate", [1, 999, 400_000, 2**31 - 1])
def test_rates_that_nobody_records_at(rate: int) -> None:
    data = bytearray(sounds.file())
    data[24:28] = struct.pack("<I", rate)
    assert "sample rate is not between 1000 and 384000 Hz" in refusal(bytes(data))


def test_a_header_without_an_end_is_left() -> None:
    sound = sounds.file()
    for number, taken in ((100, True), (50_000, False)):
        data = sound[:12] + (b"JUNK" + bytes(4)) * number + sound[12:]
        data = data[:4] + struct.pack("<I", len(data) - 8) + data[8:]
        if taken:
            check_audio(data, MediaSettings(), PARAM)
        else:
            assert refusal(data) == "the audio's header has too many parts"


def test_no_samples() -> None:
    assert refusal(sounds.silence(0, ".wav")) == "the audio has no samples"
