"""Adapter to vLLM: its errors in words that a client may read."""

from __future__ import annotations


def clean(error: BaseException) -> str:
    """An error's text, short enough and without addresses of objects.

    Of a processor's error that is the cause's: vLLM's own shows the data.
    """
    from vllm.entrypoints.serve.exception_handling.error_response import sanitize_message

    return str(sanitize_message(str(error.__cause__ or error)))[:500]
