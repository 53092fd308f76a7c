"""Choose which source lines represent an equation, for a block of code.

    with jaxprtool.frames("library"):
        print(jaxprtool.source(program))

This affects only what is shown and counted by lines, not programs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, NamedTuple, TypeAlias, get_args

from jaxprtool.errors import ArgumentsError

#: Which frames are shown: the user's own followed by the library's, only the library's, or all.
FrameChoice: TypeAlias = Literal["mine", "library", "all"]


class FrameView(NamedTuple):
    """Which frames are shown, and the installed packages whose files are the user's."""

    choice: FrameChoice = "mine"
    mine: tuple[str, ...] = ()


_DEFAULT = FrameView()

#: The modules whose frames JAX hides: their innermost frame is always one of the few lines that
#: bind primitives.
_HIDDEN = ("jax", "jaxlib")

_view = ContextVar("view", default=_DEFAULT)


def current_frame_view() -> FrameView:
    """Return the view that the innermost `frames` sets."""
    return _view.get()


@contextmanager
def frames(choice: FrameChoice = "mine", mine: str | Sequence[str] = ()) -> Iterator[None]:
    """Choose the lines that equations are shown and counted by, in a `with` block.

    Args:
        choice: `"mine"`: the nearest line of the user's own files. `"library"`: the innermost line,
            in whatever file. `"all"`: like `"mine"`, followed by all library frames behind it.
        mine: Installed packages, such as `"pgx"` or `"mujoco.mjx"`, whose files are the user's own.

    Raises:
        ArgumentsError: If the choice is unknown, a name is not the name of a package, or it is JAX.
    """
    if choice not in get_args(FrameChoice):
        raise ArgumentsError(f"frames must be mine, library or all, not {choice!r}")
    names = [mine] if isinstance(mine, str) else list(mine)
    for name in names:
        if not all(part.isidentifier() for part in name.replace("-", "_").split(".")):
            raise ArgumentsError(f"'{name}' is not the name of a package")
        if name.partition(".")[0] in _HIDDEN:
            raise ArgumentsError(
                f"the lines of {name} cannot be your own: JAX hides its own frames",
                "`cost --by primitive` shows what JAX does for a line",
            )
    packages = tuple(name.replace("-", "_").replace(".", "/") for name in names)
    token = _view.set(FrameView(choice, packages))
    try:
        yield
    finally:
        _view.reset(token)
