"""app.garbage: what is there is left out, and what comes later is collected."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from app import garbage


class Node:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def left_out() -> Iterator[int]:
    """How many objects were."""
    Node()
    before = len(gc.get_objects())
    garbage.leave_out_what_is_there()
    yield before
    gc.unfreeze()


def test_what_is_there_is_not_gone_through(left_out: int) -> None:
    assert len(gc.get_objects()) < left_out / 10
    assert gc.get_freeze_count() > left_out / 2


def test_garbage_of_before_is_collected_first() -> None:
    old = weakref.ref(Node())
    garbage.leave_out_what_is_there()
    gc.unfreeze()
    assert old() is None


@pytest.mark.usefixtures("left_out")
def test_later_cycles_are_collected() -> None:
    later = weakref.ref(Node())
    assert later() is not None
    gc.collect()
    assert later() is None
