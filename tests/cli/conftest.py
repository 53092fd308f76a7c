"""The fixtures of commands, for the tests of what all commands share."""

from tests.commands.conftest import cli, folder, terminal

__all__ = ["cli", "folder", "terminal"]
