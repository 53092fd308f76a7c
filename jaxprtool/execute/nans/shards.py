"""What the equations of a `shard_map` make, on each device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxprtool import jaxcompat
from jaxprtool.execute.nans.rounds import Checked
from jaxprtool.execute.nans.states import INF, NAN
from jaxprtool.ir.equations import equations
from jaxprtool.ir.structured import ShardMap
from jaxprtool.jaxcompat import ClosedJaxpr, JaxprEqn


class Made(NamedTuple):
    """An equation of a `shard_map` that makes something.

    Attributes:
        eqn: The equation.
        state: What it makes.
        devices: The devices that it does so on.
        operands: What it was given on the first of them; nothing if it is in a loop or a branch.
        results: What it gave there.
    """

    eqn: JaxprEqn
    state: int
    devices: tuple[str, ...]
    operands: Sequence[Any]
    results: Sequence[Any]


def can_be_checked(view: ShardMap) -> bool:
    """Return True if a `shard_map` runs on devices that are known, on all axes of their mesh."""
    if not isinstance(view.mesh, Mesh) or view.eqn.effects:
        return False
    return view.eqn.params["newly_manual_axes"] == set(view.mesh.axis_names)


def run_checked(view: ShardMap, operands: Sequence[Any]) -> tuple[list[Any], list[Made]]:
    """Return the results of a `shard_map`, and what its equations make."""
    inside = list(equations(jaxcompat.open_jaxpr(view.body)))
    numbers = {id(eqn): i for i, eqn in enumerate(inside)}

    def checked(*shards: Any) -> Any:
        run = Checked(numbers, view.mesh.axis_names if view.eqn.params["check_vma"] else ())
        results = run.results(view.body, shards)
        return results, run.flags()[None]

    everywhere = PartitionSpec(view.mesh.axis_names)
    outs, flags = _mapped(view, checked, (list(view.out_specs), everywhere))(*operands)
    found = np.asarray(flags)
    made = [_made(view, operands, inside[i], found[:, i]) for i in np.flatnonzero(found.any(0))]
    return list(outs), made


def _made(view: ShardMap, operands: Sequence[Any], eqn: JaxprEqn, flags: np.ndarray) -> Made:
    devices = view.mesh.devices.flatten()
    state = int(flags.max()) & NAN or INF
    flags = (flags & state) != 0
    place = int(flags.argmax())
    counts = len(eqn.invars)

    def recorded(*shards: Any) -> Any:
        run = _Recording(eqn)
        run.results(view.body, shards)
        return [jax.numpy.asarray(x)[None] for x in run.values]

    everywhere = PartitionSpec(view.mesh.axis_names)
    values = [x[place] for x in _mapped(view, recorded, everywhere)(*operands)]
    names = tuple(str(device) for device, flag in zip(devices, flags, strict=True) if flag)
    return Made(eqn, state, names, values[:counts], values[counts:])


def _mapped(view: ShardMap, function: Any, out_specs: Any) -> Any:
    return jax.jit(
        jax.shard_map(
            function,
            mesh=view.mesh,
            in_specs=tuple(view.in_specs),
            out_specs=out_specs,
            check_vma=view.eqn.params["check_vma"],
        )
    )


class _Recording(Checked):
    """Keeps what an equation is given and gives, if it is in no loop and no branch."""

    def __init__(self, wanted: JaxprEqn):
        super().__init__({})
        self._wanted = wanted
        self.values: list[Any] = []

    def evaluate(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        results = self.bound(eqn, operands)
        if eqn is self._wanted:
            self.values = [x.data for x in (*operands, *results)]
        return results

    def _inside(self, body: ClosedJaxpr, arguments: Sequence[Any]) -> tuple[list[Any], Any]:
        inner = _Recording(self._wanted)
        return inner.results(body, arguments), inner.flags()
