"""LangChain's standard tests of a chat model, unchanged. conftest.py names those that need more
understanding than the embedded model has with its million parameters."""

import os
from typing import Any

import httpx
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

BASE_URL = os.environ["OPENAI_BASE_URL"]


def biased(**marks: float) -> dict[str, float]:
    """A model that knows no JSON ends no string and no number in it unless a bias leads it to."""
    url = BASE_URL.removesuffix("/v1") + "/tokenize"
    named = {"quote": '"', "brace": "}", "bracket": "]"}
    tokenized = {name: httpx.post(url, json={"prompt": named[name]}).json() for name in marks}
    return {str(tokenized[name]["tokens"][-1]): bias for name, bias in marks.items()}


# Asked for once: some tests record what their model sends.
TOWARDS_ENDS = biased(quote=20, brace=14, bracket=14)


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
            "logit_bias": TOWARDS_ENDS,
        }
