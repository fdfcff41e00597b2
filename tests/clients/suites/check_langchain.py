"""LangChain's standard tests of a chat model, unchanged. Those that ask for an understanding
which the embedded model, of a million parameters, has not are expected to fail."""

import os
from typing import Any

import httpx
import pytest
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

BASE_URL = os.environ["OPENAI_BASE_URL"]
too_small = pytest.mark.xfail(reason="Such a small model does not copy values into arguments.")


def towards_ends(bias: float = 8) -> dict[str, float]:
    """Within JSON a model that knows no JSON ends no string and no number, unless it is led to."""
    url = BASE_URL.removesuffix("/v1") + "/tokenize"
    found = [httpx.post(url, json={"prompt": mark}).json()["tokens"] for mark in ('"', "}", "]")]
    return {str(tokens[-1]): bias for tokens in found}


class TestChatModel(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": "tiny-chat",
            "base_url": BASE_URL,
            "max_tokens": 300,
            "temperature": 0,
            "stream_usage": True,
            "logit_bias": towards_ends(),
        }

    @too_small
    def test_tool_calling(self, model: BaseChatModel) -> None:
        super().test_tool_calling(model)

    @too_small
    async def test_tool_calling_async(self, model: BaseChatModel) -> None:
        await super().test_tool_calling_async(model)

    @too_small
    def test_bind_runnables_as_tools(self, model: BaseChatModel) -> None:
        super().test_bind_runnables_as_tools(model)

    @too_small
    def test_agent_loop(self, model: BaseChatModel) -> None:
        super().test_agent_loop(model)

    @too_small
    def test_unicode_tool_call_integration(
        self,
        model: BaseChatModel,
        *,
        tool_choice: str | None = None,  # noqa: PT028
        force_tool_call: bool = True,  # noqa: PT028
    ) -> None:
        super().test_unicode_tool_call_integration(
            model, tool_choice=tool_choice, force_tool_call=force_tool_call
        )
