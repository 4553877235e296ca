"""langchain's standard tests of a chat model, with ChatOpenAI before our server.

What the tiny model cannot pass is listed with the reason; a test that passes in spite of it fails.
"""

from __future__ import annotations

import base64
from types import SimpleNamespace
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

ARGUMENTS = "wants arguments that only a model gives which understands the question"
NOT_STRICT = "by a tool that is not strict, whose arguments are any JSON where a random model makes them"
UNASKED = "wants a call that nothing forces: the random model makes none"
KEYS = "JSON mode has no schema: which keys there are is the model's own choice"
CANNOT = {
    "test_tool_calling": ARGUMENTS,
    "test_tool_calling_async": ARGUMENTS,
    "test_bind_runnables_as_tools": ARGUMENTS,
    "test_unicode_tool_call_integration": ARGUMENTS,
    "test_tool_calling_with_no_arguments": NOT_STRICT,
    "test_structured_output_pydantic_2_v1": NOT_STRICT,
    "test_agent_loop": UNASKED,
    "test_json_mode": KEYS,
}
#: In the names of tests whose answers are held to a form.
FORMED = ("structured", "tool", "json", "agent")


class TestChatOpenAI(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return self._parameters

    @property
    def supports_image_inputs(self) -> bool:
        return True

    @property
    def supports_image_tool_message(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supported_usage_metadata_details(self) -> dict[Any, Any]:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> Any:
        """The same long prompt a second time."""
        model = self.chat_model_class(**self.chat_model_params)
        prompt = "Tell me a story about the sea and the moon. " * 20
        model.invoke(prompt)
        if not stream:
            return model.invoke(prompt)
        first, *rest = model.stream(prompt)
        return sum(rest, first)

    @pytest.fixture(autouse=True)
    def parameters(
        self, request: pytest.FixtureRequest, server_url: str, model_name: str, short_json: dict[str, int]
    ) -> None:
        name = request.node.originalname
        if reason := CANNOT.get(name):
            request.applymarker(pytest.mark.xfail(reason=reason))
        self._parameters: dict[str, Any] = {
            "model": model_name,
            "base_url": f"{server_url}/v1",
            "api_key": "none",
            "max_retries": 0,
            "timeout": 60,
            "temperature": 0,
            "max_tokens": 40,
            "stream_usage": True,
        }
        if any(word in name for word in FORMED):
            one_call = {"parallel_tool_calls": False}  # or it makes calls until its length is used up
            self._parameters |= {"logit_bias": short_json, "model_kwargs": one_call, "max_tokens": 100}

    @pytest.fixture(autouse=True)
    def local_pictures(self, monkeypatch: pytest.MonkeyPatch, red_png: str) -> None:
        """In place of those that the tests fetch from the web."""
        answer = SimpleNamespace(content=base64.b64decode(red_png))
        monkeypatch.setattr("langchain_tests.integration_tests.chat_models.httpx.get", lambda *_, **__: answer)
