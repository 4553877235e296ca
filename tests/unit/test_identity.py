"""app.media.identity."""

import re

import blake3
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.media import identify
from app.messages import MediaRef


def test_the_name_is_stable() -> None:
    """Processes of different releases meet in one Redis, so what is hashed is part of the protocol."""
    hashed = b"".join(len(part).to_bytes(4, "big") + part for part in (b"image", "mé".encode(), b"salt")) + b"picture"
    assert identify(b"picture", modality="image", model="mé", salt="salt") == blake3.blake3(hashed).hexdigest()[:32]


def test_the_name_is_one_that_messages_take() -> None:
    name = identify(b"", modality="image", model="m")
    assert re.fullmatch("[0-9a-f]{32}", name)
    MediaRef(modality="image", identity=name, size=1)


PARTS = st.tuples(st.text(max_size=3), st.text(max_size=3), st.text(max_size=3), st.binary(max_size=3))


@given(PARTS, PARTS)
def test_names_are_equal_when_everything_is(one: tuple[str, str, str, bytes], two: tuple[str, str, str, bytes]) -> None:
    first, second = (identify(data, modality=kind, model=model, salt=salt) for kind, model, salt, data in (one, two))
    assert (first == second) == (one == two)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (("image", "ab", "", b"c"), ("image", "a", "b", b"c")),
        (("image", "a", "", b"bc"), ("image", "a", "b", b"c")),
        (("imagea", "", "", b""), ("image", "a", "", b"")),
        (("image", "m", "tenant", b"x"), ("image", "m", "", b"x")),
        (("image", "m", "", b"\0\0\0\0x"), ("image", "m", "\0\0\0\0x", b"")),
    ],
)
def test_what_moves_from_one_part_to_the_next_changes_the_name(
    one: tuple[str, str, str, bytes], two: tuple[str, str, str, bytes]
) -> None:
    first, second = (identify(data, modality=kind, model=model, salt=salt) for kind, model, salt, data in (one, two))
    assert first != second
