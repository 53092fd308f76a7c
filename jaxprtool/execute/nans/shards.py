"""NaNs and infinities produced by the equations of a `shard_map` on each device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.execute.nans.compiled import Masked, OriginCounter
from jaxprtool.execute.nans.states import INF, NAN
from jaxprtool.execute.stepping.shards import on_shards
from jaxprtool.ir.core.equations import equations
from jaxprtool.ir.core.structured import ShardMap
from jaxprtool.ir.dataflow.dataflow import DataFlow
from jaxprtool.jaxcompat import Atom, Jaxpr, JaxprEqn, Literal


class ShardOrigin(NamedTuple):
    """An equation of a `shard_map` that produces a NaN or an infinity.

    Attributes:
        eqn: The equation.
        state: Which of the two.
        devices: The devices on which it does.
        operands: Its operands on the first of them; empty in a loop or a branch.
        results: Its results there.
    """

    eqn: JaxprEqn
    state: int
    devices: tuple[str, ...]
    operands: Sequence[Any]
    results: Sequence[Any]


class CheckedShards:
    """A `shard_map` compiled as a whole with checks of its equations.

    Args:
        view: The `shard_map`.
        operands: Its operands.
    """

    def __init__(self, view: ShardMap, operands: Sequence[Any]):
        self._view, self._operands = view, operands
        #: The equations inside, at any depth.
        self.equations = list(equations(jaxcompat.open_jaxpr(view.body)))
        self._numbers = {id(eqn): i for i, eqn in enumerate(self.equations)}
        outs, counts = self._run(None, list(map(Masked, operands)))
        #: The results.
        self.results = [x.data for x in outs]
        self._flags = np.asarray(counts) > 0

    def made(self) -> Iterator[ShardOrigin]:
        """Yield each equation that produces a NaN, or else an infinity."""
        for number in np.flatnonzero(self._flags.any((0, 2))):
            nan, inf = self._flags[:, number].T
            state, flags = (NAN, nan) if nan.any() else (INF, inf)
            yield self._recorded(self.equations[number], state, flags)

    def sources(self, eqn: JaxprEqn) -> list[JaxprEqn | int | None]:
        """Return the source of each operand of an equation.

        It is the equation that computes the operand, or the position of the `shard_map` operand of
        which it is a shard; None for a literal or a constant.
        """
        top = jaxcompat.open_jaxpr(self._view.body)
        flow = DataFlow(top)
        jaxpr = next(body for body in flow.holders if any(each is eqn for each in body.eqns))
        return [_source(flow, jaxpr, atom) for atom in eqn.invars]

    def followed(self, indices: Any, operands: Sequence[Masked]) -> list[Masked]:
        """Return the results with their masks.

        Args:
            indices: For each equation, the mask indices of its NaN and its infinity.
            operands: The operands with their masks.
        """
        return self._run(indices, operands)[0]

    def _run(self, indices: Any, operands: Sequence[Masked]) -> tuple[list[Masked], Any]:
        """Return the results and the counts on each device."""
        axes = self._view.mesh.axis_names
        varying = bool(self._view.eqn.params["check_vma"])
        masks = [x.mask for x in operands]

        def checked(*shards: Any) -> Any:
            run = OriginCounter(self._numbers, indices, axes, varying)
            outs = run.results(self._view.body, list(map(Masked, shards, masks)))
            noted = [x.mask for x in outs], run.counts()
            return [x.data for x in outs], jax.tree.map(lambda x: x[None], noted)

        run = jax.jit(on_shards(self._view, checked))
        outs, (of_devices, counts) = run(*(x.data for x in operands))
        everywhere = (None if mask is None else np.asarray(mask).any(0) for mask in of_devices)
        return list(map(Masked, outs, everywhere)), counts

    def _recorded(self, eqn: JaxprEqn, state: int, flags: np.ndarray) -> ShardOrigin:
        """Return the NaN or infinity of an equation, with its values on the first such device."""
        place, count = int(flags.argmax()), len(eqn.invars)

        def recorded(*shards: Any) -> Any:
            run = _Recorder(eqn)
            run.run(self._view.body, list(map(Masked, shards)))
            return [jnp.asarray(x)[None] for x in run.values]

        found = jax.jit(on_shards(self._view, recorded, with_results=False))(*self._operands)
        values = [x[place] for x in found]
        devices = self._view.mesh.devices.flatten()
        names = tuple(str(device) for device, flag in zip(devices, flags, strict=True) if flag)
        return ShardOrigin(eqn, state, names, values[:count], values[count:])


def _source(flow: DataFlow, jaxpr: Jaxpr, atom: Atom) -> JaxprEqn | int | None:
    """Return the equation of an atom, or its argument position, looking through calls."""
    while type(atom) is not Literal:
        position = flow.definition(jaxpr, atom)
        if position is not None:
            return jaxpr.eqns[position]
        position = flow.argument(jaxpr, atom)
        if position is None or jaxpr is flow.top:
            return position
        origins = flow.origins(flow.holders[jaxpr][0], position)
        if not origins:
            return None
        jaxpr, atom = origins[0]
    return None


class _Recorder(OriginCounter):
    """Records operands and results of equations outside of loops and branches."""

    def __init__(self, wanted: JaxprEqn):
        super().__init__({})
        self._wanted = wanted
        self.values: list[Any] = []

    def evaluate(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        results = self.bound(eqn, operands)
        if eqn is self._wanted:
            self.values = [x.data for x in (*operands, *results)]
        return results

    def inner(self) -> _Recorder:
        return _Recorder(self._wanted)
