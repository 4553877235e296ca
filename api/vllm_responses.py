"""Adapter to vLLM: its responses serving, as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, NoReturn

import orjson
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses

from api.context import current
from app.errors import Failure

#: Events that vLLM makes before it has asked the engine for anything.
EARLY = frozenset({"response.created", "response.in_progress"})


class Responses(OpenAIServingResponses):
    """Answers are stored nowhere: nothing that would have to outlive the request is kept in this process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # An environment that says otherwise is none of ours: nothing here would ever let go what was kept.
        self.enable_store = False

    async def responses_full_generator(self, *args: Any, **kwargs: Any) -> Any:
        answer = await super().responses_full_generator(*args, **kwargs)
        usage, media = getattr(answer, "usage", None), current().media_tokens
        if usage is not None and media:
            # As chat's usage has it.
            usage.input_tokens_details.multimodal_tokens = media
        return answer

    def _convert_generation_error_to_streaming_response(self, error: Exception) -> NoReturn:
        """vLLM would make an event of it that its own event types do not allow."""
        raise error


class Events:
    """The events of one stream. Its first piece has the first event that the model is the cause of."""

    def __init__(self) -> None:
        self._number = 0
        self._response: dict[str, Any] = {}

    async def frames(self, events: AsyncGenerator[Any, None]) -> AsyncGenerator[str, None]:
        early = ""
        try:
            async for event in events:
                text = event.model_dump_json(by_alias=True)
                if event.type == "response.created":
                    self._response = orjson.loads(text)["response"]
                early += _frame(event.type, text)
                self._number += 1
                if event.type not in EARLY:
                    yield early
                    early = ""
        finally:
            await events.aclose()

    def failed(self, failure: Failure) -> str:
        """How a stream ends that cannot go on: the error, and the response as failed."""
        error = {"code": failure.code, "message": failure.message}
        first = {"type": "error", **error, "param": failure.param, "sequence_number": self._number}
        response = {**self._response, "status": "failed", "error": {**error, "code": "server_error"}}
        last = {"type": "response.failed", "sequence_number": self._number + 1, "response": response}
        return "".join(_frame(str(one["type"]), orjson.dumps(one).decode()) for one in (first, last))


def _frame(kind: str, text: str) -> str:
    return f"event: {kind}\ndata: {text}\n\n"
