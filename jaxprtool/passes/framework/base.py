"""The base class of passes: a frozen dataclass whose fields are its options.

    @dataclass(frozen=True)
    class Batch(Pass):
        \"\"\"Add a batch axis: the jaxpr of vmap(f) from the jaxpr of f.\"\"\"

        name: ClassVar[str] = "batch"
        axis_size: int | None = None

        def __call__(self, program: Program) -> Program: ...

The first line of the class's docstring is its help; `jaxprtool explain` shows the whole docstring.
Its fields, with their types and defaults, are its options in a pipeline: `-p "batch(axis_size=8)"`.
A pass is pure: it returns a new Program (or several named ones, a `Programs`) and does not change
its argument. It raises `UnsupportedError` for an unsupported program; it never returns a program
that computes something else.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Hashable, Iterable
from dataclasses import MISSING, dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from jaxprtool.errors import PipelineError, did_you_mean

if TYPE_CHECKING:
    from jaxprtool.ir.program import Program, Programs


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
