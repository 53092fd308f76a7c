"""Run command lines of the documentation in this process: pipes, `&&` and redirections.

`jaxprtool` is called as a function. Other programs (`head`, `grep`, `sed`, `cat`) are run.
"""

from __future__ import annotations

import io
import shlex
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

from jaxprtool.cli.main import main


def run(command):
    """Return the exit code of a command line, and its output on both streams."""
    code, screen = 0, io.BytesIO()
    for pipeline in command.split(" && "):
        piped = b""
        for stage in pipeline.split(" | "):
            words = shlex.split(stage)
            places = {word[: word.index(">")] or "1": word for word in words if ">" in word[:2]}
            words = [word for word in words if word not in places.values()]
            streams = {"1": io.BytesIO(), "2": screen if "2" not in places else io.BytesIO()}
            if stage == pipeline.split(" | ")[-1] and "1" not in places:
                streams["1"] = screen
            code = _run_one(words, piped, streams["1"], streams["2"])
            for number, word in places.items():
                Path(word.partition(">")[2]).write_bytes(streams[number].getvalue())
            piped = streams["1"].getvalue()
        if code:
            break
    return code, screen.getvalue().decode()


def _run_one(words, given, out, err):
    if words[0] != "jaxprtool":
        done = subprocess.run(words, input=given, capture_output=True)
        out.write(done.stdout)
        err.write(done.stderr)
        return done.returncode
    streams = [io.TextIOWrapper(stream, write_through=True) for stream in (out, err)]
    stdin = io.TextIOWrapper(io.BytesIO(given))
    try:
        with (
            mock.patch.object(sys, "stdin", stdin),
            redirect_stdout(streams[0]),
            redirect_stderr(streams[1]),
        ):
            return main(words[1:])
    finally:
        for stream in streams:
            stream.detach()
