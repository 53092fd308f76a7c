import asyncio
import os
import sys

import pytest

pytest.importorskip("mcp")
from mcp import Client
from mcp.client.stdio import StdioServerParameters

from jaxprtool.commands.serve.tools import MOST_BYTES, limited, tool_server


def answers(server, *calls):
    """Return the tools of a server, and for each call whether it failed, and its text."""

    async def ask():
        async with Client(server) as client:
            tools = (await client.list_tools()).tools
            results = [await client.call_tool(name, arguments) for name, arguments in calls]
            return tools, [(result.is_error, result.content[0].text) for result in results]

    return asyncio.run(ask())


def test_the_tools_run_command_lines():
    lines = []

    def run(words):
        lines.append(words)
        return {"exit_code": 0, "stdout": "10 lines\n", "stderr": "note: one\n", "warm": True}

    tools, results = answers(
        tool_server(run),
        ("record", {"script": "train.py", "arguments": ["--fast"], "options": ["-o", "run"]}),
        ("cost", {"target": "m.py:f"}),
        ("nans", {"target": "m.py:f", "args": "f32[3]", "passes": "grad", "options": ["--all"]}),
        ("command", {"words": ["show", "m.py:f"]}),
    )
    assert {tool.name for tool in tools} == {"record", "lint", "cost", "memory", "nans", "command"}
    assert all(tool.description for tool in tools)
    assert lines == [
        ["record", "-o", "run", "train.py", "--fast"],
        ["cost", "m.py:f"],
        ["nans", "m.py:f", "--args", "f32[3]", "-p", "grad", "--all"],
        ["show", "m.py:f"],
    ]
    assert results == 4 * [(False, "10 lines\nnote: one")]


def test_a_failure_is_an_error_and_a_finding_is_none():
    def run(words):
        code = {"lint": 1, "cost": 2}[words[0]]
        return {"exit_code": code, "document": {"x": 1}, "stderr": "error: no file\n"}

    _, results = answers(tool_server(run), *[(n, {"target": "f"}) for n in ("lint", "cost")])
    (lint_failed, found), (cost_failed, said) = results
    assert not lint_failed and '"x": 1' in found
    assert cost_failed and "error: no file" in said


def test_a_long_answer_says_what_is_left_out():
    assert limited("short") == "short"
    text = limited("".join(f"line {number} …\n" for number in range(3000)))
    *lines, last = text.splitlines()
    assert len(text.encode()) <= MOST_BYTES + 100 and lines[-1].endswith("…")
    assert last.startswith("[") and "bytes are left out: ask for less, as with --top 5]" in last
    assert limited("x" * (MOST_BYTES + 5)).startswith(MOST_BYTES * "x" + "\n[5 of ")


@pytest.mark.usefixtures("processes")
def test_the_server_speaks_the_protocol(folder):
    command = StdioServerParameters(
        command=sys.executable, args=["-m", "jaxprtool", "serve", "--mcp"], env=dict(os.environ)
    )
    calls = [("cost", {"target": "functions.py:double"}), ("cost", {"target": "functions.py:dou"})]
    tools, results = answers(command, *calls)
    (failed, text), (misses, said) = results
    assert len(tools) == 6 and not failed and text.startswith("double: 3 FLOP")
    assert misses and "did you mean 'double'?" in said
