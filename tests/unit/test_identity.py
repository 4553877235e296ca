"""app.media.identity."""

import re

import blake3
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.media import identify
from app.messages.prompts import RenderedItem


def test_the_name_is_stable() -> None:
    """Processes of different releases meet in one Redis, so what is hashed is part of the protocol."""
    parts = (b"video", b"video/jpeg", "mé".encode(), b"salt")
    hashed = b"".join(len(part).to_bytes(4, "big") + part for part in parts) + b"frames"
    name = identify(b"frames", modality="video", media_type="video/jpeg", model="mé", salt="salt")
    assert name == blake3.blake3(hashed).hexdigest()[:32]


def test_the_name_is_one_that_messages_take() -> None:
    name = identify(b"", modality="image", model="m")
    assert re.fullmatch("[0-9a-f]{32}", name)
    RenderedItem(modality="image", identity=name, offset=0, length=1, fields={})


TEXT = st.text(max_size=3)
PARTS = st.tuples(TEXT, TEXT, TEXT, TEXT, st.binary(max_size=3))


def name_of(parts: tuple[str, str, str, str, bytes]) -> str:
    kind, media_type, model, salt, data = parts
    return identify(data, modality=kind, media_type=media_type, model=model, salt=salt)


@given(PARTS, PARTS)
def test_names_are_equal_when_everything_is(
    one: tuple[str, str, str, str, bytes], two: tuple[str, str, str, str, bytes]
) -> None:
    assert (name_of(one) == name_of(two)) == (one == two)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (("image", "", "ab", "", b"c"), ("image", "", "a", "b", b"c")),
        (("image", "", "a", "", b"bc"), ("image", "", "a", "b", b"c")),
        (("imagea", "", "", "", b""), ("image", "a", "", "", b"")),
        (("video", "video/jpeg", "", "", b""), ("video", "", "video/jpeg", "", b"")),
        (("image", "", "m", "tenant", b"x"), ("image", "", "m", "", b"x")),
        (("image", "", "m", "", b"\0\0\0\0x"), ("image", "", "m", "\0\0\0\0x", b"")),
    ],
)
def test_what_moves_from_one_part_to_the_next_changes_the_name(
    one: tuple[str, str, str, str, bytes], two: tuple[str, str, str, str, bytes]
) -> None:
    assert name_of(one) != name_of(two)
