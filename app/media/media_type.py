"""What a medium is declared to be, by whoever sent it. What it is, its bytes say."""

from __future__ import annotations

from app.errors.media import MediaRefused
from app.messages.media import Modality

#: Types that say nothing: the bytes have to.
UNSPOKEN = frozenset({"", "application/octet-stream", "binary/octet-stream"})
#: Types of containers that hold a modality, under another one's name.
CONTAINERS: dict[Modality, frozenset[str]] = {
    "image": frozenset(),
    "video": frozenset({"application/mp4", "application/ogg", "application/x-matroska"}),
    "audio": frozenset({"application/ogg", "video/ogg"}),
}


def check_type(media_type: str, modality: Modality, param: str) -> None:
    """Refuse the type of a data: URL that is declared to be something else. Raises MediaRefused."""
    fits = media_type.startswith(f"{modality}/") or media_type in UNSPOKEN or media_type in CONTAINERS[modality]
    if not fits:
        raise MediaRefused(f"the data: URL must have {_article(modality)} {modality}/ media type", param=param)


def _article(modality: Modality) -> str:
    return "a" if modality == "video" else "an"
