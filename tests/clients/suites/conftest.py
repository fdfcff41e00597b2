"""What the suites leave out, and why."""

import pytest

_COPIES = "Such a small model does not copy a value of the question into an argument."

# LangChain's tests that may fail. The rest must pass.
MAY_FAIL = {
    "test_tool_calling": _COPIES,
    "test_tool_calling_async": _COPIES,
    "test_agent_loop": _COPIES,
    "test_unicode_tool_call_integration": _COPIES,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        name = getattr(item, "originalname", item.name)
        if item.path.stem == "check_langchain" and name in MAY_FAIL:
            item.add_marker(pytest.mark.xfail(reason=MAY_FAIL[name]))
