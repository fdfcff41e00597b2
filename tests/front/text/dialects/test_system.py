"""Messages of the system that come late, for templates that know them and for those that do not."""

from pathlib import Path
from typing import Any

import pytest

from serve.core.errors import RequestError
from serve.front.text.dialects.system import has_late_system, with_early_system
from serve.front.text.tokens import Tokenizer
from tests.errors import fails
from tests.front.fakes import byte_level, save

FIRST = {"role": "system", "content": "Be short."}
ASKED = {"role": "user", "content": "Hello?"}
LATE = {"role": "system", "content": "It is noon."}
SAID = {"role": "assistant", "content": "Hi."}
NOTE = "<system>\nIt is noon.\n</system>"

ANYWHERE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
SILENT = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}"
    "<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("messages", "wanted"),
    [
        ([FIRST, ASKED, LATE], [FIRST, ("user", f"Hello?\n\n{NOTE}")]),
        ([ASKED, LATE, SAID], [("user", f"Hello?\n\n{NOTE}"), SAID]),
        ([ASKED, SAID, LATE, ASKED], [ASKED, SAID, ("user", f"{NOTE}\n\nHello?")]),
        ([ASKED, SAID, LATE], [ASKED, SAID, ("user", NOTE)]),
        ([FIRST, LATE, ASKED], [("system", "Be short.\n\nIt is noon."), ASKED]),
        ([FIRST, LATE], [("system", "Be short.\n\nIt is noon.")]),
        ([FIRST, ASKED, ASKED], [FIRST, ASKED, ASKED]),
    ],
)
def test_text_of_late_system_messages_is_kept_in_its_place(messages: Any, wanted: Any) -> None:
    given = [dict(each) for each in messages]
    plain = [
        {"role": each[0], "content": each[1]} if isinstance(each, tuple) else each
        for each in wanted
    ]
    assert with_early_system(messages) == plain
    assert messages == given
    assert not has_late_system(plain)


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (ANYWHERE, "<system>Be short.<user>Hello?<system>It is noon."),
        (STRICT, f"<system>Be short.<user>Hello?\n\n{NOTE}"),
        (SILENT, f"<system>Be short.<user>Hello?\n\n{NOTE}"),
    ],
)
def test_late_system_messages_are_in_the_prompt_of_every_template(
    tmp_path: Path, template: str, shown: str
) -> None:
    """Whether it takes such messages, refuses them, or leaves them out without a word."""
    tokenizer = Tokenizer(save(byte_level(), tmp_path, template))
    assert tokenizer.render([FIRST, ASKED, LATE], {}) == shown


def test_a_template_that_refuses_system_messages_still_refuses_late_ones(tmp_path: Path) -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    tokenizer = Tokenizer(save(byte_level(), tmp_path, template))
    with fails(RequestError, "template_refusal"):
        tokenizer.render([FIRST, ASKED, LATE], {})
