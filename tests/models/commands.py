"""The commands that are run on each model, compared with JAX's results.

A command is a function of a `Model` and a folder to write into. It raises if the command fails or
if a value differs from that of the model under `jax.jit`. It returns nothing, or a word on why the
command does not apply.
"""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

import jaxprtool
from jaxprtool.cli.main import main
from jaxprtool.errors import UnsupportedError
from jaxprtool.formats import lowering
from jaxprtool.formats.stablehlo import read_module_program

#: The passes before a model is written: they remove checks by callbacks, which files cannot hold,
#: and a rule that endlessly calls functions with other rules.
BEFORE_FILES = {
    "diffrax_gradient": "drop_checks",
    "dynamiqs_cavity": "drop_checks",
    "e3nn_harmonics": "inline(calls=('custom_jvp',))",
    "galsim_shear": "drop_checks",
    "optimistix_fit": "drop_checks",
    "tokamax_attention": "inline(calls=('custom_vmap',))",
}

#: The models of packages that enable x64 when they are imported, for the whole process.
X64 = frozenset({"klujax_solve", "sax_interferometer"})

#: Primitives of models that cannot be written, and the commands: they hold Python functions of
#: JAX, or belong to a package and have no public function.
NOT_WRITTEN = {
    ("klujax_solve", "python"): "solve_f64",
    ("s2fft_harmonics", "python"): "ftm_to_flm",
    ("sax_interferometer", "python"): "solve_c128",
}

#: Models without a key, whose results cannot be separated from one.
KEYLESS = frozenset(
    {
        "brax_pendulum",
        "dinosaur_waves",
        "diffrax_gradient",
        "dynamax_em",
        "dynamiqs_cavity",
        "e3nn_harmonics",
        "exponax_burgers",
        "flaxdiff_unet",
        "flowjax_flow",
        "folx_energy",
        "galax_orbit",
        "galsim_shear",
        "gpjax_fit",
        "haiku_resnet",
        "jax_cfd_flow",
        "jax_md_nve",
        "jaxley_cell",
        "jaxsim_pendulum",
        "jraph_network",
        "keras_step",
        "klujax_solve",
        "mamba_layer",
        "mjx_pendulum",
        "optimistix_fit",
        "ott_sinkhorn",
        "penzai_mlp",
        "plain_gpt",
        "pyhf_fit",
        "qwix_qat",
        "s2fft_harmonics",
        "s5_layer",
        "sax_interferometer",
        "tensorcircuit_vqe",
        "tinygp_fit",
        "tokamax_attention",
    }
)


@dataclass(frozen=True)
class Model:
    """A module of `tests.models.zoo`, as a TARGET and as a Python object."""

    name: str

    def prepare(self) -> None:
        """Import the model, whose package may set x64, and set it as this model needs it."""
        importlib.import_module(f"tests.models.zoo.{self.name}")
        jax.config.update("jax_enable_x64", self.name in X64)

    @property
    def target(self) -> str:
        """The factory, to be passed to a command with `--factory`."""
        return f"tests.models.zoo.{self.name}:model"

    @cached_property
    def call(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The function and its arguments."""
        return importlib.import_module(f"tests.models.zoo.{self.name}").model()

    @cached_property
    def program(self) -> Any:
        """The program that the commands take."""
        return jaxprtool.load(self.target, factory=True)

    @cached_property
    def written(self) -> Any:
        """The program in the form that can be written."""
        return self.program.apply(BEFORE_FILES.get(self.name, ""))

    @cached_property
    def results(self) -> list[np.ndarray]:
        """The arrays among the results of the function, as JAX computes them."""
        function, arguments = self.call
        return arrays(function(*arguments))


#: A command on a model, with a folder to write into. Returns a word on why it does not apply.
Command: TypeAlias = Callable[[Model, Path], str | None]


def arrays(tree: Any) -> list[np.ndarray]:
    """Return the arrays among the leaves of a tree, keys as their data."""
    found = []
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if isinstance(leaf, jax.Array | np.ndarray | np.generic):
            found.append(np.asarray(leaf))
    return found


def require_equal(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    """Raise AssertionError for arrays that differ by more than the rounding of compilers."""
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        if np.issubdtype(theirs.dtype, np.inexact):
            np.testing.assert_allclose(ours, theirs, rtol=2e-3, atol=2e-4)
        else:
            np.testing.assert_array_equal(ours, theirs)


def run_command(*arguments: str, codes: tuple[int, ...] = (0,)) -> str:
    """Return the output of a command line. Raise AssertionError if it exits with another code."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    assert code in codes, err.getvalue().strip()
    return out.getvalue()


def show(model: Model, folder: Path) -> None:
    """`show` prints the listing."""
    assert run_command("show", model.target, "--factory").strip() == str(model.program).strip()


def stats(model: Model, folder: Path) -> None:
    """`show --stats` counts the equations."""
    assert "equations" in run_command("show", model.target, "--factory", "--stats")


def optimized(model: Model, folder: Path) -> None:
    """`opt -O1 --verify` finds that no pass changed a value."""
    run_command("opt", model.target, "--factory", "-O1", "--verify")


def run(model: Model, folder: Path) -> None:
    """`run --save` computes the same as JAX."""
    path = folder / "results.npz"
    run_command("run", model.target, "--factory", "--repeat", "1", "--save", str(path))
    with np.load(path) as saved:
        require_equal([saved[name] for name in model.program.out_names], model.results)


def vmap(model: Model, folder: Path) -> None:
    """`vmap`, over a batch of two distinct elements, agrees with `jax.vmap` of the program."""
    run_command("vmap", model.target, "--factory", "--axis-size", "2")
    lanes = map(jnp.asarray, model.program.matched(model.call[1], {}).leaves)
    stacked = [jnp.stack([lane, _other(lane)]) for lane in lanes]
    evaluate = jax.extend.core.jaxpr_as_fun
    ours = evaluate(model.program.apply("batch(axis_size=2)").jaxpr)
    theirs = jax.vmap(evaluate(model.program.jaxpr))
    require_equal(arrays(jax.jit(ours)(*stacked)), arrays(jax.jit(theirs)(*stacked)))


def _other(lane: Any) -> Any:
    return lane * 1.01 if jnp.issubdtype(lane.dtype, jnp.floating) else lane


def unzip(model: Model, folder: Path) -> str | None:
    """`unzip --auto` finds the key, and both halves together return the original results."""
    if model.name in KEYLESS:
        return "no key"
    run_command("unzip", model.target, "--factory", "--auto", "--run")
    return None


def file(model: Model, folder: Path) -> str | None:
    """A program is written, read back, and called with the model's own arguments."""
    path = folder / "program.jaxpr"
    passes = BEFORE_FILES.get(model.name, "")
    if primitive := NOT_WRITTEN.get((model.name, "file")):
        return _refused(model, primitive, path)
    run_command("opt", model.target, "--factory", "-p", passes, "-o", str(path))
    back = jaxprtool.read(path)
    assert jaxprtool.equivalent(back, model.written)
    require_equal(arrays(back(*model.call[1])), model.results)
    return passes.partition("(")[0] or None


def python(model: Model, folder: Path) -> str | None:
    """Python is written, run, and called with the model's own arguments."""
    path = folder / "emitted.py"
    passes = BEFORE_FILES.get(model.name, "")
    if primitive := NOT_WRITTEN.get((model.name, "python")):
        return _refused(model, primitive, path)
    run_command("emit", model.target, "--factory", "-p", passes, "-o", str(path))
    namespace = {"__name__": "emitted", "__file__": str(path)}
    exec(compile(path.read_text(), path, "exec"), namespace)
    require_equal(arrays(namespace[model.program.name](*model.call[1])), model.results)
    return passes.partition("(")[0] or None


def _refused(model: Model, primitive: str, path: Path) -> str:
    """Require a one-line error that names the primitive."""
    with contextlib.redirect_stderr(io.StringIO()) as err:
        assert main(("emit", model.target, "--factory", "-o", str(path))) == 2
    assert f"error: {primitive} at " in err.getvalue() and not path.exists()
    return primitive


def stablehlo(model: Model, folder: Path) -> str | None:
    """StableHLO is written, read back, and returns the same bits as the program."""
    text = run_command("emit", model.target, "--factory", "--to", "stablehlo")
    assert text.startswith("module @")
    program = model.written
    module = lowering.module(program, keep_unused=True).operation.get_asm(enable_debug_info=True)
    try:
        read = read_module_program(module.encode(), model.name)
    except UnsupportedError as error:
        return f"no: {error.message.partition(' cannot be read')[0].split()[-1]}"
    leaves = [*map(jnp.asarray, program.matched(model.call[1], {}).leaves)]
    wanted = jax.jit(program.flat_function(donate=False))(*leaves)
    results = jax.jit(read.flat_function(donate=False))(*map(_words, leaves))
    for ours, theirs in zip(arrays(results), arrays(wanted), strict=True):
        assert ours.tobytes() == theirs.tobytes()
    return None


def _words(value: jax.Array) -> jax.Array:
    """Return a key as words, as a module has it; other arrays as they are."""
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(value) if is_key else value


#: The columns of the table, and their commands.
COMMANDS: dict[str, Command] = {
    "show": show,
    "stats": stats,
    "opt": optimized,
    "run": run,
    "vmap": vmap,
    "unzip": unzip,
    "file": file,
    "Python": python,
    "StableHLO": stablehlo,
}
