"""app.messages.prompts: a prompt has tokens."""

import pytest
from pydantic import ValidationError

from app.messages.prompts import Prompt


def test_an_empty_prompt_is_none() -> None:
    with pytest.raises(ValidationError):
        Prompt(token_ids=[])
