"""The colors of the terminal can be read on all common backgrounds."""

import pytest
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from jaxprtool.render.terminal import tables

COLORS = {
    name: getattr(tables, name) for name in ("BLUE", "CYAN", "GREEN", "MAGENTA", "RED", "YELLOW")
}

BACKGROUNDS = {
    "black": "#000000",
    "white": "#ffffff",
    "Windows Terminal": "#0c0c0c",
    "VS Code": "#1e1e1e",
    "Ubuntu": "#300a24",
    "Dracula": "#282a36",
    "One Dark": "#282c34",
    "Solarized dark": "#002b36",
    "Solarized light": "#fdf6e3",
    "GitHub light": "#f5f5f5",
}


def luminance(color):
    """Return the relative luminance of a color, as defined by WCAG 2."""
    linear = [
        c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4
        for c in (each / 255 for each in color.get_truecolor())
    ]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("background", BACKGROUNDS)
@pytest.mark.parametrize("name", COLORS)
def test_a_color_has_contrast(name, background):
    color = Color.from_ansi(COLORS[name])
    low, high = sorted(map(luminance, (color, Color.parse(BACKGROUNDS[background]))))
    assert (high + 0.05) / (low + 0.05) >= (3 if background in ("black", "white") else 2.95)


@pytest.mark.parametrize("module", [tables, tables], ids=lambda module: module.__name__)
def test_styles_have_no_other_colors(module):
    tables = [each for each in vars(module).values() if isinstance(each, dict)]
    styles = [style for table in tables for style in table.values() if isinstance(style, Style)]
    colors = [style.color for style in styles if style.color is not None]
    used = {color.number for color in colors if not color.is_default}
    assert used and used <= set(COLORS.values())


def test_a_comment_has_no_color_of_the_text_around_it():
    text = Text("model.py:9", style=tables.BINDER).append(" ← flax", style=tables.COMMENT)
    path, comment, *_ = text.render(Console())
    assert path.style.color.number == COLORS["BLUE"]
    assert comment.style.dim and comment.style.color.is_default
