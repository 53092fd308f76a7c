"""Budgets of programs, checked in a repository."""

from jaxprtool.registry import CommandInfo

INFO = CommandInfo(
    panel="In your repository",
    position=1,
    summary="Check the budgets in pyproject.toml.",
    run="jaxprtool.commands.check.command:check_command",
    documents=("jaxprtool.render.documents:CheckDocument",),
)
