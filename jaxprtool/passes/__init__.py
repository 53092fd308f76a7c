r'''Passes: frozen dataclasses whose fields are their options; and pipelines of them.

    @dataclass(frozen=True)
    class Batch(Pass):
        """Add a batch axis: the jaxpr of vmap(f) from the jaxpr of f."""

        name: ClassVar[str] = "batch"
        axis_size: int | None = None

        def __call__(self, program: Program) -> Program: ...

The first line of the class's docstring is its help; `jaxprtool explain` shows the whole docstring.
Its fields, with their types and defaults, are its options in a pipeline: `-p "batch(axis_size=8)"`.
A pass is pure: it returns a new Program (or several named ones, a `Programs`) and does not change
its argument. It raises `UnsupportedError` for an unsupported program; it never returns a program
that computes something else.
'''

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import time
import types
import typing
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import MISSING, dataclass, fields
from functools import lru_cache, partial
from importlib.metadata import EntryPoint, entry_points
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from jaxprtool.errors import (
    CheckError,
    JaxprToolError,
    PipelineError,
    PluginError,
    PluginWarning,
    described,
    did_you_mean,
)
from jaxprtool.ir.notation import expressions

if TYPE_CHECKING:
    from jaxprtool.ir.program import Program, Programs


# --- base -----------------------------------------------------------------------------------------
# The base class of passes: a frozen dataclass whose fields are its options.


@dataclass(frozen=True)
class MemoryNote:
    """A note on a program's temporary memory, which is estimated only when the note is printed."""

    program: Program


@dataclass(frozen=True)
class Pass:
    """The base class of all passes; subclasses set `name` and define `__call__`."""

    name: ClassVar[str] = ""

    #: The title under which `jaxprtool explain` lists it; any text, empty for none.
    group: ClassVar[str] = ""

    #: True if the result computes the same values from the same arguments, so both can be compared.
    preserves: ClassVar[bool] = True

    #: True if the result still has the checks and debugging prints of the program.
    keeps_checks: ClassVar[bool] = True

    #: True if the pass only applies to programs with symbolic sizes.
    symbolic: ClassVar[bool] = False

    #: The field that takes all options by other names, as a dict: `specialize(n=512)`.
    more_options: ClassVar[str] = ""

    #: The fields whose text the pass parses itself, so that a pipeline need not quote it:
    #: `policy=save_only_these_names('a')`.
    expressions: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, program: Program) -> Program | Programs:
        raise NotImplementedError

    def notes(self, before: Program, after: Program | Programs) -> Iterable[str | MemoryNote]:
        """Return messages for the user about the rewrite, one line each; none by default.

        Args:
            before: The program that the pass was applied to.
            after: The result: the same object as `before` if the pass changed nothing.
        """
        return ()

    @property
    def bound_axes(self) -> tuple[tuple[Hashable, int], ...]:
        """The named axes that the pass binds, with their sizes. They are free in its argument."""
        return ()

    @property
    def partitions(self) -> bool:
        """Whether the pass shards values over the Auto axes of the mesh that is set."""
        return False

    def __str__(self) -> str:
        """Return the pass as a pipeline text, with the options that differ from their defaults."""
        arguments = [
            f"{name}={v!r}"
            for o in pass_options(type(self))
            if (value := getattr(self, o.name)) != o.default
            for name, v in (value if o.name == self.more_options else {o.name: value}).items()
        ]
        name = type(self).name  # of an instance it may be an option, as of jit(name=...)
        return f"{name}({', '.join(arguments)})" if arguments else name


@dataclass(frozen=True)
class PassOption:
    """An option of a pass: a field of its dataclass. `default` is MISSING if it is required."""

    name: str
    type: Any
    default: Any

    @property
    def type_name(self) -> str:
        """The type as written in the source of the pass."""
        return (
            self.type.__name__
            if isinstance(self.type, type)
            else str(self.type).replace("typing.", "")
        )

    @property
    def required(self) -> bool:
        return self.default is MISSING

    @property
    def default_text(self) -> str | None:
        """The default as Python code; None if the option is required."""
        return None if self.required else repr(self.default)


def pass_options(cls: type[Pass]) -> list[PassOption]:
    """Return the options of a pass class, in the order of their positions in a pipeline."""
    hints = _type_hints(cls)  # type: ignore[arg-type]  # mypy takes the instances' __hash__
    result = []
    for field in fields(cls):
        default = field.default
        if default is MISSING and field.default_factory is not MISSING:
            default = field.default_factory()
        result.append(PassOption(field.name, hints[field.name], default))
    return result


@lru_cache(maxsize=256)
def _type_hints(cls: type) -> dict[str, Any]:
    """Return the types of a class's fields. Cached: their annotations are slow to evaluate."""
    return typing.get_type_hints(cls)


def pass_summary(cls: type[Pass]) -> str:
    """Return the one-line help of a pass class: the first line of its docstring."""
    lines = (cls.__doc__ or "").strip().splitlines()
    return lines[0] if lines else ""


def build_pass(cls: type[Pass], args: list[Any], kwargs: dict[str, Any]) -> Pass:
    """Return an instance of a pass class with the options of a pipeline.

    Raises PipelineError if an option is unknown, missing or given twice, or a value has the wrong
    type.
    """
    declared = {option.name: option for option in pass_options(cls)}
    more = declared.pop(cls.more_options, None)
    others = {name: value for name, value in kwargs.items() if more and name not in declared}
    kwargs = {name: value for name, value in kwargs.items() if name not in others}
    if len(args) > len(declared):
        raise PipelineError(
            f"pass '{cls.name}' takes at most {len(declared)} options, not {len(args)}",
            hint=f"its options are: {', '.join(declared)}" if declared else None,
        )
    values = dict(zip(declared, args, strict=False))
    for name in kwargs:
        if name not in declared:
            has = f"it has: {', '.join(declared)}" if declared else "it has none"
            raise PipelineError(
                f"pass '{cls.name}' has no option '{name}'; {has}", did_you_mean(name, declared)
            )
        if name in values:
            raise PipelineError(f"pass '{cls.name}' got option '{name}' twice")
    values |= kwargs
    for name, option in declared.items():
        if name not in values and option.required:
            raise PipelineError(f"pass '{cls.name}' needs option '{name}' ({option.type_name})")
        if name in values and not _fits(values[name], option.type):
            raise PipelineError(
                f"option '{name}' of pass '{cls.name}' must be {option.type_name}, "
                f"not {values[name]!r}"
            )
    if more:
        (_, wanted) = typing.get_args(more.type)
        type_name = getattr(wanted, "__name__", wanted)
        for name, value in others.items():
            if not _fits(value, wanted):
                raise PipelineError(
                    f"option '{name}' of pass '{cls.name}' must be {type_name}, not {value!r}"
                )
        values[more.name] = others
    return cls(**values)


def _fits(value: Any, hint: Any) -> bool:
    """Return True if a literal matches an annotation; an unsupported annotation accepts all."""
    if hint is Any:
        return True
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, a) for a in arguments)
    if origin is typing.Literal:
        return value in arguments
    if origin is tuple and isinstance(value, tuple):
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return all(_fits(item, arguments[0]) for item in value)
        return len(arguments) == len(value) and all(map(_fits, value, arguments))
    if origin is list and isinstance(value, list):
        return all(_fits(item, arguments[0]) for item in value)
    if hint is None:
        return value is None
    expected = origin or hint
    if not isinstance(expected, type):
        return True
    if isinstance(value, bool) and expected in (int, float):
        return False
    return isinstance(value, (int, float) if expected is float else expected)


# --- pipeline -------------------------------------------------------------------------------------
# Pipelines: passes found by name, and run one after the other.
#
# The text is a Python expression list that is parsed and never evaluated. Each item names a pass,
# with its options as literals: `dce`, `batch(axis_size=8)`. After a pass that returns several
# programs, `apply.dce` runs only on the one named `apply`, and a bare `dce` on each of them. `-O1`
# names a whole pipeline (see `levels`), whose passes are repeated until nothing changes.
#
# After every pass the result is type-checked, so that an error in a program names the pass that
# caused it.


@dataclass(frozen=True)
class Step:
    """A step of a pipeline.

    Attributes:
        transform: A pass, or a named pipeline.
        only: The name of the program that it runs on; None for every program.
    """

    transform: Pass | Pipeline
    only: str | None = None

    def __str__(self) -> str:
        text = str(self.transform)
        return f"{self.only}.{text.removeprefix('-')}" if self.only else text


class Observer:
    """Callbacks before and after each pass on each program, to be overridden."""

    def before(self, step: Step, program: Program) -> None:
        """Do something before `step` runs on `program`; nothing by default."""

    def after(
        self, step: Step, program: Program, result: Program | Programs, seconds: float
    ) -> None:
        """Do something after `step` has run on `program`; nothing by default.

        Args:
            step: The step.
            program: The program that it ran on.
            result: The result.
            seconds: The time that it took, in seconds, without the type check.
        """


@dataclass(frozen=True)
class Pipeline:
    """Passes that run one after the other; called with a Program, it returns the rewritten one.

    Attributes:
        steps: The passes, in order.
        max_iterations: The maximum number of times that they run. They are repeated as long as
            they change anything.
        name: The name of the pipeline in `levels`, such as `O1`; else "".
    """

    steps: tuple[Step, ...] = ()
    max_iterations: int = 1
    name: str = ""

    @classmethod
    def parse(cls, text: str) -> Pipeline:
        """Parse a pipeline.

        Args:
            text: Passes separated by commas, such as `batch(axis_size=8), dce`.

        Raises:
            PipelineError: If the text is malformed, or a pass or an option does not exist.
        """
        source = expressions.parse_arguments(text, "the pipeline", PipelineError)
        if source.keywords:
            name, node = source.keywords[0]
            raise source.fail(node, f"option '{name}' has no pass", "write PASS(option=value)")
        return cls(tuple(_step(source, node) for node in source.args))

    def __str__(self) -> str:
        return f"-{self.name}" if self.name else ", ".join(map(str, self.steps))

    def passes(self) -> Iterator[Pass]:
        """Yield its passes, including those of the pipelines that it names."""
        for step in self.flat():
            assert isinstance(step.transform, Pass)
            yield step.transform

    def flat(self) -> list[Step]:
        """Return its steps, with the pipelines that it names replaced by their steps."""
        nested = (
            step.transform.flat() if isinstance(step.transform, Pipeline) else [step]
            for step in self.steps
        )
        return list(chain.from_iterable(nested))

    @property
    def bound_axes(self) -> tuple[tuple[Hashable, int], ...]:
        """The named axes that its passes bind, which must be free when a function is traced."""
        axes: dict[Hashable, int] = {}
        for step in reversed(self.steps):  # the first pass to bind a name determines its size
            axes.update(step.transform.bound_axes)
        return tuple(axes.items())

    @property
    def partitions(self) -> bool:
        """Whether one of its passes shards values over the Auto axes of the mesh that is set."""
        return any(step.transform.partitions for step in self.steps)

    def __call__(self, program: Program | Programs) -> Program | Programs:
        """Return the program after every pass, each of which is type-checked; see `run`."""
        return self.run(program)

    def run(
        self,
        program: Program | Programs,
        observer: Observer | None = None,
        *,
        check: bool = True,
    ) -> Program | Programs:
        """Run the passes.

        Args:
            program: The program, or several by name.
            observer: Called before and after each pass on each program.
            check: Type-check every equation after each pass. If False, check only the types of the
                results.

        Returns:
            The rewritten program, or several by name.

        Raises:
            CheckError: If a pass returns an ill-typed program.
            PipelineError: If a step names a program that does not exist.
        """
        observer = observer or Observer()
        result = program
        # The last argument of each step that it left unchanged.
        settled: dict[int, Program | Programs] = {}
        token = _notes.set({})
        try:
            for _ in range(self.max_iterations):
                previous = result
                for i, step in enumerate(self.steps):
                    if settled.get(i) is not result:
                        argument, result = result, _run_step(step, result, observer, check)
                        if result is argument:
                            settled[i] = result
                if result is previous:
                    break
        finally:
            _notes.reset(token)
        return result


_notes: ContextVar[dict[Hashable, Any]] = ContextVar("notes")


def notes_of_run() -> dict[Hashable, Any]:
    """Return what passes note for themselves while a pipeline runs, by pass; dropped at its end.

    A pass that runs again, as in `-O1`, need not look again at what it has left as it is. Notes
    save time, and change no result. Outside of a pipeline there are none.
    """
    return _notes.get({})


def _run_step(
    step: Step, state: Program | Programs, observer: Observer, check: bool
) -> Program | Programs:
    if not isinstance(state, Mapping):
        if step.only is not None:
            raise PipelineError(f"no program '{step.only}' for '{step}': there is only one program")
        return _run_pass(step, state, observer, check)
    if step.only is not None and step.only not in state:
        names = ", ".join(state)
        hint = did_you_mean(step.only, state)
        raise PipelineError(f"no program '{step.only}' for '{step}'; available: {names}", hint)
    results: dict[str, Program] = {}
    for name, program in state.items():
        if step.only not in (None, name):
            results[name] = program
            continue
        result = _run_pass(step, program, observer, check)
        if isinstance(result, Mapping):
            results.update({f"{name}.{part}": new for part, new in result.items()})
        else:
            results[name] = result
    if len(results) == len(state) and all(results[name] is state[name] for name in state):
        return state
    return type(state)(results)


def _run_pass(step: Step, program: Program, observer: Observer, check: bool) -> Program | Programs:
    """Return the result of a pass on a program: the same object if it changes nothing."""
    # Imports JAX, which parsing a pipeline does not.
    from jaxprtool.ir.program import Program, check_results, type_check

    if isinstance(step.transform, Pipeline):
        return step.transform.run(program, observer, check=check)
    observer.before(step, program)
    start = time.perf_counter()
    result = _apply(step, program)
    seconds = time.perf_counter() - start
    if _unchanged(program, result):
        observer.after(step, program, program, seconds)
        return program
    preserves = step.transform.preserves
    try:
        if check:
            for new in result.values() if isinstance(result, Mapping) else [result]:
                type_check(new, program, preserves=preserves)
        elif preserves and not step.transform.symbolic and isinstance(result, Program):
            check_results(result, program)
    except CheckError as error:
        raise CheckError(f"pass '{step}' produced an invalid program: {error.message}") from error
    observer.after(step, program, result, seconds)
    return result


def _unchanged(program: Program, result: Program | Programs) -> bool:
    if result is program:
        return True
    if isinstance(result, Mapping) or result.jaxpr is not program.jaxpr:
        return False
    names = (field.name for field in fields(program) if field.name != "jaxpr")
    return all(getattr(program, name) == getattr(result, name) for name in names)


def _apply(step: Step, program: Program) -> Program | Programs:
    """Return the result of a pass. An error of a plug-in becomes a PluginError that names it."""
    from jaxprtool.ir.backends import backend_start_error
    from jaxprtool.ir.program import Program, Programs

    try:
        result = step.transform(program)
    except JaxprToolError:
        raise
    except (Exception, SystemExit) as error:
        if failure := backend_start_error(error):
            raise failure from error
        raise PluginError(
            f"pass '{step}' failed on {program.name}: {described(error)}",
            "see --traceback for the place",
        ) from error
    if not isinstance(result, Program | Programs):
        raise PluginError(f"pass '{step}' returned {type(result).__name__}, not a Program")
    return result


def _level(name: str) -> Pipeline:
    """Return the pipeline of a row of `levels`."""
    repeated, last = (
        Pipeline.parse(text).steps for text in (levels[name].repeated, levels[name].last)
    )
    if not last:
        return Pipeline(repeated, MAX_ITERATIONS, name)
    return Pipeline((Step(Pipeline(repeated, MAX_ITERATIONS)), *last), name=name)


def _step(source: expressions.ParsedArguments, node: ast.expr) -> Step:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node = node.operand
        if not isinstance(node, ast.Name) or node.id not in levels:
            names = ", ".join(f"-{name}" for name in levels)
            raise source.fail(
                node, f"'-{source.segment(node)}' is not a pipeline", f"available: {names}"
            )
    call = node.func if isinstance(node, ast.Call) else node
    only, _, name = _dotted(call).rpartition(".")
    if not name:
        raise source.fail(
            node,
            f"'{source.segment(node)}' is not a pass",
            "write a pass as NAME or NAME(option=value)",
        )
    if name in levels and call is node:
        return Step(_level(name), only or None)
    cls = find_pass(name)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    if isinstance(node, ast.Call):
        args = [source.literal(a) for a in node.args]
        for keyword in node.keywords:
            if keyword.arg is None:
                raise source.fail(node, "unpacking with '**' is not allowed in the pipeline")
            if keyword.arg in kwargs:
                raise source.fail(node, f"option '{keyword.arg}' is given twice")
            kwargs[keyword.arg] = _option(source, keyword.arg in cls.expressions, keyword.value)
    return Step(build_pass(cls, args, kwargs), only or None)


#: The kinds of expressions that an option may be if the pass parses its text itself.
_EXPRESSIONS = ast.Name | ast.Attribute | ast.Call | ast.Tuple | ast.List | ast.Dict


def _option(source: expressions.ParsedArguments, is_expression: bool, node: ast.expr) -> Any:
    """Return the value of an option: a literal, or the text that the pass parses itself."""
    if is_expression and isinstance(node, _EXPRESSIONS) and not _is_literal(node):
        return ast.unparse(node)
    return source.literal(node)


def _is_literal(node: ast.expr) -> bool:
    """Return True if a node has no names: all of it is a number, a text, or a display of them."""
    return not any(isinstance(child, ast.Name) for child in ast.walk(node))


def _dotted(node: ast.expr) -> str:
    """Return a dotted name such as `init.forward.dce` from its nodes; empty for other nodes."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (prefix := _dotted(node.value)):
        return f"{prefix}.{node.attr}"
    return ""


# --- registry -------------------------------------------------------------------------------------
# The registry of passes: entry points, plug-in files and modules, and `register`.
#
# Every pass, built-in ones included, is found in the entry-point group `jaxprtool.passes`, and is
# imported only when a pipeline names it. `register` adds a class by hand, and `load_plugin` imports
# a file or module and registers the passes that it defines. A plug-in that cannot be imported, or
# whose name is in use, causes a `PluginWarning` that names it; everything else continues to work.
#
# Reading the entry points of all installed packages takes tens of milliseconds. It is done once,
# and again when `sys.path` has changed or a name is not found: the package may have been installed
# since.

GROUP = "jaxprtool.passes"

P = TypeVar("P", bound=type[Pass])


@dataclass(frozen=True)
class PassSource:
    """The source of a pass.

    Attributes:
        name: The name of the pass.
        find_origin: Returns its package, file or module; reading a package's name takes time.
        load: Imports the class.
    """

    name: str
    find_origin: Callable[[], str]
    load: Callable[[], type[Pass]]

    @property
    def origin(self) -> str:
        """Return the package, file or module that defines the pass."""
        return self.find_origin()


_registered: dict[str, PassSource] = {}


def register(cls: P) -> P:
    """Make a Pass subclass available to pipelines under its `name`; usable as a decorator.

    A class redefined under the same name in the same module replaces the old one, as when a
    notebook cell is run again. A name that another module or package has taken is not replaced;
    the class is ignored with a `PluginWarning`.

    Args:
        cls: The class, with a `name`.

    Returns:
        The class.

    Raises:
        TypeError: If `cls` is not a subclass of `Pass` with a name.
    """
    if not (isinstance(cls, type) and issubclass(cls, Pass) and cls.name):
        raise TypeError(f"register takes a subclass of jaxprtool.Pass with a name, not {cls!r}")
    _add(cls, cls.__module__)
    return cls


def _add(cls: type[Pass], origin: str) -> None:
    taken = available().get(cls.name)
    if taken is not None and taken.origin != origin:
        _warn_of_clash(cls.name, origin, taken)
        return
    _registered[cls.name] = PassSource(cls.name, lambda: origin, lambda: cls)


def _warn_of_clash(name: str, origin: str, taken: PassSource) -> None:
    message = f"pass '{name}' of {origin} is ignored: {taken.origin} has a pass of that name"
    warnings.warn(PluginWarning(message), stacklevel=3)


def available() -> dict[str, PassSource]:
    """Return every pass that a pipeline may name, sorted by name; imports none of them."""
    return dict(sorted({**_registered, **_installed(tuple(sys.path))}.items()))


@lru_cache(maxsize=1)
def _installed(path: tuple[str, ...]) -> Mapping[str, PassSource]:
    """Return the passes of the packages installed on `path`, which is `sys.path`."""
    sources: dict[str, PassSource] = {}
    for point in sorted(entry_points(group=GROUP), key=_builtin_first):
        source = PassSource(point.name, partial(_origin, point), partial(_load, point))
        first = sources.setdefault(point.name, source)
        if first is not source and first.origin != source.origin:
            _warn_of_clash(point.name, source.origin, first)
    return sources


def _builtin_first(point: EntryPoint) -> tuple[bool, str]:
    return (not point.value.startswith("jaxprtool."), point.value)


def _origin(point: EntryPoint) -> str:
    return point.dist.name if point.dist else point.module


def _load(point: EntryPoint) -> type[Pass]:
    try:
        cls = point.load()
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"pass '{point.name}' of {_origin(point)} cannot be imported: {described(error)}"
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, Pass)):
        raise PluginError(
            f"pass '{point.name}' of {_origin(point)} is not a subclass of jaxprtool.Pass"
        )
    return cls


def find_pass(name: str) -> type[Pass]:
    """Import and return the pass class of that name.

    Raises PipelineError, with the nearest name, for an unknown name, and PluginError if its module
    cannot be imported.
    """
    sources = available()
    if name not in sources:
        _installed.cache_clear()
        sources = available()
    if name not in sources:
        raise PipelineError(
            f"unknown pass '{name}'",
            did_you_mean(name, sources) or "`jaxprtool explain` lists the passes",
        )
    return sources[name].load()


def load_plugin(where: str) -> None:
    """Import a plug-in, a file `path/plugin.py` or a module's dotted name, and register its passes.

    The passes are the Pass subclasses that the module itself defines; a plug-in may also only add
    rules to the open tables (`dce_rules`). One that fails is skipped with a PluginWarning.
    """
    try:
        if where.endswith(".py"):
            module = import_file(Path(where), "jaxprtool_plugin")
        else:
            module = _import_module(where)
    except (Exception, SystemExit) as error:
        warnings.warn(
            PluginWarning(f"plug-in {where} is ignored: {described(error)}"), stacklevel=2
        )
        return
    for value in list(vars(module).values()):
        ours = isinstance(value, type) and issubclass(value, Pass) and value is not Pass
        if ours and value.__module__ == module.__name__ and value.name:
            _add(value, where)


def import_file(path: Path, prefix: str) -> ModuleType:
    """Import a Python file as a separate module, whose name begins with `prefix`."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    name = f"{prefix}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import_module(name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")
    return importlib.import_module(name)


# --- levels ---------------------------------------------------------------------------------------
# The named pipelines: `-O0` to `-O3`, in one table that plug-ins may extend.
#
# All are exact: values change only by the rounding of code that XLA compiles as a whole. None of
# O1's passes ever returns more equations than it gets.

#: The maximum number of repetitions.
MAX_ITERATIONS = 10


@dataclass(frozen=True)
class OptimizationLevel:
    """Passes to repeat until none changes anything, and passes to run once after them.

    `help` describes their purpose.
    """

    repeated: str = ""
    last: str = ""
    help: str = ""

    def __str__(self) -> str:
        repeated = f"{self.repeated}, until nothing changes" if self.repeated else "none"
        return f"{repeated}; then {self.last}" if self.last else repeated


_EXACT = "inline, forward, fold, simplify, cse, dce"

levels: dict[str, OptimizationLevel] = {
    "O0": OptimizationLevel(help="Leave the program as it was traced."),
    "O1": OptimizationLevel(
        _EXACT,
        help="Remove redundant and dead computations. The number of equations never grows, and "
        "results differ at most by the rounding of XLA's compilation.",
    ),
    "O2": OptimizationLevel(
        f"{_EXACT}, hoist",
        last="schedule",
        help="Run `-O1`, move loop-invariant computations out of loops, and order equations to "
        "use less memory.",
    ),
    "O3": OptimizationLevel(
        f"{_EXACT}, hoist",
        last="schedule, outline",
        help="Run `-O2`, then let XLA compile repeated bodies once, such as the layers of a "
        "model, which shortens the compilation of deep models.",
    ),
}
