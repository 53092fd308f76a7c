"""The axis that a program is mapped over, and where along it values are mapped."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxprtool import jaxcompat

#: The dimension of a value along which it is mapped; None: it is unmapped, the same in all lanes.
Dim = int | None


@dataclass(frozen=True)
class Axis:
    """A mapped axis: its name, if collectives may name it, and its size, the number of lanes.

    `spmd_name` are the mesh axes that its lanes are spread over (`spmd_axis_name` of jax.vmap),
    `mesh_axes` the explicit mesh axes over which the mapped dimension of arguments is sharded. With
    `derivatives`, results of custom derivatives that are the same in all lanes are mapped where
    their derivatives are.
    """

    name: Hashable
    size: Any
    spmd_name: tuple[Any, ...] | None = None
    mesh_axes: tuple[Any, ...] | None = None
    derivatives: bool = True

    @cached_property
    def data(self) -> Any:
        """The axis as JAX's own batching rules take it."""
        return jaxcompat.axis_data(self.name, self.size, self.spmd_name, self.mesh_axes)

    def aval(self, aval: Any, dim: Dim) -> Any:
        """The type of a value whose lanes are of type `aval`, mapped along dimension `dim`."""
        return jaxcompat.mapped_aval(self.data, dim, aval)


def at_bdim(dims: Iterable[Dim], target: int) -> tuple[Dim, ...]:
    """Return `target` for every value that is mapped, and None for the others."""
    return tuple(None if dim is None else target for dim in dims)
