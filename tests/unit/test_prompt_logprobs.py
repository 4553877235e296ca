"""workers.prompt_logprobs: what one answer may say of its prompt."""

import pytest

from app.errors.requests import InvalidRequest
from workers import prompt_logprobs


@pytest.mark.parametrize(("wanted", "tokens"), [(None, 10**9), (0, 100), (1, 50), (4, 20), (prompt_logprobs.ALL, 9)])
def test_as_many_as_the_limit(wanted: int | None, tokens: int) -> None:
    prompt_logprobs.check(wanted, tokens, vocabulary=10, limit=100)


@pytest.mark.parametrize(("wanted", "tokens"), [(0, 101), (1, 51), (4, 21), (prompt_logprobs.ALL, 10)])
def test_more_are_refused_with_the_limits_name(wanted: int, tokens: int) -> None:
    with pytest.raises(InvalidRequest, match=r"stream\.max_prompt_logprobs allows \(100\)") as refused:
        prompt_logprobs.check(wanted, tokens, vocabulary=10, limit=100)
    assert refused.value.param == "prompt_logprobs"
