"""The Python face of jaxprtool: loading, tracing, and a Program with all that it can do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxprtool.ir.program import Program, Programs
from jaxprtool.loading.trace import trace
from jaxprtool.passes.pipeline import Pipeline
from jaxprtool.render.listing import listing
from jaxprtool.targets import find

__all__ = [
    "Program",
    "Programs",
    "load",
    "trace",
]


def load(
    target: str,
    args: str | None = None,
    *,
    factory: bool = False,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
) -> Program:
    """The Program that the command line would make of TARGET and --args.

    `target` is `package.module:attr.path` or `path/file.py:attr.path`, or a file with a program
    in it. `args` is an argument list as text, such as `"f32[8,3], training=static(False)"`;
    without it the target's own example arguments are used. Raises a `JaxprToolError` that says
    what is wrong with either.
    """
    entry = find(
        target,
        args,
        factory=factory,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
    )
    return entry.trace()


def _apply(
    program: Program, passes: str | Callable[[Program], Program | Programs]
) -> Program | Programs:
    """The program rewritten by a pass, or by a pipeline as text: `program.apply("dce")`."""
    transform = Pipeline.parse(passes) if isinstance(passes, str) else passes
    return transform(program)


def _plain(program: Program) -> str:
    return listing(program).plain()


def _html(program: Program) -> str:
    from jaxprtool.render.html import html  # of use in notebooks alone

    return html(program)


# A Program stands at the bottom of the house and cannot import what is built on it. Its three
# conveniences are attached here, the one place from which everything is in sight.
Program.apply = _apply  # type: ignore[method-assign, assignment]
Program.__str__ = _plain  # type: ignore[method-assign, assignment]
Program._repr_html_ = _html  # type: ignore[method-assign, assignment]
