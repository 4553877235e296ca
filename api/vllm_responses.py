"""Adapter to vLLM: its responses serving, as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, NoReturn

import orjson
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses

from api.context import current
from app.errors.base import Failure

Response = dict[str, Any]

#: Events that vLLM makes before it has asked the engine for anything.
EARLY = frozenset({"response.created", "response.in_progress"})
#: The one that it makes last.
LAST = "response.completed"


class Responses(OpenAIServingResponses):
    """Answers are not stored by vLLM, in this process: `api.stored` keeps them where all API processes find them."""

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
    """The events of one stream. Its first piece has the first event that the model is the cause of.

    `told` and `ended` may say more in the responses that events have in them: the first ones, and the last.
    """

    def __init__(
        self,
        told: Callable[[Response], Response] | None = None,
        ended: Callable[[Response], Awaitable[Response]] | None = None,
    ) -> None:
        self._told = told
        self._ended = ended
        self._number = 0
        self._response: Response = {}

    async def frames(self, events: AsyncGenerator[Any, None]) -> AsyncGenerator[str, None]:
        early = ""
        try:
            async for event in events:
                early += _frame(event.type, await self._text(event))
                self._number += 1
                if event.type not in EARLY:
                    yield early
                    early = ""
        finally:
            await events.aclose()

    async def _text(self, event: Any) -> str:
        text = str(event.model_dump_json(by_alias=True))
        if event.type not in EARLY and (event.type != LAST or self._ended is None):
            return text
        said = orjson.loads(text)
        if event.type == LAST:
            assert self._ended is not None
            said["response"] = await self._ended(said["response"])
        elif self._told is not None:
            said["response"] = self._told(said["response"])
        if event.type == "response.created":
            self._response = said["response"]
        return orjson.dumps(said).decode()

    def failed(self, failure: Failure) -> str:
        """How a stream ends that cannot go on: the error, and the response as failed."""
        error = {"code": failure.code, "message": failure.message}
        first = {"type": "error", **error, "param": failure.param, "sequence_number": self._number}
        response = {**self._response, "status": "failed", "error": {**error, "code": "server_error"}}
        if "store" in response:
            response["store"] = False
        last = {"type": "response.failed", "sequence_number": self._number + 1, "response": response}
        return "".join(_frame(str(one["type"]), orjson.dumps(one).decode()) for one in (first, last))


async def states(events: AsyncGenerator[Any, None]) -> AsyncGenerator[Response, None]:
    """The response as it is before the engine is asked, when the model has begun, and at its end."""
    created: Response = {}
    begun = False
    try:
        async for event in events:
            if event.type == "response.created":
                created = orjson.loads(event.model_dump_json(by_alias=True))["response"]
                yield created
            elif event.type == LAST:
                yield orjson.loads(event.model_dump_json(by_alias=True))["response"]
            elif event.type not in EARLY and not begun:
                begun = True
                yield created
    finally:
        await events.aclose()


def _frame(kind: str, text: str) -> str:
    return f"event: {kind}\ndata: {text}\n\n"
