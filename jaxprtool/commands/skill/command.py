"""`jaxprtool skill`: print the page for coding assistants."""

from __future__ import annotations

from importlib.resources import files

from jaxprtool.cli import output
from jaxprtool.cli.session import command


@command
def skill_command() -> None:
    """Print a page for coding agents: which command answers what.

    The page is Markdown with a name and a description, as assistants read skills from files.

    [bold]Examples[/]

      jaxprtool skill

      jaxprtool skill > .claude/skills/jaxprtool/SKILL.md
    """
    output.write_text(files(__package__).joinpath("SKILL.md").read_text(encoding="utf-8"))
