"""Rendering of docstrings and other prose as Markdown: paragraphs, lists, verbatim code.

It uses only the colors of the theme; without colors, code keeps its backticks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Markdown
from rich.padding import Padding
from rich.text import Text
from rich.theme import Theme

from jaxprtool.render.terminal import theme

#: The maximal width, for readability.
MOST_COLUMNS = 100

_STYLES = Theme(
    {
        "markdown.code": theme.HEADING,
        "markdown.item.bullet": theme.COMMENT,
        "markdown.item.number": theme.COMMENT,
        "markdown.link": theme.BINDER,
        "markdown.link_url": theme.BINDER,
        "markdown.block_quote": theme.COMMENT,
        **{f"markdown.h{level}": theme.HEADING for level in range(1, 7)},
    }
)


@dataclass(frozen=True)
class Code:
    """Verbatim lines of text; long ones are broken between words."""

    text: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Padding(Text(self.text.strip("\n"), overflow="fold"), (0, 0, 0, 2))


class _CodeBlock(CodeBlock):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Code(str(self.text))


class _Markdown(Markdown):
    elements = {**Markdown.elements, "fence": _CodeBlock, "code_block": _CodeBlock}  # noqa: RUF012


@dataclass(frozen=True)
class Prose:
    """Text in Markdown, or in the reStructuredText of docstrings."""

    text: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = re.sub(r":[\w:]+:(?=`)", "", self.text)  # a role: :func:`vmap`
        text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
        if console.color_system is None:
            text = re.sub(r"(?<!`)`((?:[^`\n]|\n(?!\s*\n))+)`(?!`)", r"`` `\1` ``", text)
        options = options.update(width=min(options.max_width, MOST_COLUMNS))
        with console.use_theme(_STYLES):
            yield from console.render(_Markdown(text, hyperlinks=False), options)
