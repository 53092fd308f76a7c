"""The pages of the documentation, and the contents of their fenced blocks."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: The text of each page, by its path from the root.
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "jaxprtool" / "commands" / "skill" / "SKILL.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    )
}

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language, pages=PAGES):
    """Yield the page and the text of each block in a language."""
    return [
        (page, text)
        for page in pages
        for name, text in _BLOCK.findall(PAGES[page])
        if name == language
    ]
