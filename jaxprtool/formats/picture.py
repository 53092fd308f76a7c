"""Pictures of graphs, drawn by Graphviz's `dot` program."""

from __future__ import annotations

import shutil
import subprocess

from jaxprtool.errors import OutputError


def require_graphviz(path: str) -> str:
    """Return the path of Graphviz's `dot`. Raises OutputError, which names `path`, if missing."""
    program = shutil.which("dot")
    if program is None:
        raise OutputError(
            f"cannot draw '{path}': Graphviz's program 'dot' is not on the PATH",
            "install it with apt-get install graphviz, or brew install graphviz; -o graph.dot "
            "writes the text",
        )
    return program


def picture(graph: str, format_name: str, path: str) -> bytes:
    """Return the picture of a graph as svg, png or pdf; `path` is its destination, for messages.

    Raises OutputError if Graphviz is missing or fails.
    """
    command = [require_graphviz(path), f"-T{format_name}"]
    try:
        done = subprocess.run(command, input=graph.encode(), capture_output=True, check=False)
    except OSError as error:
        raise OutputError(f"cannot draw '{path}': {command[0]}: {error.strerror}") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().partition("\n")[0]
        raise OutputError(f"cannot draw '{path}': dot exited with {done.returncode}: {said[:200]}")
    return done.stdout
