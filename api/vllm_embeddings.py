"""Adapter to vLLM: its embeddings serving."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi.responses import JSONResponse
from vllm.entrypoints.pooling.embed.serving import ServingEmbedding
from vllm.renderers.chat_utils import ChatTemplateConfig


class ORJSONResponse(JSONResponse):
    """JSON, numpy's arrays included: by this name vLLM knows that it need not make lists of them. FastAPI's own class
    of the name warns that it will go."""

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


class Embeddings(ServingEmbedding):
    """Vectors of the inputs of one request. Called with a request, it answers Starlette's response."""

    def __init__(self, client: Any, models: Any) -> None:
        super().__init__(client, models, request_logger=None, chat_template_config=ChatTemplateConfig())
        self.json_response_cls = ORJSONResponse
