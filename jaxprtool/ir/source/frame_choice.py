"""Which lines stand for an equation, chosen for a block of code.

    with jaxprtool.frames("library"):
        print(jaxprtool.source(program))

It changes what is shown and counted by lines, and no program.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, NamedTuple, TypeAlias, get_args

from jaxprtool.errors import ArgumentsError

#: Which frames are named: the user's own with the library's behind it, that alone, or all.
FrameChoice: TypeAlias = Literal["mine", "library", "all"]


class View(NamedTuple):
    """Which frames are named, and the installed packages whose files are the user's."""

    choice: FrameChoice = "mine"
    mine: tuple[str, ...] = ()


_DEFAULT = View()

#: What JAX hides the frames of. The nearest of them would be the same few lines that bind all
#: primitives.
_HIDDEN = ("jax", "jaxlib")

_view = ContextVar("view", default=_DEFAULT)


def current_view() -> View:
    """Return what the innermost `frames` says."""
    return _view.get()


@contextmanager
def frames(choice: FrameChoice = "mine", mine: str | Sequence[str] = ()) -> Iterator[None]:
    """Choose the lines that equations are shown and counted by, in a `with` block.

    Args:
        choice: `"mine"`: the nearest line of the user's own files. `"library"`: the innermost line,
            whosever it is. `"all"`: as `"mine"`, with all frames of libraries behind it.
        mine: Installed packages, such as `"pgx"` or `"mujoco.mjx"`, whose files are the user's own.

    Raises:
        ArgumentsError: For another choice, for what is no name of a package, and for JAX.
    """
    if choice not in get_args(FrameChoice):
        raise ArgumentsError(f"frames are mine, library or all, not {choice!r}")
    names = [mine] if isinstance(mine, str) else list(mine)
    for name in names:
        if not all(part.isidentifier() for part in name.replace("-", "_").split(".")):
            raise ArgumentsError(f"'{name}' is not the name of a package")
        if name.partition(".")[0] in _HIDDEN:
            raise ArgumentsError(
                f"the lines of {name} cannot be yours: the frames of JAX itself are hidden, as JAX "
                "hides them",
                "`cost --by primitive` tells apart what JAX does for a line",
            )
    packages = tuple(name.replace("-", "_").replace(".", "/") for name in names)
    token = _view.set(View(choice, packages))
    try:
        yield
    finally:
        _view.reset(token)
