"""`--reproducer DIR`: the program that a pass, or the compiler, fails on, for `reduce`."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from jaxprtool.cli import output
from jaxprtool.cli.options import OUTPUT
from jaxprtool.errors import JaxprToolError, OutputError, described
from jaxprtool.files import file_written_whole

if TYPE_CHECKING:
    from jaxprtool.ir.program import Program
    from jaxprtool.passes.pipeline import Step

ReproducerOption = Annotated[
    str | None,
    OUTPUT.option(
        "--reproducer",
        "DIR",
        "Where a pass or the compiler fails, write the program before it: for jaxprtool reduce "
        "DIR.",
    ),
]

_PROGRAM, _ABOUT = "program.jaxpr", "reproducer.json"


class Reproducer:
    """Writes what is needed to see a failure again, in a folder."""

    def __init__(self, folder: str, plugins: Sequence[str]):
        if os.path.exists(folder) and (not os.path.isdir(folder) or os.listdir(folder)):
            raise OutputError(f"--reproducer takes a new folder, and '{folder}' is there")
        self._folder = folder
        self._plugins = [os.path.abspath(p) if os.path.exists(p) else p for p in plugins]

    def failed(self, program: Program, step: Step, error: Exception) -> None:
        """Write the program that a pass has failed on."""
        words = f"error -p {shlex.quote(str(step))}"
        if self._write(program, words, str(step), described(error)):
            output.note(f"the program before {step} is in {self._folder}")

    @contextlib.contextmanager
    def compiler(self, program: Program) -> Iterator[None]:
        """Write a program before it is compiled, which may end the process, and drop it after."""
        self._write(program, "crash", "", "the process has died")
        try:
            yield
        except Exception as error:
            if self._write(program, "error", "", described(error)):
                output.note(f"the program is in {self._folder}")
            raise
        shutil.rmtree(self._folder)

    def _write(self, program: Program, check: str, pipeline: str, error: str) -> bool:
        """Write a program and what is known of its failure, and return whether that can be."""
        import jax
        import jaxlib

        import jaxprtool

        versions = {"jax": jax, "jaxlib": jaxlib, "jaxprtool": jaxprtool}
        about = {
            "check": check,
            "pipeline": pipeline,
            "plugins": self._plugins,
            "x64": bool(jax.config.jax_enable_x64),
            "error": error,
            "versions": {name: module.__version__ for name, module in versions.items()},
        }
        os.makedirs(self._folder, exist_ok=True)
        try:
            # Callbacks need not be there for a pass, or the compiler, to fail.
            jaxprtool.write(program, os.path.join(self._folder, _PROGRAM), callbacks="stub")
        except JaxprToolError as fault:
            output.warning(f"no reproducer: {fault.message}")
            return False
        with file_written_whole(os.path.join(self._folder, _ABOUT)) as file:
            file.write(json.dumps(about, indent=2).encode() + b"\n")
        return True


@dataclass(frozen=True)
class Reproduction:
    """What `reduce` takes from the folder of a reproducer.

    Attributes:
        program: The program's file.
        check: The check that holds for it.
        plugins: The files or modules with its passes.
        x64: Whether 64-bit types are kept.
    """

    program: str
    check: str
    plugins: Sequence[str]
    x64: bool


def read(folder: str) -> Reproduction:
    """Return what is in the folder of a reproducer.

    Raises:
        JaxprToolError: If there is no reproducer in it.
    """
    path = os.path.join(folder, _ABOUT)
    try:
        with open(path) as file:
            about = json.load(file)
        program = os.path.join(folder, _PROGRAM)
        return Reproduction(program, about["check"], about["plugins"], about["x64"])
    except FileNotFoundError:
        message = f"there is no reproducer in '{folder}': it has no {_ABOUT}"
        raise JaxprToolError(message, "opt and run write one with --reproducer") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise JaxprToolError(f"'{path}' is no reproducer: {described(error)}") from None
