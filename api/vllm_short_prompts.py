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


def install(renderer: Any) -> None:
    """Of renderers whose tokenizer may be used in two threads at once, as vLLM's thread goes on with what is long."""
    if not isinstance(renderer.tokenizer, ThreadSafeHFTokenizerMixin):
        return
    renderer._tokenize_prompt_async = _here_if(
        _is_short_text, renderer._tokenize_prompt, renderer._tokenize_prompt_async
    )
    if isinstance(renderer, HfRenderer):
        renderer._apply_chat_template_async = _here_if(
            _is_short_talk, safe_apply_chat_template, renderer._apply_chat_template_async
        )


def _here_if(
    is_short: Callable[..., bool], work: Callable[..., Any], elsewhere: Callable[..., asyncio.Future[Any]]
) -> Callable[..., asyncio.Future[Any]]:
    def chosen(*arguments: Any, **named: Any) -> asyncio.Future[Any]:
        if not is_short(*arguments, **named):
            return elsewhere(*arguments, **named)
        done = asyncio.get_running_loop().create_future()
        done.set_result(work(*arguments, **named))
        return done

    return chosen


def _is_short_text(prompt: Any, _params: Any) -> bool:
    return len(prompt["prompt"]) <= SHORT


def _is_short_talk(_model_config: Any, _tokenizer: Any, conversation: list[dict[str, Any]], **given: Any) -> bool:
    """Whether there is little for a template to go through: no tools, no documents and no calls either."""
    left = SHORT
    for leaf in _leaves(conversation, given):
        if isinstance(leaf, str):
            left -= len(leaf)
        elif leaf is not None and not isinstance(leaf, int | float):
            return False
        if left < 0:
            return False
    return True


def _leaves(conversation: list[dict[str, Any]], given: dict[str, Any]) -> Iterator[Any]:
    yield from given.values()
    for message in conversation:
        for name, value in message.items():
            if name == "content" and isinstance(value, list):
                for part in value:
                    yield from part.values()
            else:
                yield value
