"""`jaxprtool serve`: a server of commands, over JSON lines and the Model Context Protocol."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxprtool.cli import output
from jaxprtool.cli.output import STDERR_DESCRIPTOR, STDOUT_DESCRIPTOR
from jaxprtool.cli.session import command
from jaxprtool.errors import ArgumentsError, JaxprToolError, OutputError
from jaxprtool.processes import ended_by_signals

if TYPE_CHECKING:
    from jaxprtool.commands.serve.workers import Workers


_Mcp = Annotated[
    bool,
    typer.Option(
        "--mcp",
        metavar="",
        help="Speak the Model Context Protocol instead, with six tools. Needs the package mcp.",
    ),
]

#: The keys of a request.
_KEYS = ("id", "command", "timeout_s", "fresh")

_FORM = 'write {"id": 1, "command": ["cost", "train.py:step", "--json"]}'


@command
def serve_command(mcp: _Mcp = False) -> None:
    """Answer commands from a warm process, for editors and agents.

    Each line of stdin is a request, as '{"id": 1, "command": ["cost", "train.py:step", "--json"]}';
    each line of stdout is its answer, with `exit_code`, `stderr`, and `document` or `stdout`. A
    command on a module that has not changed since takes milliseconds. The end of stdin ends it.

    [bold]Examples[/]

      echo '{"id": 1, "command": "cost samples/layers.py:loss"}' | jaxprtool serve

      claude mcp add jaxprtool -- jaxprtool serve --mcp
    """
    if mcp:
        if importlib.util.find_spec("mcp") is None:
            raise OutputError("serve --mcp needs the package mcp", 'pip install "mcp>=2"')
        from jaxprtool.commands.serve.tools import serve_tools

        serve_tools()
        return
    if sys.stdin.isatty():
        output.note(f"{_FORM}, a line for each request; Ctrl-D ends")
    from jaxprtool.commands.serve.workers import Workers

    # Only answers are written to stdout, also if a plug-in prints while it is imported.
    with os.fdopen(os.dup(STDOUT_DESCRIPTOR), "w", encoding="utf-8") as answers:
        os.dup2(STDERR_DESCRIPTOR, STDOUT_DESCRIPTOR)
        with ended_by_signals(), Workers([answers.fileno()]) as workers:
            for line in sys.stdin:
                if line.strip():
                    answers.write(json.dumps(answer_line(line, workers)) + "\n")
                    answers.flush()


def answer_line(line: str, workers: Workers) -> dict[str, Any]:
    """Return the answer to a line of stdin."""
    number: object = None
    try:
        request = _read(line)
        number = request.get("id")
        words, timeout = _words(request), _timeout(request)
        fresh = request.get("fresh", False)
        if not isinstance(fresh, bool):
            raise ArgumentsError(f"fresh is not true or false: {fresh!r}", _FORM)
        answer = workers.answer(words, timeout, fresh)
    except JaxprToolError as error:
        hint = f"hint: {error.hint}\n" if error.hint else ""
        said = f"error: {error.message}\n{hint}"
        return {"id": number, "exit_code": error.exit_code, "stdout": "", "stderr": said}
    printed: dict[str, object] = {"stdout": answer.stdout}
    if "--json" in words:
        with contextlib.suppress(ValueError):  # of a command without a document
            printed = {"document": json.loads(answer.stdout)}
    head = {"id": number, "exit_code": answer.exit_code}
    return {**head, **printed, "stderr": answer.stderr, "warm": answer.warm}


def _read(line: str) -> Mapping[str, Any]:
    """Return the object of a line. Raises ArgumentsError if it is none."""
    try:
        request = json.loads(line)
    except ValueError as error:
        raise ArgumentsError(f"the request is not JSON: {error}", _FORM) from None
    if not isinstance(request, dict):
        raise ArgumentsError("the request is not an object", _FORM)
    return request


def _words(request: Mapping[str, Any]) -> list[str]:
    """Return the command line of a request. Raises ArgumentsError if it has none that can run."""
    for key in request.keys() - _KEYS:
        raise ArgumentsError(f"a request has no key '{key}'", f"its keys are {', '.join(_KEYS)}")
    words = request.get("command")
    try:
        words = shlex.split(words) if isinstance(words, str) else words
    except ValueError as error:
        raise ArgumentsError(f"the command cannot be split into words: {error}", _FORM) from None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ArgumentsError("the command is not a text or a list of texts", _FORM)
    words = words[words[:1] == ["jaxprtool"] :]
    if not words:
        raise ArgumentsError("the command is empty", _FORM)
    if words[0] == "serve":
        raise ArgumentsError("this is `jaxprtool serve` already", _FORM)
    return words


def _timeout(request: Mapping[str, Any]) -> float | None:
    """Return the time limit of a request in seconds. Raises ArgumentsError if it is none."""
    seconds = request.get("timeout_s")
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if seconds is not None and not (is_number and 0 < seconds < float("inf")):
        raise ArgumentsError(f"timeout_s is not a positive number of seconds: {seconds!r}")
    return seconds
