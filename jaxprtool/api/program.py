"""Public functions for loading programs."""

from __future__ import annotations

from collections.abc import Sequence

from jaxprtool.api.targets import find
from jaxprtool.ir.programs.program import Program, Programs
from jaxprtool.loading.trace import StaticArguments, trace

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
    in_specs: str | None = None,
    out_specs: str | None = None,
) -> Program:
    """Return the Program that the command line loads for TARGET and --args.

    Args:
        target: A function, `package.module:attr.path` or `path/file.py:attr.path`, or a program
            file.
        args: The arguments as text: `"f32[8,3], training=static(False)"`. By default the target's
            example arguments.
        factory: Whether to call the target to get the function.
        static_argnums: Positions of arguments that are not traced.
        static_argnames: Names of arguments that are not traced.
        in_specs: Shardings of the arguments on the mesh of `jax.set_mesh`, as for `--in-specs`.
        out_specs: Shardings of the results, as for `--out-specs`.

    Raises:
        JaxprToolError: If the target or an argument is invalid.
    """
    static: StaticArguments = {"static_argnums": static_argnums, "static_argnames": static_argnames}
    return find(target, args, factory, in_specs=in_specs, out_specs=out_specs, **static).trace()
