"""How many choices one request may ask for."""

from __future__ import annotations

from typing import Any

from app.errors.requests import InvalidRequest

#: Each is a request of its own to the workers. OpenAI's limit of `n`.
MAX_CHOICES = 128


def prompts(prompt: Any) -> int:
    """The number of prompts in a completion's `prompt`: text, token ids, or a list of either."""
    several = isinstance(prompt, list) and not all(isinstance(one, int) for one in prompt)
    return len(prompt) if several else 1


def checked(request: Any) -> Any:
    """vLLM's request of a chat or a completion, as it is. Raises InvalidRequest for more choices than are served."""
    if request.use_beam_search:
        raise InvalidRequest("beam search is not supported", param="use_beam_search")
    asked = prompts(getattr(request, "prompt", None))
    n = request.n or 1
    if n * asked > MAX_CHOICES:
        of = f", of {asked} prompts each" if asked > 1 else ""
        raise InvalidRequest(f"more than {MAX_CHOICES} choices in one request: n is {n}{of}", param="n")
    return request
