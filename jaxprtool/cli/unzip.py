"""`jaxprtool unzip`: a function that declares variables as two programs, init and apply."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxprtool.cli import completion, options, output, reports
from jaxprtool.cli.places import STDOUT, write_jaxprs
from jaxprtool.cli.run import Backend, Seed, execute, note_random, require_device, save_arrays
from jaxprtool.errors import ArgumentsError, OutputError, PipelineError, did_you_mean
from jaxprtool.files import file_written_whole

if TYPE_CHECKING:
    from jaxprtool.execute.run import RunReport
    from jaxprtool.ir.program import Program
    from jaxprtool.loading.load import Entry
    from jaxprtool.passes.unzip import Unzipped
    from jaxprtool.targets import ProgramEntry

    Halves = list[tuple[str, Program]]

_SPLIT = "How it is split"


def _key_args(text: str) -> tuple[int, ...]:
    return () if text.strip() == "none" else options.numbers(text)


_KeyArgs = Annotated[
    Any,
    typer.Option(
        "--key-args",
        metavar="N,…|none",
        parser=_key_args,
        help="Positions of the arguments that are keys. Unless given: 0, and with --auto all "
        "that are keys by type, wherever they are.",
        rich_help_panel=_SPLIT,
        show_default=False,
    ),
]
_Tag = Annotated[
    str | None,
    typer.Option(
        "--tag",
        metavar="NAME",
        help="What the variables are sown under; 'variable' unless given.",
        rich_help_panel=_SPLIT,
        show_default=False,
    ),
]
_Auto = Annotated[
    bool,
    typer.Option(
        "--auto",
        metavar="",
        help="Choose the variables: the fewest bytes that cut the keys off.",
        rich_help_panel=_SPLIT,
    ),
]
_Known = Annotated[
    Any,
    typer.Option(
        "--known",
        metavar="N,…",
        parser=options.numbers,
        help="Instead of keys: arguments that init is given, whatever they are; what depends on "
        "them alone is computed there, once.",
        rich_help_panel=_SPLIT,
        show_default=False,
    ),
]
_Passes = Annotated[
    str | None,
    typer.Option(
        "-p",
        "--passes",
        metavar="PIPELINE",
        help='Passes to run on both afterwards, or on one: "apply.dce".',
        rich_help_panel="Passes",
        autocompletion=completion.complete_passes,
    ),
]
_Run = Annotated[
    bool,
    typer.Option(
        "--run",
        metavar="",
        help="Run init, then apply on what it gives and the other arguments.",
        rich_help_panel="How it runs",
    ),
]
_Out = Annotated[
    str | None,
    typer.Option(
        "-o",
        "--output",
        metavar="DIR/",
        help="Write init.jaxpr and apply.jaxpr into a folder.",
        rich_help_panel="Output",
    ),
]
_Save = Annotated[
    str | None,
    typer.Option(
        "--save",
        metavar="FILE.npz",
        help="With --run: write the variables, by name, for load('FILE.npz') in --args.",
        rich_help_panel="Output",
    ),
]


def unzip(
    target: options.Target,
    args: options.Args = None,
    factory: options.Factory = False,
    static_argnums: options.StaticArgnums = None,
    static_argnames: options.StaticArgnames = None,
    x64: options.X64 = False,
    key_args: _KeyArgs = None,
    tag: _Tag = None,
    auto: _Auto = False,
    known: _Known = None,
    passes: _Passes = None,
    plugin: options.Plugin = None,
    run: _Run = False,
    backend: Backend = None,
    seed: Seed = 0,
    out: _Out = None,
    callbacks: options.Callbacks = options.CallbackChoice.refuse,
    save: _Save = None,
    json: options.Json = False,
    traceback: options.Traceback = False,
) -> None:
    """Split a function that declares variables: init makes them from keys, apply takes them.

    [bold]Examples[/]

      jaxprtool unzip samples/mlp_variables.py:net
      jaxprtool unzip samples/mlp_variables.py:net -o net/
      jaxprtool unzip samples/mlp_variables.py:net --run --save params.npz
      jaxprtool unzip samples/random_numbers.py:dropout --auto
      jaxprtool unzip samples/transformer.py:loss --known 0
    """
    choice = _Choice(key_args, tag, auto, known)
    choice.check()
    _check_output(run, backend, save, out)
    options.start_jax(x64)
    from jaxprtool.ir.program import Programs

    pipeline = options.pipeline(passes, plugin)
    require_device(backend)
    entry = options.find(target, args, factory, static_argnums, static_argnames)
    with file_written_whole(save) if save else contextlib.nullcontext() as file:
        start = time.perf_counter()
        traced = options.trace(entry, pipeline)
        parts = _split(entry, traced, choice)
        split_time = time.perf_counter() - start
        programs = options.each(pipeline(Programs({"init": parts.init, "apply": parts.apply})))
        variables = _variables(parts)
        ran = _run(entry, traced, programs, seed, backend, json) if run else None
        if out is not None:
            write_jaxprs(programs, out, callbacks)
        if file and ran:
            save_arrays(ran.variables, file)
    if ran:
        note_random(ran.random, seed)
    if json:
        output.write_json(_document(variables, programs, ran, split_time))
        return
    _write_variables(variables)
    if ran:
        _write_run(ran, split_time)
    elif out is None:
        output.write("")
        output.write_listings(programs)


# --- what is asked for ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Choice:
    """What the options say of how to split; None where they say nothing."""

    key_args: tuple[int, ...] | None
    tag: str | None
    auto: bool
    known: tuple[int, ...] | None

    def check(self) -> None:
        """Refuse options that do not go together. Raises ArgumentsError."""
        chosen = "--known" if self.known is not None else "--auto" if self.auto else None
        others = {
            "--auto": self.auto and chosen != "--auto",
            "--key-args": self.key_args is not None and chosen == "--known",
            "--tag": self.tag is not None,
        }
        for other, given in others.items():
            if chosen and given:
                what = "says what init is given" if other == "--key-args" else "finds the variables"
                hint = f"{chosen} {what}: leave {other} out"
                raise ArgumentsError(f"{chosen} and {other} do not go together", hint)


def _check_output(run: bool, backend: str | None, save: str | None, out: str | None) -> None:
    """Refuse places that do not suit, and what goes with --run alone. Raises OutputError."""
    for option, given in ("--save", save), ("--backend", backend):
        if given is not None and not run:
            raise OutputError(f"{option} goes with --run, without which nothing runs", "add --run")
    if out is not None and not (out.endswith(os.sep) or os.path.isdir(out)):
        folder = "DIR/" if out in (STDOUT, "") else f"{os.path.splitext(out)[0]}/"
        raise OutputError(f"unzip writes two files, and '{out}' is no folder", f"write -o {folder}")


# --- the split --------------------------------------------------------------------------------


def _split(entry: Entry | ProgramEntry, program: Program, choice: _Choice) -> Unzipped:
    from jaxprtool.ir.program import type_check
    from jaxprtool.passes.unzip import Unzip

    if choice.known is not None:
        parts = Unzip(known=tuple(map(entry.position, choice.known))).unzipped(program)
    elif choice.auto and choice.key_args is None:
        parts = Unzip(auto=True).unzipped(program)
    else:
        keys = _keys(entry, program, choice.key_args)
        if choice.auto:
            parts = Unzip(key_args=keys, auto=True).unzipped(program)
        else:
            parts = _split_at_sown(program, keys, choice.tag)
    for half in (parts.init, parts.apply):
        type_check(half, program)
    return parts


def _split_at_sown(program: Program, keys: tuple[int, ...], tag: str | None) -> Unzipped:
    from jaxprtool.ir.equations import equations
    from jaxprtool.ir.outline import top_jaxpr
    from jaxprtool.passes.unzip import Unzip, UnzipError
    from jaxprtool.primitives import VARIABLE, sow_p

    found = equations(top_jaxpr(program))
    tags = {eqn.params["tag"] for eqn in found if eqn.primitive is sow_p}
    if tag is not None and tag not in tags:
        there = f"there are: {', '.join(sorted(tags))}" if tags else None
        message = f"{program.name} sows nothing under the tag '{tag}'"
        raise ArgumentsError(message, did_you_mean(tag, tags) or there)
    try:
        return Unzip(tag=tag or VARIABLE, key_args=keys).unzipped(program)
    except UnzipError as error:
        hint = error.hint
        if tag is None and VARIABLE not in tags:
            hint = "--auto chooses variables where none are declared"
        raise UnzipError(error.message, hint) from error


def _keys(
    entry: Entry | ProgramEntry, program: Program, key_args: tuple[int, ...] | None
) -> tuple[int, ...]:
    """The positional arguments of the program that are keys. Raises ArgumentsError."""
    import jax
    import jax.numpy as jnp

    from jaxprtool.ir.equations import type_of

    hint = "--key-args says which arguments are keys, or none"
    args, _ = jax.tree.unflatten(program.in_tree, range(len(program.in_avals)))
    if key_args is None:
        key_args = (0,) if args else ()
    try:
        positions = tuple(map(entry.position, key_args))
    except ArgumentsError as error:
        raise ArgumentsError(error.message, hint) from None
    for leaf in jax.tree.leaves([args[position] for position in positions]):
        aval, name = program.in_avals[leaf], program.arg_names[leaf]
        # Keys of both kinds, and integers to make some from.
        kinds = (jax.dtypes.prng_key, jnp.integer)
        if not any(jnp.issubdtype(aval.dtype, kind) for kind in kinds):
            message = f"argument '{name}' of {program.name} is {type_of(aval)}, which is no key"
            raise ArgumentsError(message, f"{hint}; --known takes arguments of any type")
    return positions


# --- the variables ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Variable:
    """An array among the variables: its path, its type, and the equation that sows it."""

    path: str
    aval: Any
    eqn: Any


def _variables(parts: Unzipped) -> list[_Variable]:
    """The variables in the order in which they are declared."""
    import jax

    from jaxprtool.ir.trees import leaf_paths
    from jaxprtool.passes.unzip.variables import leaf_tree

    order = jax.tree.leaves(leaf_tree(parts.variables))
    paths = leaf_paths(parts.init.out_tree)
    eqns = [variable.eqn for variable in parts.variables for _ in variable.avals]
    found = zip(order, paths, parts.init.out_avals, strict=True)
    return [_Variable(path, aval, eqns[i]) for i, path, aval in sorted(found, key=lambda f: f[0])]


def _write_variables(variables: list[_Variable]) -> None:
    from jaxprtool.ir.equations import size_of, type_of
    from jaxprtool.ir.outline import NamedValue
    from jaxprtool.render.comments import Places
    from jaxprtool.render.stats import values_table
    from jaxprtool.render.view import View

    if not variables:
        output.write("no variables")
        return
    places = Places(source=True, scopes=False)
    named = [NamedValue(v.path, type_of(v.aval), size_of(v.aval)) for v in variables]
    lines = [places.line(v.eqn) or "" for v in variables]
    sources = lines if any(lines) else None  # variables that are arguments come from no line
    table, columns = values_table("variable", named, sources), output.width()
    if sources and max(map(len, View(table, 1000).plain().splitlines())) > columns:
        table = values_table("variable", named, list(map(os.path.basename, sources)))
    output.write_rendered(View(table, columns))


# --- init and apply, run ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Ran:
    """What init and apply gave, and the names of arguments that were random."""

    init: RunReport
    apply: RunReport
    variables: dict[str, Any]
    random: tuple[str, ...]


def _run(
    entry: Entry | ProgramEntry,
    traced: Program,
    programs: Halves,
    seed: int,
    backend: str | None,
    json: bool,
) -> _Ran:
    """Run init, and apply on its results, on the values that `run` would run `traced` on."""
    from jaxprtool.execute.fill import fill
    from jaxprtool.ir.trees import leaf_paths

    halves = dict(programs)
    if halves.keys() != {"init", "apply"}:
        names = ", ".join(halves)
        raise PipelineError(f"--run takes init and apply, and the passes gave {names}")
    init, apply = halves["init"], halves["apply"]
    filled = fill(traced, dict(zip(traced.arg_names, entry.arguments(), strict=True)), seed)
    values = dict(zip(traced.arg_names, filled.arguments, strict=True))
    made = execute(init, fill(init, values).arguments, (backend, None), 0, json)
    paths = leaf_paths(init.out_tree)
    variables = dict(zip(paths, (out.value for out in made.outputs), strict=True))
    if len(variables) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise OutputError(f"two variables have the path '{twice}'")
    values |= {out.name: out.value for out in made.outputs}
    given = execute(apply, fill(apply, values).arguments, (backend, None), None, json)
    return _Ran(made, given, variables, filled.random)


def _write_run(ran: _Ran, split_time: float) -> None:
    output.write("")
    reports.write_outputs(ran.apply)
    output.write("")
    init, apply = reports.steps(ran.init, split_time), reports.steps(ran.apply)
    rows = [(step, init.get(step, ""), apply.get(step, "")) for step in init | apply]
    output.write_table(("step", "init", "apply"), rows)


def _document(
    variables: list[_Variable], programs: Halves, ran: _Ran | None, split_time: float
) -> dict[str, Any]:
    from jaxprtool import jaxcompat
    from jaxprtool.ir.equations import size_of, type_of
    from jaxprtool.render.as_json import program_document

    rows = []
    for variable in variables:
        aval, frame = variable.aval, jaxcompat.user_frame(variable.eqn)
        sizes = [size if isinstance(size, int) else str(size) for size in aval.shape]
        rows.append(
            {
                "name": variable.path,
                "type": type_of(aval),
                "shape": sizes,
                "dtype": str(aval.dtype),
                "bytes": size_of(aval),
                "source": {"file": frame[0], "line": frame[1]} if frame else None,
            }
        )
    document = {"variables": rows, "programs": [program_document(p) for _, p in programs]}
    if ran is not None:
        document["runs"] = [
            reports.document(report, split_time, ran.random) for report in (ran.init, ran.apply)
        ]
    return document
