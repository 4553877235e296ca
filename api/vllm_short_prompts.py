"""Adapter to vLLM: short prompts are rendered where they are asked for, and not in a thread.

vLLM hands a prompt to its thread twice, for the chat template and for the tokenizer. With 130 tokens that took 500
microseconds of CPU, 200 of which were work: the rest is the way there and back, and the two threads' wait for Python's
lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from vllm.renderers.hf import HfRenderer, safe_apply_chat_template
from vllm.tokenizers.hf import ThreadSafeHFTokenizerMixin

#: Characters. So many take the event loop about 0.4 ms.
SHORT = 1024
#: Those of one turn of the event loop: all prompts of a completion come in the same one, and may be a hundred.
TURN = 8 * SHORT
#: A shorter prompt takes as long as so many.
LEAST = SHORT // 4


def install(renderer: Any) -> None:
    """Of renderers whose tokenizer may be used in two threads at once, as vLLM's thread goes on with what is long."""
    if not isinstance(renderer.tokenizer, ThreadSafeHFTokenizerMixin):
        return
    turn = _Turn()
    renderer._tokenize_prompt_async = _here_if(
        turn, _length_of_text, renderer._tokenize_prompt, renderer._tokenize_prompt_async
    )
    if isinstance(renderer, HfRenderer):
        renderer._apply_chat_template_async = _here_if(
            turn, _length_of_talk, safe_apply_chat_template, renderer._apply_chat_template_async
        )


class _Turn:
    """What is left for prompts of this turn of the event loop."""

    def __init__(self) -> None:
        self._left = TURN

    def takes(self, length: int | None) -> bool:
        if length is None or length > min(SHORT, self._left):
            return False
        if self._left == TURN:
            asyncio.get_running_loop().call_soon(self._renew)
        self._left -= max(length, LEAST)
        return True

    def _renew(self) -> None:
        self._left = TURN


def _here_if(
    turn: _Turn,
    length: Callable[..., int | None],
    work: Callable[..., Any],
    elsewhere: Callable[..., asyncio.Future[Any]],
) -> Callable[..., asyncio.Future[Any]]:
    def chosen(*arguments: Any, **named: Any) -> asyncio.Future[Any]:
        if not turn.takes(length(*arguments, **named)):
            return elsewhere(*arguments, **named)
        done = asyncio.get_running_loop().create_future()
        done.set_result(work(*arguments, **named))
        return done

    return chosen


def _length_of_text(prompt: Any, _params: Any) -> int:
    return len(prompt["prompt"])


def _length_of_talk(
    _model_config: Any, _tokenizer: Any, conversation: list[dict[str, Any]], **given: Any
) -> int | None:
    """None if there may be much for a template to go through: tools, documents, calls, many messages."""
    length = 0
    for leaf in _leaves(conversation, given):
        if isinstance(leaf, str):
            length += len(leaf)
        elif leaf is not None and not isinstance(leaf, int | float):
            return None
        if length > SHORT:
            return None
    return length


def _leaves(conversation: list[dict[str, Any]], given: dict[str, Any]) -> Iterator[Any]:
    yield from given.values()
    for message in conversation:
        for name, value in message.items():
            if name == "content" and isinstance(value, list):
                for part in value:
                    yield from part.values()
            else:
                yield value
