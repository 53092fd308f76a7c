"""Write the rules in `docs/lint.md`: `python -m tests.documentation.lint_page`.

The page is written by hand up to the line `_BELOW`. The rules below it are generated from their
docstrings and examples.
"""

from __future__ import annotations

from pathlib import Path

from jaxprtool.commands.lint.lint import LintRule, all_rules

PATH = Path(__file__).parents[2] / "docs" / "lint.md"

_BELOW = "<!-- Made from the rules, by `python -m tests.documentation.lint_page`. -->\n"

#: The families of rules, by the first digit of their codes.
FAMILIES = {
    "1": "Memory",
    "2": "Types",
    "3": "Without effect",
    "4": "Indexing and sorting",
    "5": "Loops and branches",
    "6": "Callbacks and keys",
    "7": "Numerics",
    "8": "Gradients",
    "9": "Pallas kernels",
}


def page(before: str) -> str:
    """Return the text of the page, with the rules generated anew.

    Args:
        before: The current page.
    """
    rules = [rule for rule in all_rules() if rule.module.startswith("jaxprtool.")]
    parts = [before.partition(_BELOW)[0] + _BELOW, "| code | name | finds |", "| --- | --- | --- |"]
    parts += [f"| [{r.code}](#{r.code.lower()}) | `{r.name}` | {_first(r)} |" for r in rules]
    families = {rule.code[2] for rule in rules}
    assert families <= FAMILIES.keys(), f"FAMILIES has no title for {families - FAMILIES.keys()}"
    for digit, family in FAMILIES.items():
        parts += ["", f"## {family}"]
        for rule in rules:
            if rule.code[2] == digit:
                parts += ["", *_section(rule)]
    return "\n".join(parts) + "\n"


def _first(rule: LintRule) -> str:
    """Return the first sentence of a rule's description."""
    return rule.about.split(". ")[0].rstrip(".")


def _section(rule: LintRule) -> list[str]:
    bad, good = (text.partition("\n\n")[2].strip("\n") for text in (rule.bad, rule.good))
    found = "```python\n{}\n```"
    texts = (rule.about, found.format(bad), "Instead:", found.format(good))
    return [f"### {rule.code}", "", "\n\n".join(texts)]


if __name__ == "__main__":
    PATH.write_text(page(PATH.read_text()))
