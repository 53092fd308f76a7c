"""The tools of `jaxprtool serve --mcp`, for assistants that speak the Model Context Protocol.

This process speaks the protocol, with the SDK. Command lines run in a child process, which is
`jaxprtool serve`. There are few tools, because an assistant reads the descriptions of all of them
before each of its steps: those for the most common questions, and one for any other command.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Annotated, Any, TypeAlias

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import Field

from jaxprtool import __version__, registry
from jaxprtool.processes import Child

#: The most bytes of an answer.
MOST_BYTES = 20_000

#: The most seconds of a command.
MOST_SECONDS = 600.0

_INSTRUCTIONS = (
    "jaxprtool shows, measures and debugs the programs that JAX traces functions to. Begin with "
    "`record` on a training script, or with `lint` and `cost` on a function. The command `skill` "
    "prints which command answers which question, and what not to believe."
)

#: The tools for one TARGET: each is the command of that name.
_QUESTIONS = {
    "lint": "Find what wastes time or memory, or makes results wrong, by source line: a key used "
    "twice, a log of a softmax, a state that is not donated, a loss whose gradient stops.",
    "cost": "Show the source lines that cost most: FLOPs and bytes moved. Nothing is compiled.",
    "memory": "Show the peak memory and what is live at it, by source line and argument. An "
    "estimate of what XLA allocates; with --compiled, XLA's own numbers.",
    "nans": "Run the function, and find the first equation that makes a NaN or an infinity. "
    "Arguments given by type have random values.",
}

#: Runs a command line, and returns the answer of `jaxprtool serve`.
_Run: TypeAlias = Callable[[Sequence[str]], Mapping[str, Any]]

_Target = Annotated[
    str,
    Field(
        description="The function: path/file.py:function or package.module:function; or a program "
        "of a recorded run: run/step, or run/step:loss for loss in it"
    ),
]
_Args = Annotated[
    str,
    Field(
        description="Its arguments, by type or value: \"{'w': f32[3,4]}, f32[8,3]\". Leave it out "
        "for a function with example arguments, a factory and a recorded program"
    ),
]
_Passes = Annotated[
    str, Field(description='Passes to run first, such as "grad" for the function\'s gradient')
]
_Options = Annotated[
    list[str], Field(description='Further options of the command line, such as ["--factory"]')
]


def serve_tools() -> None:
    """Answer requests of the Model Context Protocol on stdin, until it ends."""
    with _CommandServer() as commands:
        tool_server(commands.run).run()


def tool_server(run: _Run) -> MCPServer:
    """Return a server with the six tools, for which `run` runs command lines."""
    server = MCPServer(
        "jaxprtool", instructions=_INSTRUCTIONS, version=__version__, log_level="WARNING"
    )

    def record(
        script: Annotated[str, Field(description="The path of the script")],
        arguments: Annotated[list[str], Field(description="Its arguments")] = [],  # noqa: B006
        options: _Options = [],  # noqa: B006
    ) -> str:
        return _text(run(["record", *options, script, *arguments]))

    server.add_tool(
        record,
        description="Run a training script unchanged, and show what JAX compiles in it, why it "
        "compiles again, and what to do. Its programs are then targets of all tools: run/step.",
    )
    for name, description in _QUESTIONS.items():
        server.add_tool(_question(name, run), name=name, description=description)

    def command(
        words: Annotated[
            list[str], Field(description='The command line: ["show", "train.py:step", "--source"]')
        ],
    ) -> str:
        return _text(run(words))

    others = registry.commands().keys() - {"record", "browse", "serve", *_QUESTIONS}
    server.add_tool(
        command,
        description=f"Run any other command of jaxprtool: {', '.join(sorted(others))}. "
        '["COMMAND", "--help"] describes one.',
    )
    return server


def _question(name: str, run: _Run) -> Callable[..., str]:
    """Return the tool for a question about one TARGET, which the command `name` answers."""

    def question(
        target: _Target,
        args: _Args = "",
        passes: _Passes = "",
        options: _Options = [],  # noqa: B006
    ) -> str:
        words = [*(["--args", args] if args else ()), *(["-p", passes] if passes else ())]
        return _text(run([name, target, *words, *options]))

    return question


def _text(answer: Mapping[str, Any]) -> str:
    """Return the output of a command, of a limited size.

    Raises:
        ToolError: If the command has failed.
    """
    printed = answer["stdout"] if "stdout" in answer else json.dumps(answer["document"], indent=1)
    text = limited("\n".join(part.rstrip() for part in (printed, answer["stderr"]) if part.strip()))
    if answer["exit_code"] > 1:
        raise ToolError(text or f"exit code {answer['exit_code']}")
    return text


def limited(text: str, most: int = MOST_BYTES) -> str:
    """Return the first lines of a text, and a sentence on what is left out."""
    data = text.encode()
    if len(data) <= most:
        return text
    head = data[:most].decode(errors="ignore")
    head = head[: head.rfind("\n")] if "\n" in head else head
    left = len(data) - len(head.encode())
    return f"{head}\n[{left:,} of {len(data):,} bytes are left out: ask for less, as with --top 5]"


class _CommandServer:
    """`jaxprtool serve` in a child process, which is started when it is first asked."""

    def __init__(self) -> None:
        self._stack, self._one_at_a_time = ExitStack(), threading.Lock()
        self._child: Child | None = None

    def run(self, words: Sequence[str]) -> Mapping[str, Any]:
        """Run a command line, and return its answer."""
        with self._one_at_a_time:
            if self._child is None:
                command = [sys.executable, "-m", "jaxprtool", "serve"]
                child = Child(command, stdin=subprocess.PIPE, stderr=None)
                self._child = self._stack.enter_context(child)
            stdin, stdout = self._child.popen.stdin, self._child.popen.stdout
            assert stdin is not None and stdout is not None
            request = {"command": [*words], "timeout_s": MOST_SECONDS}
            try:
                stdin.write(json.dumps(request).encode() + b"\n")
                stdin.flush()
                answer: Mapping[str, Any] = json.loads(stdout.readline())
            except (OSError, ValueError):
                self._child = None
                raise ToolError("`jaxprtool serve` has ended; ask again to start it") from None
            return answer

    def __enter__(self) -> _CommandServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
