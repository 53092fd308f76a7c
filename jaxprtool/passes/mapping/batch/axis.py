"""The axis that a program is mapped over, and the batch dimensions of values."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxprtool import jaxcompat
from jaxprtool.jaxcompat import Aval

#: The batch dimension of a value; None if it is unmapped, the same in all batch elements.
Dim = int | None


@dataclass(frozen=True)
class Axis:
    """A mapped axis.

    Attributes:
        name: The name of the axis for collectives, or None.
        size: The number of batch elements.
        spmd_name: The mesh axes over which batch elements are sharded (`spmd_axis_name` of
            `jax.vmap`).
        mesh_axes: The explicit mesh axes over which the batch dimension of arguments is sharded.
        derivatives: Map an unmapped result of a custom derivative call if its derivative is mapped.
    """

    name: Hashable
    size: Any
    spmd_name: tuple[Hashable, ...] | None = None
    mesh_axes: tuple[Hashable, ...] | None = None
    derivatives: bool = True

    @cached_property
    def data(self) -> Any:
        """The axis in the form that JAX's own batching rules take."""
        return jaxcompat.axis_data(self.name, self.size, self.spmd_name, self.mesh_axes)

    def aval(self, aval: Aval, dim: Dim) -> Aval:
        """Return the type of a value whose batch elements have type `aval`, batched at `dim`."""
        return jaxcompat.mapped_aval(self.data, dim, aval)
