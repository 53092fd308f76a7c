"""`--compiled` in commands that count: what XLA's partitioner made of the program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from jaxprtool.cli.options import Panel
from jaxprtool.cli.session import Session, only_program

if TYPE_CHECKING:
    from jaxprtool.analysis.shardings import Shardings
    from jaxprtool.api.targets import Traced
    from jaxprtool.ir.programs.program import Program

Compiled = Annotated[
    bool,
    Panel("Several devices").flag(
        "--compiled",
        "Compile the function for its mesh, and show what each device sends, as `shardings` does.",
    ),
]


def partitioned(
    session: Session, traced: Traced, programs: Sequence[tuple[str, Program]], propose: bool = False
) -> Shardings:
    """Compile the only program, and return what the partitioner made of it.

    Raises:
        UnsupportedError: If it runs on one device.
    """
    from jaxprtool.api.investigate.shardings import shardings

    given = traced.given_to(only_program("--compiled takes", programs))
    session.on_progress(f"compiling {given.program.name}")
    arguments = [given.values.get(name) for name in given.program.arg_names]
    with session.mesh_set():
        return shardings(given.program, arguments, propose=propose)
