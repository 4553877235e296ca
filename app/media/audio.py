"""Refusing what is not audio, or too much of it, before a worker sees it."""

from __future__ import annotations

from app.errors.media import MediaRefused
from app.media.header_view import HeaderView
from app.settings_media import MediaSettings

#: libsndfile's names, by which workers read audio too, and what clients call them.
FORMATS = {"WAV": "WAV", "WAVEX": "WAV", "RF64": "WAV", "MP3": "MP3", "FLAC": "FLAC", "OGG": "OGG"}
#: Hertz. Resampling from or to an absurd rate takes absurd memory.
LOWEST_RATE, HIGHEST_RATE = 1_000, 384_000
#: Workers decode to 32-bit floats.
SAMPLE_BYTES = 4
#: What libsndfile says of a stream whose header does not tell its length.
UNKNOWN = 2**63 - 1


def check_audio(data: bytes, limits: MediaSettings, param: str) -> None:
    """Look at the header; nothing is decoded. Raises MediaRefused.

    The header's length counts: a worker decodes so many samples of each channel and no more.
    """
    frames, rate, channels = _header(data, param)
    if not LOWEST_RATE <= rate <= HIGHEST_RATE:
        raise MediaRefused(f"the audio's sample rate is not between {LOWEST_RATE} and {HIGHEST_RATE} Hz", param=param)
    if frames < 1 or channels < 1:
        raise MediaRefused("the audio has no samples", param=param)
    if frames >= UNKNOWN:
        raise MediaRefused("the audio's header does not tell its length", param=param)
    if frames > limits.max_audio_seconds * rate:
        allowed = limits.max_audio_seconds
        raise MediaRefused(f"longer than media.max_audio_seconds allows ({allowed:g} s)", param=param)
    if frames * channels * SAMPLE_BYTES > limits.max_audio_decoded_mb * 1e6:
        allowed = limits.max_audio_decoded_mb
        raise MediaRefused(f"decoded, larger than media.max_audio_decoded_mb allows ({allowed:g} MB)", param=param)


def _header(data: bytes, param: str) -> tuple[int, int, int]:
    """(samples of a channel, samples a second, channels)."""
    import soundfile

    header = HeaderView(data)
    try:
        with soundfile.SoundFile(header) as file:
            known = file.format in FORMATS
            found = int(file.frames), int(file.samplerate), int(file.channels)
    except Exception:
        # Whatever a broken header makes libsndfile raise. Its own message holds an object's address; it stays here.
        known = False
    if header.spent:
        raise MediaRefused("the audio's header has too many parts", param=param)
    if not known:
        names = ", ".join(dict.fromkeys(FORMATS.values()))
        raise MediaRefused(f"not audio in a known format ({names})", param=param)
    return found
