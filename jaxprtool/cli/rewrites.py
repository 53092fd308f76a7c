"""`opt --rewrite FILE`: rewrites of the user's as passes, and how often each has matched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from jaxprtool.cli import output
from jaxprtool.cli.options import PASSES

if TYPE_CHECKING:
    from jaxprtool.passes.patterns import NamedRewrites

Files = Annotated[
    list[str] | None,
    PASSES.option(
        "--rewrite",
        "FILE.py",
        "Run the rewrites (@jaxprtool.rewrite) of a file before other passes, "
        "or where -p names them. May be repeated.",
    ),
]


def load(files: list[str] | None) -> NamedRewrites:
    """The rewrites of these files, registered under their names."""
    from jaxprtool.passes.patterns import NamedRewrites

    return NamedRewrites(files or ())


def write_matches(rewrites: NamedRewrites) -> None:
    """Say on stderr where each has matched; that one has not is a warning."""
    for name, matches in rewrites.matches().items():
        if not matches:
            output.warning(f"rewrite '{name}' has no matches")
            continue
        lines = ", ".join(dict.fromkeys(match.source or "an unknown line" for match in matches))
        count = "1 match" if len(matches) == 1 else f"{len(matches)} matches"
        output.note(f"rewrite '{name}': {count}, at {lines}")
