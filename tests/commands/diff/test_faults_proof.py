"""A fault in a line of a program is the first row of the diff of the compiled modules.

Each fault is an edit of one equation, `y = fault(f(x))`, which thereby stays on its line. It is
tried on equations of the program until XLA's module does more than before. A program that is
compiled again, also in another process, makes no difference.

Of the default tests, these are the proofs of a sample; the others are marked `sweep`, those of the
zoo also `models`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxprtool
from jaxprtool.commands.diff.modules import ModuleDiff, diff_modules
from jaxprtool.execute.running.backends import compiled_afresh
from jaxprtool.formats.hlo import StoredModule, stored_module
from jaxprtool.ir.equations import bodies, equations
from jaxprtool.ir.frames import frames_now
from jaxprtool.ir.hlo.buffers import buffer_assignment
from jaxprtool.ir.hlo.module import compiled_module
from jaxprtool.ir.program import Program
from jaxprtool.ir.rewrite import Writer, rewrite
from jaxprtool.ir.source_text import Place
from jaxprtool.jaxcompat import Atom, JaxprEqn, is_opaque
from tests.models.commands import Model

ROOT = Path(__file__).parents[3]

#: Samples whose steps are of several lines; their steps or losses.
SAMPLES = (
    "rnn.py:loss",
    "transformer.py:train_step",
    "convnet.py:grad_loss",
    "vae_variables.py:loss",
)
ZOO = sorted(path.stem for path in (ROOT / "tests/models/zoo").glob("[!_]*.py"))

#: Models that trace to another program with another hash seed: NumPyro adds terms in a set's order.
HASHED = ("numpyro_svi",)

#: Models whose program has a pointer as a constant, another one in each process: to KLU's factors.
POINTING = ("sax_interferometer",)

#: LLVM without optimizations: the modules are the same, and compiled in half the time.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

# --- programs -------------------------------------------------------------------------------------


@contextmanager
def loaded(name: str) -> Iterator[Program]:
    """Load a sample or a model of the zoo; some models compute in 64 bits."""
    was = jax.config.jax_enable_x64
    try:
        if name in ZOO:
            model = Model(name)
            model.prepare()
            yield model.program
        else:
            yield jaxprtool.load(str(ROOT / "samples" / name))
    finally:
        jax.config.update("jax_enable_x64", was)


def stored(function: Callable, *avals: Any, **jit: Any) -> StoredModule:
    """Return the module that XLA compiles a function to."""
    types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    with compiled_afresh():
        lowered = jax.jit(function, **jit).lower(*types)
        executable = lowered.compile(compiler_options=QUICK)
    module = compiled_module(executable)
    return StoredModule(module, buffer_assignment(executable, module))


def compiled(program: Program) -> StoredModule:
    """Return the module that XLA compiles a program to."""
    return stored(jax.extend.core.jaxpr_as_fun(program.jaxpr), *program.in_avals)


# --- faults ---------------------------------------------------------------------------------------


def broken_fusion(x: jax.Array) -> jax.Array:
    """Pass the value through Python, so that XLA cannot fuse what computes and reads it."""
    return jax.pure_callback(lambda value: value, jax.typeof(x), x)


def layout_copy(x: jax.Array) -> jax.Array:
    """Read the elements in the other order."""
    return jnp.swapaxes(x, -1, -2).reshape(x.shape)


def extra_gather(x: jax.Array) -> jax.Array:
    """Read the rows by an index that XLA does not know."""
    order = lax.optimization_barrier(jnp.arange(x.shape[0]))
    return x[order]


def sorted_as(dtype: Any, x: jax.Array) -> jax.Array:
    """Sort the rows as values of this type, or of that which they have."""
    return lax.sort(x.astype(dtype or x.dtype)).astype(x.dtype)


Edit = Callable[[jax.Array], jax.Array]

#: The faults: the line before, None if the fault is an addition, and the line with it.
FAULTS: dict[str, tuple[Edit | None, Edit]] = {
    "fusion break": (None, broken_fusion),
    "layout copy": (None, layout_copy),
    "widened dtype": (partial(sorted_as, jnp.float16), partial(sorted_as, None)),
    "extra gather": (None, extra_gather),
}


def edited(program: Program, place: JaxprEqn, edit: Edit | None) -> Program:
    """Return a program in which the result of an equation is edited, on its line."""
    if edit is None:
        return program

    def visitor(writer: Writer) -> Any:
        def visit(eqn: JaxprEqn) -> Sequence[Atom] | None:
            if eqn is not place:
                return None
            return writer.trace(lambda x: [edit(x)], writer.add(eqn), eqn)

        return visit

    return program.replace(jaxpr=rewrite(program.jaxpr, visitor))


#: The operations of primitives that XLA fuses with those that read them.
FUSED = {
    "add": "add",
    "add_any": "add",
    "div": "divide",
    "exp": "exponential",
    "logistic": "logistic",
    "max": "maximum",
    "mul": "multiply",
    "select_n": "select",
    "sub": "subtract",
    "tanh": "tanh",
}


def fused(base: StoredModule) -> set[tuple[str, int]]:
    """Return the operations that XLA fused with their readers, by opcode and number of bytes."""
    module = base.module
    kernels = (op for op in module.instructions.values() if op.opcode == "fusion")
    bodies = (module.computations[kernel.calls[0]] for kernel in kernels)
    return {
        (op.opcode, op.shape.bytes)
        for body in bodies
        for op in body.instructions
        if op is not body.root
    }


def places(program: Program, name: str, base: StoredModule) -> list[JaxprEqn]:
    """Return equations with a large result to inject a fault in: one of each line, then others.

    Lines with larger results are first.
    """
    inside = fused(base)
    found = [
        eqn
        for eqn in equations(program.jaxpr)
        if len(eqn.outvars) == 1 and not is_opaque(eqn) and not bodies(eqn) and _is_matrix(eqn)
        if name != "fusion break" or (FUSED.get(eqn.primitive.name), _bytes(eqn)) in inside
    ]
    lines: dict[Place, list[JaxprEqn]] = {}
    for eqn in sorted(found, key=_bytes, reverse=True):
        if (place := users_line(eqn)) is not None:
            lines.setdefault(place, []).append(eqn)
    order = sorted(lines, key=lambda place: (-_bytes(lines[place][0]), place))
    return [eqn for row in zip_longest(*(lines[place] for place in order)) for eqn in row if eqn]


def users_line(eqn: JaxprEqn) -> Place | None:
    """Return the user's line of an equation; None if it only has those of libraries."""
    frames = frames_now()
    location = frames.location(eqn)
    if location is None or not frames.is_own(location.frame.file):
        return None
    return frames.place(location).user


def _bytes(eqn: JaxprEqn) -> int:
    aval = eqn.outvars[0].aval
    return aval.size * aval.dtype.itemsize


def _is_matrix(eqn: JaxprEqn) -> bool:
    aval = eqn.outvars[0].aval
    shape = getattr(aval, "shape", ())
    return len(shape) >= 2 and min(shape) > 1 and aval.dtype in ("float32", "float64")


#: The number of places at which a fault is tried.
TRIES = 8


class Injected(NamedTuple):
    """A fault that changed a module: its line, and the diff."""

    place: Place
    diff: ModuleDiff


def has_effect(name: str, found: ModuleDiff) -> bool:
    """Whether the module does more for a fault: XLA may remove it, or find a better order."""
    before, after = found.before, found.after
    return after.bytes > before.bytes and (name != "fusion break" or after.kernels > before.kernels)


def injected(program: Program, name: str, base: StoredModule) -> Injected | None:
    """Return a fault at the first place where the module does more for it; None if nowhere."""
    before, after = FAULTS[name]
    for eqn in places(program, name, base)[:TRIES]:
        old = base if before is None else compiled(edited(program, eqn, before))
        diff = diff_modules(old, compiled(edited(program, eqn, after)))
        place = users_line(eqn)
        if has_effect(name, diff) and place is not None:
            return Injected(place, diff)
    return None


# --- tests ----------------------------------------------------------------------------------------


def _parameter(name: str) -> Any:
    marks = [pytest.mark.sweep] if name != SAMPLES[0] else []
    return pytest.param(name, marks=[*marks, pytest.mark.models] if name in ZOO else marks)


every_program = pytest.mark.parametrize("name", list(map(_parameter, [*SAMPLES, *ZOO])))


@contextmanager
def installed(name: str) -> Iterator[Program]:
    """Load a program, or skip the test if the package of a model is not installed."""
    with ExitStack() as stack:
        try:
            program = stack.enter_context(loaded(name))
        except ImportError as error:
            pytest.skip(f"not installed: {error.name}")
        yield program


@every_program
@pytest.mark.parametrize("fault", FAULTS)
def test_the_line_of_a_fault_is_the_first_row(name, fault):
    with installed(name) as program:
        found = injected(program, fault, compiled(program))
        if found is None and name in ZOO:  # a model may have few operations of a kind
            pytest.skip("the fault changes nothing at the lines that were tried")
        assert found is not None
        assert found.diff.lines[0].place == found.place


@every_program
def test_a_lost_donation_is_named(name):
    with installed(name) as program:

        def step(*args: jax.Array) -> Any:
            return program.flat_function(donate=False)(*args), [args[i] * 0.5 for i in weights]

        weights = [
            number
            for number, aval in enumerate(program.in_avals)
            if jnp.issubdtype(aval.dtype, jnp.floating) and aval.size > 1
        ]
        if not weights and name in ZOO:
            pytest.skip("the program has no weights")
        kept = [number for number in weights if number != weights[len(weights) // 2]]
        modules = [
            stored(step, *program.in_avals, donate_argnums=numbers) for numbers in (weights, kept)
        ]
        lost = f"args[{weights[len(weights) // 2]}]"
        assert diff_modules(*modules).lost_donations == (lost,)


@every_program
def test_a_program_that_is_compiled_again_is_the_same(name, tmp_path, processes):
    with installed(name) as program:
        module = compiled(program)
        assert diff_modules(module, compiled(program)).is_same
    if name in POINTING:
        pytest.skip("the program of another process has another constant")
    # The environment of the tests, with its settings of JAX, and another hash seed.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment |= {"PYTHONHASHSEED": "0"} if name in HASHED else {}
    path = str(tmp_path / "again.optimized.pb")
    target = [f"tests.models.zoo.{name}:model", "--factory"] if name in ZOO else [f"samples/{name}"]
    command = [sys.executable, "-m", "jaxprtool", "emit", *target, "-o"]
    paths = [path.replace("again", str(number)) for number in range(2)]
    for each in paths:
        subprocess.run([*command, each], cwd=ROOT, env=environment, check=True)
    found = diff_modules(*map(stored_module, paths))
    assert found.is_same and not found.lines
