"""Side-by-side pages show every answer as it is, mark what differs, and need nothing from elsewhere."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from io import StringIO

import pytest
from rich.console import Console

from leantune.errors import DataError
from leantune.evaluate.compare import Comparison, compare

NASTY = '<script>alert("x")</script> & <img src=https://example.org/x.png>'
FENCED = "Use:\n```python\nprint(1)\n```"


@pytest.fixture
def comparison() -> Comparison:
    return compare(
        ["What is <b>2+2</b>?", "Say hi", "Code?"],
        {"base": ["4", "hi there", FENCED], "tuned <1>": [NASTY, "hi  there\n", ""]},
        title="Before & after",
        metadata={"tuned <1>": {"method": "lora", "trained": 4_884_480, "run": "runs/<a>"}},
    )


class Page(HTMLParser):
    """Collects tags, attributes and the text of cells."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.cells: list[str] = []
        self._open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "input"):
            self._open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self._open):
            self.cells[-1] += data

    @property
    def closed(self) -> bool:
        return not self._open


def test_the_page_is_well_formed_escaped_and_complete(comparison: Comparison) -> None:
    page = Page(comparison.html())
    assert page.closed
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert page.tags.count("tr") == 4
    assert page.cells[3:6] == ["What is <b>2+2</b>?", "4", "≠ differs" + NASTY]
    assert "runs/<a>" in page.cells[2]
    assert "4884480" in page.cells[2]
    assert "2 of 3" in page.cells[2]


def test_the_page_loads_nothing_and_runs_nothing(comparison: Comparison) -> None:
    html = comparison.html()
    page = Page(html)
    assert not {name for name, _ in page.attributes} & {"src", "href", "srcset", "onclick", "style"}
    style = re.search(r"<style>(.*?)</style>", html, re.DOTALL)
    assert style is not None
    assert "url(" not in style[1]
    assert "@import" not in style[1]
    assert "prefers-color-scheme: dark" in style[1]
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes


def test_answers_are_marked_against_the_first_column_white_space_aside(comparison: Comparison) -> None:
    marked = [[comparison.differs(name, row) for row in range(3)] for name in comparison.columns]
    assert marked == [[False, False, False], [True, False, True]]
    assert comparison.num_different("tuned <1>") == 2
    assert comparison.html().count('<td class="differs">') == 2
    assert comparison.html().count('<tr class="same">') == 1


def test_the_terminal_shows_answers_without_reading_them_as_markup() -> None:
    shown = StringIO()
    comparison = compare(
        ["[red]p[/red]"], {"base": ["[bold]a"], "new": ["b[/]"]}, metadata={"new": {"run": 1}}
    )
    Console(file=shown, width=100).print(comparison.terminal())
    for text in ("[red]p[/red]", "[bold]a", "≠ b[/]", "run: 1"):
        assert text in shown.getvalue()


def test_markdown_keeps_fences_inside_answers(comparison: Comparison) -> None:
    markdown = comparison.markdown()
    assert f"````text\n{FENCED}\n````" in markdown
    assert markdown.count("≠") == 2
    assert markdown.startswith("# Before & after\n")
    assert "trained 4884480" in markdown


def test_one_model_alone_is_shown_without_marks() -> None:
    html = compare(["p"], {"base": ["a"]}).html()
    assert "differs</div>" not in html
    assert "checkbox" not in html


def test_columns_must_fit_the_prompts() -> None:
    with pytest.raises(DataError, match="new: 1 answers to 2 prompts"):
        compare(["p", "q"], {"base": ["a", "b"], "new": ["a"]})
    with pytest.raises(DataError, match="metadata of other"):
        compare(["p"], {"base": ["a"]}, metadata={"other": {}})
    with pytest.raises(DataError, match="at least one model"):
        compare(["p"], {})
