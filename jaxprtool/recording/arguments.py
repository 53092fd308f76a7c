"""Describe the flat arguments and results of a compilation: types and shardings."""

from __future__ import annotations

from typing import Any

import jax

from jaxprtool.analysis.recorded_run import Argument


def given_argument(path: str, aval: Any, leaf: Any, donated: bool) -> Argument:
    """Describe a flat argument that a function is called with."""
    host = ""
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        host = "numpy" if hasattr(leaf, "shape") else "python"
    return argument(path, aval, _sharding(leaf), donated, host)


def argument(
    path: str, aval: Any, sharding: str = "", donated: bool = False, host: str = ""
) -> Argument:
    """Describe a flat argument or result by its type; the other parameters are fields of it."""
    text = aval.str_short(short_dtypes=True) if hasattr(aval, "str_short") else str(aval)
    shape = tuple(n if isinstance(n, int) else str(n) for n in getattr(aval, "shape", ()))
    dtype = text.removeprefix("~").partition("[")[0]
    return Argument(
        path, dtype, shape, bool(getattr(aval, "weak_type", False)), sharding, donated, host
    )


def _sharding(leaf: Any) -> str:
    """Return the sharding of an array over several devices, or the device it is committed to."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        return ""
    if len(sharding.device_set) > 1:
        spec, mesh = getattr(sharding, "spec", None), getattr(sharding, "mesh", None)
        if spec is None or mesh is None:
            return str(sharding)
        axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
        return f"{spec} on {axes}".replace("PartitionSpec", "P")
    if not getattr(leaf, "committed", False):
        return ""
    return str(next(iter(sharding.device_set)))
