"""`--reproducer DIR`: save the program that a pass or the compiler fails on, for `reduce`."""

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
    from jaxprtool.ir.programs.program import Program
    from jaxprtool.passes.framework.pipeline import Step

ReproducerOption = Annotated[
    str | None,
    OUTPUT.option(
        "--reproducer",
        "DIR",
        "If a pass or the compiler fails, write the program before it, for jaxprtool reduce DIR.",
    ),
]

_PROGRAM, _ABOUT = "program.jaxpr", "reproducer.json"


class Reproducer:
    """Writes a folder with everything needed to reproduce a failure.

    Args:
        folder: A folder that does not exist yet, or is empty.
        plugins: Files or modules with passes.

    Raises:
        OutputError: If the folder exists and is not empty.
    """

    def __init__(self, folder: str, plugins: Sequence[str]):
        if os.path.exists(folder) and (not os.path.isdir(folder) or os.listdir(folder)):
            raise OutputError(f"--reproducer takes a new folder, but '{folder}' exists")
        self._folder = folder
        self._plugins = [os.path.abspath(p) if os.path.exists(p) else p for p in plugins]

    def failed(self, program: Program, step: Step, error: Exception) -> None:
        """Write the program on which a pass failed.

        Args:
            program: The program before the pass.
            step: The pass.
            error: The exception that it raised.
        """
        words = f"error -p {shlex.quote(str(step))}"
        if self._write(program, words, str(step), described(error)):
            output.note(f"the program before {step} is in {self._folder}")

    @contextlib.contextmanager
    def compiler(self, program: Program) -> Iterator[None]:
        """Keep a program in the folder while it is compiled, and remove it if that succeeds.

        It is written first because a crash of the compiler may end the process.
        """
        self._write(program, "crash", "", "the process died")
        try:
            yield
        except Exception as error:
            if self._write(program, "error", "", described(error)):
                output.note(f"the program is in {self._folder}")
            raise
        shutil.rmtree(self._folder)

    def _write(self, program: Program, check: str, pipeline: str, error: str) -> bool:
        """Write a program and the facts about its failure. Return False if that is impossible."""
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
            # The failure of a pass or the compiler does not depend on callbacks.
            jaxprtool.write(program, os.path.join(self._folder, _PROGRAM), callbacks="stub")
        except JaxprToolError as fault:
            output.warning(f"no reproducer is written: {fault.message}")
            return False
        with file_written_whole(os.path.join(self._folder, _ABOUT)) as file:
            file.write(json.dumps(about, indent=2).encode() + b"\n")
        return True


@dataclass(frozen=True)
class Reproduction:
    """The contents of a reproducer's folder, for `reduce`.

    Attributes:
        program: The path of the program's file.
        check: The check that holds for the program, in the syntax of `--check`.
        plugins: Files or modules with passes.
        x64: Whether 64-bit types are enabled.
    """

    program: str
    check: str
    plugins: Sequence[str]
    x64: bool


def read(folder: str) -> Reproduction:
    """Read the folder of a reproducer.

    Raises:
        JaxprToolError: If the folder has no reproducer, or it cannot be read.
    """
    path = os.path.join(folder, _ABOUT)
    try:
        with open(path) as file:
            about = json.load(file)
        program = os.path.join(folder, _PROGRAM)
        return Reproduction(program, about["check"], about["plugins"], about["x64"])
    except FileNotFoundError:
        message = f"no reproducer in '{folder}': it has no {_ABOUT}"
        raise JaxprToolError(message, "opt and run write one with --reproducer") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise JaxprToolError(f"'{path}' is not a reproducer: {described(error)}") from None
