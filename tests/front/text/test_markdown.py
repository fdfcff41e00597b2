"""The HTML of a model's Markdown."""

import sys
from types import FrameType
from typing import Any

import pytest

from serve.front.text.markdown import rendered

LONG = 8_000  # characters


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("# a\n\n- b", "<h1>a</h1>\n<ul>\n<li>b</li>\n</ul>\n"),
        ("~~a~~ `<b>`", "<p><s>a</s> <code>&lt;b&gt;</code></p>\n"),
        ("<b onclick=x>a</b>", "<p>&lt;b onclick=x&gt;a&lt;/b&gt;</p>\n"),
        ("<script>\na\n</script>", "<p>&lt;script&gt;\na\n&lt;/script&gt;</p>\n"),
        ("[a](javascript:b)", "<p>[a](javascript:b)</p>\n"),
        ("[a](data:text/html,b)", "<p>[a](data:text/html,b)</p>\n"),
        ("[a](/b)", "<p>[a](/b)</p>\n"),
        ("[a](https://b.example)", '<p><a href="https://b.example">a</a></p>\n'),
        ("<mailto:a@b.example>", '<p><a href="mailto:a@b.example">mailto:a@b.example</a></p>\n'),
        ("![a](https://b.example)", '<p>!<a href="https://b.example">a</a></p>\n'),
    ],
)
def test_markdown_is_rendered_as_harmless_html(text: str, html: str) -> None:
    assert rendered(text) == html


def test_table_cells_are_aligned_without_inline_styles() -> None:
    html = rendered("| a | b |\n|:-:|---|\n| 1 | 2 |")
    assert '<th align="center">a</th>\n<th>b</th>' in html
    assert '<td align="center">1</td>\n<td>2</td>' in html
    assert "style" not in html


@pytest.mark.parametrize("piece", ["[", "*a ", "![", "a**b", "_*", "[a](", "> ", "- ", "|a", "<"])
def test_rendering_takes_time_in_proportion_to_the_length_of_the_text(piece: str) -> None:
    """Four times the text takes about four times the work, and not sixteen times."""
    short, long = (_num_lines(piece * (length // len(piece))) for length in (LONG // 4, LONG))
    assert long < 8 * short


def _num_lines(text: str) -> int:
    """The number of lines of Python that run: unlike a time, it is always the same."""
    count = 0

    def trace(_frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        rendered(text)
    finally:
        sys.settrace(None)
    return count
