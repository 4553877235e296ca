"""app.messages.media: a reference is what it claims to be."""

from typing import Any

import pytest
from pydantic import ValidationError

from app.messages.media import MediaRef
from tests.messages import media_ref

PICTURE = media_ref("0123456789abcdef" * 2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"identity": "../../etc/passwd"},
        {"identity": "0123456789ABCDEF" * 2},
        {"size": 0},
        {"modality": "smell"},
    ],
)
def test_a_reference_is_what_it_claims_to_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        MediaRef.model_validate(PICTURE.model_dump() | wrong)
