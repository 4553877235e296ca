"""Adapter to vLLM: media bytes -> what its processor takes, decoded by vLLM's own loaders, so that pixels are equal."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np

from app.errors.media import MediaRefused
from app.media import FRAMES
from app.messages.media import MediaRef
from app.settings_media import MediaSettings
from workers.video_limits import bounded

log = logging.getLogger(__name__)

#: `--media-io-kwargs`: a loader's keyword arguments, by modality.
IoKwargs = Mapping[str, Mapping[str, Any]]


def io_kwargs(model_config: Any) -> dict[str, dict[str, Any]]:
    """The loaders' arguments for an engine (its `model_config`): its `--media-io-kwargs`, and how the model's own video
    processor wants frames to be chosen, which vLLM's chat endpoint adds in the same way.

    Audio is read by libsndfile where there is nothing else: vLLM would come to that too, with a warning every time."""
    from vllm.multimodal.video import get_video_loader_backend_for_processor
    from vllm.transformers_utils.processor import get_video_processor_cls_name

    multimodal = model_config.multimodal_config
    given = (multimodal.media_io_kwargs if multimodal is not None else None) or {}
    kwargs = {modality: dict(values) for modality, values in given.items()}
    backend = get_video_loader_backend_for_processor(get_video_processor_cls_name(model_config))
    if backend:
        kwargs.setdefault("video", {}).setdefault("video_backend", backend)
    if find_spec("torchcodec") is None and find_spec("av") is None:
        kwargs.setdefault("audio", {}).setdefault("audio_backend", "soundfile")
    return kwargs


def load(ref: MediaRef, data: bytes, media_io_kwargs: IoKwargs, limits: MediaSettings) -> Any:
    """One item of vLLM's `multi_modal_data`: a PIL image, (frames, metadata) of a video, frames in (N, H, W, RGB), or
    (samples, rate) of an audio: float32 of its own rate in hertz, the channels' mean.

    Blocks while it decodes: call it in a thread. `media_io_kwargs` come from `io_kwargs`. Raises MediaRefused, which
    names the part of the request and says nothing of the server.
    """
    reader = _reader(ref, media_io_kwargs)
    try:
        if ref.media_type == FRAMES:
            loaded = reader.load_base64(FRAMES, data.decode("ascii"))
        else:
            if ref.modality == "video":
                reader.video_loader = bounded(reader.video_loader, data, limits, ref.param)
            loaded = reader.load_bytes(data)
    except MediaRefused:
        raise
    except Exception as error:
        # Whatever broken bytes make a decoder raise, lack of memory for a size that a header claims included.
        log.warning(
            "%s %s (%s) cannot be decoded: %s: %s", ref.modality, ref.identity, ref.param, type(error).__name__, error
        )
        raise MediaRefused(f"the {ref.modality} cannot be decoded", param=ref.param) from error
    if ref.modality == "audio":
        _check_sound(loaded[0], ref.param)
        return loaded
    if ref.modality == "video" and not len(loaded.media[0]):
        raise MediaRefused("the video has no frame that can be decoded", param=ref.param)
    return loaded.media


def _check_sound(samples: Any, param: str) -> None:
    if not samples.size:
        raise MediaRefused("the audio has no samples", param=param)
    if not np.isfinite(samples).all():  # files of floats may have any, and they would make the model's numbers such
        raise MediaRefused("the audio has samples that are no finite numbers", param=param)


def _reader(ref: MediaRef, media_io_kwargs: IoKwargs) -> Any:
    from vllm.multimodal.media.audio import AudioMediaIO
    from vllm.multimodal.media.image import ImageMediaIO
    from vllm.multimodal.media.video import VideoMediaIO

    if ref.modality == "audio":
        return AudioMediaIO(**media_io_kwargs.get("audio", {}))
    image = ImageMediaIO(**{"image_mode": "RGB", **media_io_kwargs.get("image", {})})
    if ref.modality == "image":
        return image
    return VideoMediaIO(image, **media_io_kwargs.get("video", {}))
