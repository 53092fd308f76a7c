"""What a pass is: a frozen dataclass whose fields are its options, called with a Program.

    @dataclass(frozen=True)
    class Batch(Pass):
        \"\"\"Add a batch axis: the jaxpr of vmap(f) from the jaxpr of f.\"\"\"

        name: ClassVar[str] = "batch"
        axis_size: int | None = None

        def __call__(self, program: Program) -> Program: ...

The first line of the class's docstring is its help, all of it what `jaxprtool explain` says; its
fields with their types and defaults are its options in a pipeline: `-p "batch(axis_size=8)"`. A
pass is pure: it gives a new Program (or several named ones, a `Programs`) and leaves the one it was
given as it was. What it cannot do it says by raising `UnsupportedError`; it never gives a program
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
    from jaxprtool.ir.programs.program import Program, Programs


@dataclass(frozen=True)
class MemoryNote:
    """A note that tells the temporary memory of a program, which whoever shows it estimates."""

    program: Program


@dataclass(frozen=True)
class Pass:
    """The base class of all passes; subclasses set `name` and define `__call__`."""

    name: ClassVar[str] = ""

    #: What it is for: a title that `jaxprtool passes` lists it under; any text, empty for none.
    group: ClassVar[str] = ""

    #: Whether what it makes computes the same of the same arguments: so that both can be compared.
    preserves: ClassVar[bool] = True

    #: Whether checks and debugging prints of the program are still made by what it makes.
    keeps_checks: ClassVar[bool] = True

    #: Whether it is for programs with symbolic sizes, and has nothing to do for others.
    symbolic: ClassVar[bool] = False

    #: The field that takes all options by other names, as a dict: `specialize(n=512)`.
    more_options: ClassVar[str] = ""

    #: The fields whose text the pass reads itself, which need no quotes in a pipeline:
    #: `policy=save_only_these_names('a')`.
    expressions: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, program: Program) -> Program | Programs:
        raise NotImplementedError

    def notes(self, before: Program, after: Program | Programs) -> Iterable[str | MemoryNote]:
        """Return what a user should know of what the pass did, a line for each; nothing by default.

        `after` is the very same object as `before` if the pass left the program as it was.
        """
        return ()

    @property
    def bound_axes(self) -> tuple[tuple[Hashable, int], ...]:
        """The named axes that the pass binds, with their sizes: free in what it is given."""
        return ()

    def __str__(self) -> str:
        """The pass as a pipeline spells it, options that differ from their defaults included."""
        given = [
            f"{name}={v!r}"
            for o in options(type(self))
            if (value := getattr(self, o.name)) != o.default
            for name, v in (value if o.name == self.more_options else {o.name: value}).items()
        ]
        name = type(self).name  # of an instance it may be an option, as of jit(name=...)
        return f"{name}({', '.join(given)})" if given else name


@dataclass(frozen=True)
class Option:
    """One option of a pass: a field of its dataclass. `default` is MISSING if it must be given."""

    name: str
    type: Any
    default: Any

    @property
    def type_name(self) -> str:
        """The type as the pass's source spells it."""
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
        """The default as Python spells it; None if the option must be given."""
        return None if self.required else repr(self.default)


def options(cls: type[Pass]) -> list[Option]:
    """Return the options of a pass class, in the order in which they may be given by position."""
    hints = _type_hints(cls)  # type: ignore[arg-type]  # mypy takes the instances' __hash__
    result = []
    for field in fields(cls):
        default = field.default
        if default is MISSING and field.default_factory is not MISSING:
            default = field.default_factory()
        result.append(Option(field.name, hints[field.name], default))
    return result


@lru_cache(maxsize=256)
def _type_hints(cls: type) -> dict[str, Any]:
    """Return the types of a class's fields, whose texts take a while to evaluate."""
    return typing.get_type_hints(cls)


def summary(cls: type[Pass]) -> str:
    """Return the one-line help of a pass class: the first line of its docstring."""
    lines = (cls.__doc__ or "").strip().splitlines()
    return lines[0] if lines else ""


def build(cls: type[Pass], args: list[Any], kwargs: dict[str, Any]) -> Pass:
    """Return an instance of a pass class from the options a pipeline gives it.

    Raises PipelineError for an unknown option, one given twice or missing, or a value of another
    type than the field's.
    """
    known = {option.name: option for option in options(cls)}
    more = known.pop(cls.more_options, None)
    others = {name: value for name, value in kwargs.items() if more and name not in known}
    kwargs = {name: value for name, value in kwargs.items() if name not in others}
    if len(args) > len(known):
        raise PipelineError(
            f"pass '{cls.name}' takes at most {len(known)} options, not {len(args)}",
            hint=f"its options are: {', '.join(known)}" if known else None,
        )
    given = dict(zip(known, args, strict=False))
    for name in kwargs:
        if name not in known:
            has = f"it has: {', '.join(known)}" if known else "it has none"
            raise PipelineError(
                f"pass '{cls.name}' has no option '{name}'; {has}", did_you_mean(name, known)
            )
        if name in given:
            raise PipelineError(f"pass '{cls.name}' is given option '{name}' twice")
    given |= kwargs
    for name, option in known.items():
        if name not in given and option.required:
            raise PipelineError(f"pass '{cls.name}' needs option '{name}' ({option.type_name})")
        if name in given and not _fits(given[name], option.type):
            raise PipelineError(
                f"option '{name}' of pass '{cls.name}' is {option.type_name}, not {given[name]!r}"
            )
    if more:
        (_, wanted) = typing.get_args(more.type)
        kind = getattr(wanted, "__name__", wanted)
        for name, value in others.items():
            if not _fits(value, wanted):
                raise PipelineError(
                    f"option '{name}' of pass '{cls.name}' is {kind}, not {value!r}"
                )
        given[more.name] = others
    return cls(**given)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a literal is of an annotated type; an annotation we cannot read accepts all."""
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
