"""app.media.video."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors.media import MediaRefused
from app.media import FRAMES, check_video
from app.settings_media import MediaSettings
from tests import videos
from tests.pictures import encoded

PARAM = "messages[0].content[0].video_url"


def refusal(data: bytes, media_type: str = "", **limits: int) -> str:
    with pytest.raises(MediaRefused) as caught:
        check_video(data, media_type, MediaSettings(**limits), PARAM)
    assert caught.value.param == PARAM and caught.value.status == 400
    return caught.value.message


@pytest.mark.parametrize("ending", videos.CODECS)
def test_every_container(ending: str) -> None:
    check_video(videos.file(ending=ending), "", MediaSettings(), PARAM)


@pytest.mark.parametrize("box", [b"ftypqt  ", b"moov", b"mdat", b"wide"])
def test_quicktime_old_and_new(box: bytes) -> None:
    check_video(b"\0\0\0\x20" + box + bytes(24), "", MediaSettings(), PARAM)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0",
        b"\0\0\0\x20",
        b"not a video at all",
        b"#EXTM3U\n#EXTINF:10,\nfile:///etc/passwd\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        b"<html>",
        b"RIFF\0\0\0\0WAVEfmt ",
        b"RIFF\0\0\0\0WEBPVP8 ",
        encoded(),
        encoded(kind="JPEG"),
        encoded(kind="GIF"),
    ],
    ids=lambda data: repr(data[:12]),
)
def test_what_is_no_video_of_a_known_format(data: bytes) -> None:
    assert "not a video in a known format (MP4, MOV, WebM, MKV, AVI; or frames" in refusal(data)


@given(st.binary(max_size=40))
def test_other_bytes_are_refused_or_have_a_known_beginning(data: bytes) -> None:
    try:
        check_video(data, "", MediaSettings(), PARAM)
    except MediaRefused as refused:
        assert len(refused.message) < 200
    else:
        assert data[4:8].isalpha() or data[:4] in (b"\x1a\x45\xdf\xa3", b"RIFF")


def frame_list(*frames: bytes) -> bytes:
    return videos.frame_list(list(frames)).encode()


def test_frames_up_to_the_limit() -> None:
    frames = videos.jpegs(number=4)
    check_video(frame_list(*frames), FRAMES, MediaSettings(max_video_frames=4), PARAM)
    assert "media.max_video_frames allows (3)" in refusal(frame_list(*frames), FRAMES, max_video_frames=3)


def test_too_many_frames_are_found_before_any_is_decoded() -> None:
    assert "media.max_video_frames" in refusal(b"!,!,!", FRAMES, max_video_frames=2)


@pytest.mark.parametrize(("kind", "said"), [("PNG", "in a known format (JPEG)"), ("GIF", "in a known format (JPEG)")])
def test_every_frame_is_a_jpeg(kind: str, said: str) -> None:
    refused = refusal(frame_list(*videos.jpegs(number=2), encoded(kind=kind)), FRAMES)
    assert refused.startswith("frame 2 (from 0): ") and said in refused


def test_every_frame_has_the_pixels_that_an_image_may_have() -> None:
    frames = [*videos.jpegs(number=1), encoded(kind="JPEG", size=(100, 100))]
    check_video(frame_list(*frames), FRAMES, MediaSettings(max_image_pixels=10_000), PARAM)
    said = refusal(frame_list(*frames), FRAMES, max_image_pixels=9_999)
    assert said == "frame 1 (from 0): the image has more pixels than media.max_image_pixels allows (9999)"
