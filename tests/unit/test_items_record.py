"""app.items.record: what is read from Redis is what was written, or an error."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from app.items import ItemRecord
from app.messages.prompts import FieldValue


def record(**more: Any) -> ItemRecord:
    given: dict[str, Any] = {
        "modality": "video",
        "identity": "ab" * 16,
        "target": [7],
        "replacement": [(3, 1), (4, 1024)],
        "embed_runs": [1, 1024],
        "fields": {
            "grid": FieldValue(kind="batched", dtype="int64", shape=[3], data=[1, 2**62, 3]),
            "seconds": FieldValue(kind="batched", data=[0.1, 1e-300, 2.0]),
            "nested": FieldValue(kind="flat", dim=1, data=[{"dtype": "float32", "shape": [1], "data": ["nan"]}, [1]]),
            "flag": FieldValue(kind="shared", data=True),
            "number": FieldValue(kind="shared", data=3),
            "whole": FieldValue(kind="shared", data=3.0),
        },
        "embeds": 1024,
        "width": 128,
        "dtype": "bfloat16",
        "model": "org/model",
        "processor": {"max_pixels": 100},
        "worker": "encode@host",
        "written": 1.5,
    }
    return ItemRecord.model_validate({**given, **more})


def test_it_comes_back_from_json_as_it_was() -> None:
    one = record()
    back = ItemRecord.model_validate_json(one.model_dump_json())
    assert back == one
    for name, value in one.fields.items():
        assert type(back.fields[name].data) is type(value.data), name
        assert json.dumps(back.fields[name].data) == json.dumps(value.data), name


def test_its_json_is_short_where_the_item_is_long() -> None:
    text = record(replacement=[(4, 16384)], embed_runs=None, embeds=16384).model_dump_json()
    assert json.loads(text)["replacement"] == [[4, 16384]]
    assert len(text) < 1500


@pytest.mark.parametrize(
    "wrong",
    [
        {"target": []},
        {"replacement": []},
        {"replacement": [(3, 1, 2)]},
        {"identity": "../../etc/passwd"},
        {"identity": "AB" * 16},
        {"embeds": 0},
        {"width": 0},
        {"modality": "smell"},
        {"surprise": 1},
    ],
)
def test_what_is_no_record_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        record(**wrong)
