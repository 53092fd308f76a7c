"""Compare the program of this process with those of the other processes of its cluster."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import jax

from jaxprtool.analysis.diff import Diff, diff
from jaxprtool.errors import JaxprToolError
from jaxprtool.execute.running.cluster import exchanged, is_first
from jaxprtool.formats.jaxpr import write
from jaxprtool.formats.jaxpr.read import parse
from jaxprtool.ir.basics.backends import start_backends
from jaxprtool.ir.programs.program import Program


@dataclass(frozen=True)
class Differing:
    """Two processes of a cluster that do not run the same program.

    Attributes:
        pair: Their numbers; the first is 0.
        why: The kind of difference.
        first: Whether this is process 0.
        diff: The differences of their programs; None if they could not be compared.
    """

    pair: tuple[int, int]
    why: str
    first: bool
    diff: Diff | None


def differing(program: Program) -> Differing | None:
    """Return the first process whose program differs from that of process 0, or None.

    The programs' text without source lines, JAX's release and the platform are compared. All
    processes must call this; a single process returns None.
    """
    start_backends()
    if jax.process_count() == 1:
        return None
    setting = f"JAX {jax.__version__} on {jax.default_backend()}, {jax.device_count()} devices"
    text = write.text(program, callbacks="stub", source=False)
    marks = exchanged(hashlib.sha256(text.encode()).digest() + setting.encode())
    other = next((i for i, mark in enumerate(marks) if mark != marks[0]), None)
    if other is None:
        return None
    settings = [mark[32:].decode() for mark in (marks[0], marks[other])]
    if settings[0] != settings[1]:
        return Differing((0, other), " against ".join(settings), is_first(), None)
    texts = exchanged(text.encode())
    found = None
    try:
        found = diff(parse(texts[0], "<process 0>"), parse(texts[other], f"<process {other}>"))
        why = f"they are {found.verdict}"
    except JaxprToolError as error:
        why = f"their texts differ ({error.message})"
    return Differing((0, other), why, is_first(), found)
