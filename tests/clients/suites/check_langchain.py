"""LangChain's standard tests of a chat model, unchanged. What asks for an understanding that the
embedded model of a million parameters has not is expected to fail, with the reason."""

import os

from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestChatModel(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict:
        return {
            "model": "tiny-chat",
            "base_url": os.environ["OPENAI_BASE_URL"],
            "max_tokens": 200,
            "temperature": 0,
        }
