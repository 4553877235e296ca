"""workers.media_loading: the pixels and frames that vLLM's own chat endpoint would load from the same URLs."""

from __future__ import annotations

import io
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image

from app import tiny_model
from app.errors.media import MediaRefused
from app.media import FRAMES, decode
from app.messages.media import MediaRef, Modality
from app.messages.tensors import Descriptor
from app.settings_media import MediaSettings
from tests import sounds, videos
from tests.pictures import data_url, encoded
from workers import media_loading

pytestmark = pytest.mark.usefixtures("vllm")

PARAM = "messages[0].content[3].x_url"
LIMITS = MediaSettings()


def ref(modality: Modality, media_type: str = "") -> MediaRef:
    source = Descriptor(
        agent="a", host="h", path="/x", address=1, metadata="", name="n", nonce="0" * 16, dtype="uint8", shape=[3],
        nbytes=3, expires_at=1.5,
    )  # fmt: skip
    return MediaRef(modality=modality, identity="a" * 32, size=3, media_type=media_type, param=PARAM, source=source)


def load(url: str, modality: Modality, kwargs: Any = None, limits: MediaSettings = LIMITS) -> Any:
    """As the program does it: the API takes the URL apart, the worker decodes."""
    data, media_type = decode(url, modality, 1 << 30, 1000, PARAM)
    return media_loading.load(ref(modality, media_type), data, kwargs or {}, limits)


def rotated() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    out = io.BytesIO()
    Image.open(io.BytesIO(encoded(size=(32, 16)))).save(out, "JPEG", exif=exif)
    return out.getvalue()


PICTURES = {
    **{f"PNG {mode}": encoded(mode) for mode in ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")},
    "JPEG CMYK": encoded("CMYK", "JPEG"),
    "WEBP": encoded("RGBA", "WEBP"),
    "GIF": encoded("P", "GIF"),
    "rotated by EXIF": rotated(),
}


@pytest.mark.parametrize(
    "kwargs", [{}, {"image": {"image_mode": "L"}}, {"image": {"rgba_background_color": [1, 2, 3]}}]
)
@pytest.mark.parametrize("data", PICTURES.values(), ids=PICTURES.keys())
def test_pictures(data: bytes, kwargs: dict[str, Any]) -> None:
    from vllm.multimodal.media import MediaConnector

    theirs = MediaConnector(media_io_kwargs=kwargs).fetch_image(data_url(data))
    ours = load(data_url(data), "image", kwargs)
    assert isinstance(ours, Image.Image) and ours.mode == theirs.mode
    assert np.array_equal(np.asarray(ours), np.asarray(theirs.media))


PROCESSORS = [None, "Qwen3VLVideoProcessor"]
CLIPS = {
    **{ending: data_url(videos.file(1, 40, ending=ending), "video/x") for ending in videos.CODECS},
    "two frames": data_url(videos.file(1, 2), "video/mp4"),
    "frames": videos.frames_url(videos.jpegs(2, 7)),
    "more frames than are taken": videos.frames_url(videos.jpegs(2, 40)),
}
VIDEO_KWARGS: list[dict[str, Any]] = [
    {},
    {"num_frames": 5},
    {"num_frames": -1},
    {"fps": 1, "num_frames": -1},
    {"fps": 4},
]


def model_config(processor: str | None, kwargs: dict[str, Any], folder: Path) -> Any:
    """What `io_kwargs` and vLLM read of an engine's configuration."""
    from types import SimpleNamespace

    folder.mkdir()
    if processor is not None:
        (folder / "video_preprocessor_config.json").write_text(f'{{"video_processor_type": "{processor}"}}')
    return SimpleNamespace(
        model=str(folder), revision=None, multimodal_config=SimpleNamespace(media_io_kwargs={"video": kwargs})
    )


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("kwargs", VIDEO_KWARGS, ids=str)
@pytest.mark.parametrize("url", CLIPS.values(), ids=CLIPS.keys())
def test_videos(url: str, kwargs: dict[str, Any], processor: str | None, tmp_path: Path) -> None:
    from vllm.multimodal.media import MediaConnector

    theirs = MediaConnector(media_io_kwargs={"video": kwargs}).fetch_video(url, video_processor=processor)
    loaders = media_loading.io_kwargs(model_config(processor, kwargs, tmp_path / "model"))
    assert loaders["video"].get("video_backend") == ("qwen3_vl" if processor else None)
    frames, metadata = load(url, "video", loaders)
    assert frames.dtype == np.uint8 and frames.shape[1:] == (48, 64, 3)
    assert np.array_equal(frames, theirs.media[0])
    assert metadata == theirs.media[1]


SOUNDS = {
    **{ending: sounds.file(ending=ending, rate=48_000) for ending in sounds.CODECS},
    "two channels": sounds.file(channels=2),
    "eight channels": sounds.file(channels=8),
    "8 kHz": sounds.file(rate=8_000),
    "one sample": sounds.file(data=sounds.samples()[:1]),
}


@pytest.mark.parametrize("kwargs", [{}, {"audio": {"audio_backend": "soundfile"}}], ids=str)
@pytest.mark.parametrize("data", SOUNDS.values(), ids=SOUNDS.keys())
def test_sounds(data: bytes, kwargs: dict[str, Any]) -> None:
    from vllm.multimodal.media import MediaConnector

    url = sounds.file_url(data)
    samples, rate = MediaConnector(media_io_kwargs=kwargs).fetch_audio(url)
    ours, its_rate = load(url, "audio", kwargs)
    assert ours.dtype == np.float32 and ours.ndim == 1
    assert its_rate == rate and np.array_equal(ours, samples)


def test_the_loaders_of_a_real_model(tmp_path: Path) -> None:
    """What the flags say, and the model's own way to choose frames beside it."""
    from app import vllm_args

    model = str(tiny_model.build(tmp_path / "tiny"))
    config = vllm_args.parse(model, ["--media-io-kwargs", '{"video": {"num_frames": 9}}']).create_model_config()
    loaders = media_loading.io_kwargs(config)
    assert loaders["video"] == {"num_frames": 9, "video_backend": "qwen3_vl"}
    assert loaders.get("audio", {}) == ({} if find_spec("torchcodec") else {"audio_backend": "soundfile"})
    assert config.multimodal_config.media_io_kwargs == {"video": {"num_frames": 9}}, "left as it is"
    config = vllm_args.parse(model, ["--media-io-kwargs.video.video_backend", "opencv"]).create_model_config()
    assert media_loading.io_kwargs(config)["video"] == {"video_backend": "opencv"}
    config = vllm_args.parse(model, ["--media-io-kwargs.audio.audio_backend", "pyav"]).create_model_config()
    assert media_loading.io_kwargs(config)["audio"] == {"audio_backend": "pyav"}


def refusal(modality: Modality, data: bytes, media_type: str = "", backend: str = "qwen3_vl") -> str:
    with pytest.raises(MediaRefused) as caught:
        media_loading.load(ref(modality, media_type), data, {"video": {"video_backend": backend}}, LIMITS)
    assert caught.value.param == PARAM
    assert not re.search(r"0x[0-9a-f]|/|<", caught.value.message)
    return caught.value.message


BROKEN = [encoded()[:-30], encoded(kind="JPEG")[:200], b"", b"\x89PNG\r\n\x1a\n", b"nothing at all"]


@pytest.mark.parametrize("data", BROKEN, ids=range(len(BROKEN)))
def test_pictures_that_cannot_be_decoded(data: bytes) -> None:
    assert refusal("image", data) == "the image cannot be decoded"


FILE = videos.file(ending=".mp4")
AVI = videos.file(ending=".avi")


def without_frames(avi: bytes) -> bytes:
    """Its header says so, too: dwTotalFrames of the main header and dwLength of the stream's."""
    broken = bytearray(avi[: avi.index(b"movi") + 4])
    for chunk, at in ((b"avih", 16), (b"strh", 32)):
        start = broken.index(chunk) + 8 + at
        broken[start : start + 4] = bytes(4)
    return bytes(broken)


BROKEN_FILES = {
    "nothing": b"",
    "no index": FILE[: len(FILE) // 2],
    "only its type": FILE[:32],
    "zeros behind the type": FILE[:32] + bytes(2000),
    "no frames": without_frames(AVI),
    "webm without a track": videos.file(ending=".webm")[:60],
}


@pytest.mark.parametrize("backend", ["qwen3_vl", "opencv"])
@pytest.mark.parametrize("data", BROKEN_FILES.values(), ids=BROKEN_FILES.keys())
def test_videos_that_cannot_be_decoded(data: bytes, backend: str) -> None:
    assert refusal("video", data, backend=backend) in (
        "the video cannot be decoded",
        "the video has no frame that can be decoded",
    )


@pytest.mark.parametrize("claimed", [1_000_000, 2**31 - 1, 2**32 - 1])
@pytest.mark.timeout(60)
def test_a_header_that_claims_more_frames_costs_no_more(claimed: int) -> None:
    lying = bytearray(AVI)
    for chunk, at in ((b"avih", 16), (b"strh", 32)):
        start = lying.index(chunk) + 8 + at
        lying[start : start + 4] = claimed.to_bytes(4, "little")
    try:
        frames, _ = media_loading.load(ref("video"), bytes(lying), {"video": {"video_backend": "qwen3_vl"}}, LIMITS)
    except MediaRefused:
        return
    assert len(frames) <= 12


def floats(*values: float) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, np.array(values, dtype=np.float32), 16_000, format="WAV", subtype="FLOAT")
    return out.getvalue()


BROKEN_SOUNDS = {
    "nothing": (b"", "the audio cannot be decoded"),
    "no audio": (b"nothing at all", "the audio cannot be decoded"),
    "only its header": (sounds.file()[:20], "the audio cannot be decoded"),
    "a FLAC cut short": (sounds.file(ending=".flac")[:60], "the audio cannot be decoded"),
    "no samples": (sounds.silence(0, ".wav"), "the audio has no samples"),
    "not a number": (floats(0.5, float("nan")), "the audio has samples that are no finite numbers"),
    "infinite": (floats(0.5, float("-inf")), "the audio has samples that are no finite numbers"),
    "too long": (sounds.silence(601, rate=1_000), "the audio cannot be decoded"),
}


@pytest.mark.parametrize("data, message", BROKEN_SOUNDS.values(), ids=BROKEN_SOUNDS.keys())
def test_sounds_that_cannot_be_decoded(data: bytes, message: str) -> None:
    assert refusal("audio", data) == message


def test_sounds_as_loud_as_floats_may_be_are_finite() -> None:
    samples, _ = media_loading.load(ref("audio"), floats(3e38, -3e38), {}, LIMITS)
    assert np.isfinite(samples).all()


def frame_text(*frames: bytes) -> bytes:
    return videos.frame_list(list(frames)).encode()


@pytest.mark.parametrize(
    "data",
    [
        frame_text(*videos.jpegs(number=2), *videos.jpegs(number=1, size=(32, 32))),
        frame_text(*videos.jpegs(number=1), videos.jpegs(number=1)[0][:300]),
        frame_text(b"no picture"),
        b"not base64!",
        b"",
    ],
    ids=["two sizes", "cut short", "no picture", "no base64", "nothing"],
)
def test_frames_that_cannot_be_decoded(data: bytes) -> None:
    assert refusal("video", data, FRAMES) == "the video cannot be decoded"


def test_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    refusal("video", b"nothing")
    assert "video " + "a" * 32 in caplog.text and PARAM in caplog.text and "ValueError" in caplog.text


@pytest.mark.parametrize("modality", ["image", "video"])
def test_flags_that_are_wrong_are_not_the_clients_fault(modality: Modality) -> None:
    with pytest.raises(ValueError, match="rgba_background_color"):
        media_loading.load(ref(modality), encoded(), {"image": {"rgba_background_color": "red"}}, LIMITS)


BACKENDS = ["opencv", "qwen3_vl", "qwen2_vl"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ending", [".mp4", ".webm"])
def test_a_video_that_would_take_too_much_memory_is_not_decoded(
    backend: str, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the loader chooses counts, not what the file has."""
    url = data_url(videos.file(number=40, ending=ending), "video/mp4")
    kwargs = {"video": {"video_backend": backend, "num_frames": 8, "fps": 2}}
    frames, _ = load(url, "video", kwargs)
    count, height, width, _ = frames.shape
    assert count < 40
    exact = MediaSettings(max_video_pixels=count * height * width)
    assert np.array_equal(load(url, "video", kwargs, exact)[0], frames)
    from vllm.multimodal.video import VideoLoader

    monkeypatch.setattr(VideoLoader, "read_frames", lambda *_, **__: pytest.fail("decoded"))
    with pytest.raises(MediaRefused, match=r"media\.max_video_pixels allows") as caught:
        load(url, "video", kwargs, MediaSettings(max_video_pixels=count * height * width - 1))
    assert caught.value.param == PARAM
    with pytest.raises(MediaRefused, match=r"media\.max_video_seconds allows \(4\.9 s\)"):
        load(url, "video", kwargs, MediaSettings(max_video_seconds=4.9))


@pytest.mark.parametrize("backend", BACKENDS)
def test_frames_that_the_model_skips_count_too(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are decoded, up to the last one that it takes."""
    url = data_url(videos.file(number=40), "video/mp4")
    kwargs = {"video": {"video_backend": backend, "num_frames": 8, "fps": 2}}
    frames, _ = load(url, "video", kwargs, MediaSettings(max_video_decoded_pixels=40 * 64 * 48))
    assert len(frames) < 40
    from vllm.multimodal.video import VideoLoader

    monkeypatch.setattr(VideoLoader, "read_frames", lambda *_, **__: pytest.fail("decoded"))
    with pytest.raises(MediaRefused, match=r"media\.max_video_decoded_pixels allows \(122879\)") as caught:
        load(url, "video", kwargs, MediaSettings(max_video_decoded_pixels=40 * 64 * 48 - 1))
    assert caught.value.param == PARAM
    with pytest.raises(MediaRefused, match="more than 240 frames a second"):
        load(data_url(videos.file(number=40, rate=1000), "video/mp4"), "video", kwargs)


@pytest.mark.parametrize("rate", [30, 240])
def test_rates_of_cameras(rate: int) -> None:
    kwargs = {"video": {"video_backend": "qwen3_vl"}}
    assert len(load(data_url(videos.file(number=240, rate=rate), "video/mp4"), "video", kwargs)[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_video_of_one_frame_is_what_vllm_makes_of_it(backend: str) -> None:
    """Its loaders find no frame in one, or fail: then it is the client's fault, and no crash."""
    from vllm.multimodal.video import VIDEO_LOADER_REGISTRY

    file = videos.file(number=1)
    try:
        theirs = VIDEO_LOADER_REGISTRY.load(backend).load_bytes(file, num_frames=32)[0]
    except ZeroDivisionError:
        theirs = []
    if len(theirs):
        assert np.array_equal(load(videos.file_url(file), "video", {"video": {"video_backend": backend}})[0], theirs)
        return
    with pytest.raises(MediaRefused) as caught:
        load(videos.file_url(file), "video", {"video": {"video_backend": backend}})
    assert (caught.value.status, caught.value.param) == (400, PARAM)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_the_first_of_many_frames_is_the_picture(kind: str) -> None:
    out = io.BytesIO()
    shades = [Image.new("RGB", (4, 4), (at % 256, at // 256, 9)) for at in range(300)]
    shades[0].save(out, kind, save_all=True, append_images=shades[1:], **({"lossless": True} if kind == "WEBP" else {}))
    assert Image.open(io.BytesIO(out.getvalue())).n_frames == 300
    assert np.array_equal(np.asarray(load(data_url(out.getvalue()), "image")), np.asarray(shades[0]))
