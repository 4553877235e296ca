"""How many log-probabilities of prompt tokens one request may ask for."""

from __future__ import annotations

from app.errors.requests import InvalidRequest

#: vLLM's word for "of every token of the vocabulary".
ALL = -1


def check(wanted: int | None, tokens: int, vocabulary: int, limit: int) -> None:
    """Raise InvalidRequest for more than `limit`: `wanted` (vLLM's `prompt_logprobs`) and the token's own, for each of
    the prompt's `tokens`.

    They travel in one message of some 40 bytes each, and a channel of Redis whose reader has too much to read (32 MB,
    unless told otherwise) is closed: that would interrupt every stream of the API process.
    """
    if wanted is None:
        return
    asked = tokens * ((vocabulary if wanted == ALL else wanted) + 1)
    if asked > limit:
        raise InvalidRequest(
            f"the prompt's {tokens} tokens would have {asked} log-probabilities, more than "
            f"stream.max_prompt_logprobs allows ({limit}): ask for fewer of each token, or about a shorter prompt",
            param="prompt_logprobs",
        )
