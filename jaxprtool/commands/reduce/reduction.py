"""Delta debugging: reduce a program to the smallest one for which a check still holds."""

from __future__ import annotations

import os
import re
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxprtool.commands.reduce import checks
from jaxprtool.commands.reduce.checks import Check, MismatchCheck, NanCheck, TimeoutCheck
from jaxprtool.commands.reduce.search import (
    BEST,
    ORIGINAL,
    CallingOracle,
    ReductionSearch,
    ReductionState,
    reduce_in_forks,
)
from jaxprtool.errors import ArgumentsError
from jaxprtool.formats.jaxpr.read import read
from jaxprtool.formats.jaxpr.write import write
from jaxprtool.formats.python.emit import to_python
from jaxprtool.ir.documents import document
from jaxprtool.ir.equations import has_64_bit_types
from jaxprtool.ir.program import Program, require_program
from jaxprtool.passes.reduction import equations_left
from jaxprtool.processes.calls import python_process
from jaxprtool.render.documents import programs as documents
from jaxprtool.render.reports import program_document

#: A callback for the line of progress.
_OnProgress = Callable[[str], object]


@document(
    without=("program", "values"),
    names={"is_smaller": "smaller", "program_document": "program"},
    also=("program_document",),
)
@dataclass(frozen=True)
class Reduction:
    """The result of a reduction.

    Attributes:
        program: The smallest program found.
        values: The values of its arguments that the check depends on, by name.
        equations_before: The number of equations of the original program, at every depth.
        equations_after: The number of equations of the smallest program.
        tries: The number of programs tried.
        seconds: The time of the search.
        seen: The fault that the check found in the original program: a signal, a message.
        is_smaller: Whether a smaller program was found.
        holds: Whether the check held again when the result was retried.
        interrupted: Whether the search was interrupted.
    """

    program: Program
    values: dict[str, Any]
    equations_before: int
    equations_after: int
    tries: int
    seconds: float
    seen: str = ""
    is_smaller: bool = True
    holds: bool = True
    interrupted: bool = False

    @property
    def program_document(self) -> documents.Program:
        """The smallest program found."""
        return program_document(self.program)


def reduce(
    program: Program,
    predicate: str | Callable[[Program], object],
    *,
    values: Mapping[str, Any] | None = None,
    seed: int = 0,
    jobs: int = 2,
    seconds: float | None = None,
    memory: int | None = None,
    plugins: Sequence[str] = (),
    on_progress: _OnProgress = lambda doing: None,
) -> Reduction:
    """Reduce a program to a smaller one for which a predicate still holds.

    The result is a local minimum: no step of the reduction applies at any single site of it.

    Args:
        program: The program.
        predicate: A check in the syntax of `jaxprtool reduce --check`: "crash", "nan", "mismatch -p
            fold", …, or a shell command. Each try runs in a separate process. Or a function of a
            program, which is called in this process, and whose exceptions are not caught.
        values: Values of arguments by name. Arguments left out get random values.
        seed: The seed of random values.
        jobs: The number of tries that run in parallel.
        seconds: The time limit of a try. If None, three times that of the first try, and at least
            10.
        memory: The memory limit of a try, in bytes. If None, there is none.
        plugins: Files or modules with passes, for the pipelines of the check.
        on_progress: Called with each line of progress.

    Returns:
        The smallest program found; on Ctrl-C, the smallest so far.

    Raises:
        ArgumentsError: If the predicate does not hold for the program, or not when tried again.
        UnsupportedError: If the program cannot be written to a file.
    """
    require_program(program)
    start = time.monotonic()
    count = equations_left(program)
    argument_values = dict(values or {})
    if isinstance(predicate, str):
        packed = {name: checks.picklable(value) for name, value in argument_values.items()}
        search = partial(
            reduce_in_forks,
            check=predicate,
            values=packed,
            seed=seed,
            jobs=jobs,
            seconds=seconds,
            memory=memory,
            plugins=tuple(plugins),
            x64=bool(jax.config.jax_enable_x64),
        )
        reduction = _in_process(program, packed, search, on_progress)
    else:
        reduction = _here(program, argument_values, predicate, on_progress)
    return replace(reduction, equations_before=count, seconds=time.monotonic() - start)


def _here(
    program: Program,
    values: dict[str, Any],
    predicate: Callable[[Program], object],
    on_progress: _OnProgress,
) -> Reduction:
    """Reduce with a Python function as the predicate, called in this process."""
    oracle, state = CallingOracle(predicate), ReductionState(program, values)
    if not oracle.holds(state):
        raise ArgumentsError("the predicate is False for the original program")
    if not oracle.holds(state):
        raise ArgumentsError(
            "the predicate is not deterministic: it was False for the original program the "
            "second time"
        )
    best, interrupted = [state], False

    def on_improvement(state: ReductionState, doing: str) -> None:
        best[0] = state
        on_progress(_line(doing, equations_left(state.program), oracle.tries))

    try:
        best[0] = ReductionSearch(oracle, on_improvement).run(state)
    except KeyboardInterrupt:
        interrupted = True
    return _reduction(best[0].program, dict(best[0].values), program, oracle.tries, interrupted)


def _reduction(
    new: Program, values: dict[str, Any], old: Program, tries: int, interrupted: bool, **more: Any
) -> Reduction:
    counts = equations_left(old), equations_left(new)
    is_smaller = counts[1] < counts[0] or len(str(new.jaxpr)) < len(str(old.jaxpr))
    return Reduction(
        new, values, *counts, tries, 0.0, is_smaller=is_smaller, interrupted=interrupted, **more
    )


def _in_process(
    program: Program,
    values: dict[str, Any],
    search: Callable[[str], dict[str, Any]],
    on_progress: _OnProgress,
) -> Reduction:
    """Reduce in another process, which calls `search` with its folder."""
    last: dict[str, Any] = {"tries": 0, "seen": "", "holds": True, "values": values}
    environment, interrupted = {}, False
    if jax.config.jax_num_cpu_devices > 0:
        environment["JAX_NUM_CPU_DEVICES"] = str(jax.config.jax_num_cpu_devices)

    def on_report(said: dict[str, Any]) -> None:
        last.update(said)
        if "doing" in said:
            on_progress(_line(said["doing"], said["equations"], said["tries"]))

    with python_process("the reduction failed", environment, on_report) as process:
        write(program, os.path.join(process.folder, ORIGINAL), callbacks="stub")
        try:
            last |= process.call(search, process.folder)
        except KeyboardInterrupt:
            interrupted = True
        best, path = program, os.path.join(process.folder, BEST)
        if os.path.exists(path):
            best = read(path)
    return _reduction(
        best,
        {n: checks.unpickled(v) for n, v in last["values"].items() if n in best.arg_names},
        program,
        last["tries"],
        interrupted,
        seen=last["seen"],
        holds=last["holds"],
    )


def _line(doing: str, equations: int, tries: int) -> str:
    return f"{doing} · {equations} equations · {tries} tries"


# --- script ---------------------------------------------------------------------------------------
# Write a reduced program as a standalone Python script that shows the fault with JAX alone.

_RUN = ["print(jax.block_until_ready(jax.jit({fun})(*arguments)))"]
_TIMEOUT = [
    "start = time.monotonic()",
    "jax.jit({fun}).lower(*arguments).compile()",
    'print(f"compiled in {{time.monotonic() - start:.1f}} s")',
]
_NAN = [
    "results = jax.jit({fun})(*arguments)",
    "print(results)",
    "nans = [bool(jnp.isnan(each).any()) for each in jax.tree.leaves(results)]",
    'raise SystemExit("the result has NaN" if any(nans) else 0)',
]
_MISMATCH = [
    "before = jax.jit({fun})(*arguments)",
    "after = jax.jit(rewritten())(*arguments)",
    'print("before", before)',
    'print("after ", after)',
    "for one, other in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):",
    "    np.testing.assert_allclose(one, other, rtol=1e-3)",
]
_BACKENDS = [
    "for name in {backends!r}:",
    "    with jax.default_device(jax.devices(name)[0]):",
    "        print(name, jax.jit({fun})(*arguments))",
]


def script(program: Program, check: Check, values: dict[str, Any]) -> str:
    """Return the source of a script that runs a program as a check does.

    Args:
        program: The program.
        check: The check that holds for it.
        values: The known values of its arguments, by name.

    Raises:
        UnsupportedError: If the program cannot be written as Python.
    """
    after = None
    if isinstance(check, MismatchCheck) and not check.backends:
        program, after = check.pair(program)
    elif check.pipelines:
        program = check.prepared(program)
    lines = _lines(check)
    text, fun = _module(program)
    parts = [_with_environment(text)]
    if after is not None:
        inner, name = _module(after)
        inside = textwrap.indent(f"{inner}\nreturn {name}\n", "    ")
        parts.append(f"\n\ndef rewritten():\n{inside}")
    body = [
        "import time\n" if isinstance(check, TimeoutCheck) else "",
        "import jax",
        "import jax.numpy as jnp",
        "import numpy as np",
        "from numpy import inf, nan\n",
    ]
    if has_64_bit_types(program.jaxpr):
        body.append('jax.config.update("jax_enable_x64", True)')
    arguments = ", ".join(map(_literal, check.arguments(program, values)))
    body.append(f"arguments = [{arguments}]")
    body += [line.format(fun=fun, backends=check.backends) for line in lines]
    main = textwrap.indent("\n".join(filter(None, body)), "    ")
    return "".join(parts) + f'\n\nif __name__ == "__main__":\n{main}\n'


def _lines(check: Check) -> Sequence[str]:
    match check:
        case TimeoutCheck():
            return _TIMEOUT
        case NanCheck():
            return _NAN
        case MismatchCheck():
            return _BACKENDS if check.backends else _MISMATCH
    return _RUN


def _module(program: Program) -> tuple[str, str]:
    """Return the source of a program as a module, and the name of its function."""
    text = to_python(program, callbacks="stub", source=False)
    match = re.match(r'"""`(\w+)`', text)
    assert match is not None
    return text, match[1]


def _with_environment(text: str) -> str:
    """Add to a module the environment variables that affect JAX, with their current values.

    These are XLA's flags and the number of CPU devices.
    """
    settings = {"XLA_FLAGS": os.environ.get("XLA_FLAGS")}
    if jax.config.jax_num_cpu_devices > 0:
        settings["JAX_NUM_CPU_DEVICES"] = str(jax.config.jax_num_cpu_devices)
    lines = [f"os.environ.setdefault({k!r}, {v!r})\n" for k, v in settings.items() if v]
    if not lines:
        return text
    docstring, end, module = text.partition('"""\n\n')
    return f"{docstring}{end}import os\n\n{''.join(lines)}\n{module}"


def _literal(value: Any) -> str:
    """Return a Python expression for the value of an argument; a constant array as `jnp.full`."""
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        data = np.asarray(jax.random.key_data(value)).tolist()
        words = f"jnp.array({data}, 'uint32')"
        return f"jax.random.wrap_key_data({words}, impl={str(jax.random.key_impl(value))!r})"
    array, dtype = np.asarray(value), value.dtype.name
    if array.size > 16 and (array == array.flat[0]).all():
        return f"jnp.full({array.shape}, {array.flat[0].item()!r}, {dtype!r})"
    return f"jnp.array({array.tolist()!r}, {dtype!r})"
