"""The open tables of batching rules, and JAX's own rules, for every primitive without one here.

A rule of `batch_rules` is a Python function that computes with JAX on operands of which some have a
batch dimension. It is traced once per signature (see `templates`). A rule of `structured_rules` is
for an equation that holds jaxprs: it says which batch dimensions its operands must have, and makes
the one equation that replaces the old.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxprtool import jaxcompat
from jaxprtool.errors import JaxprToolError, UnsupportedError
from jaxprtool.ir.equations import named
from jaxprtool.ir.rules import RuleTable
from jaxprtool.ir.structured import View
from jaxprtool.jaxcompat import Atom, JaxprEqn, Params, Primitive, Var
from jaxprtool.passes.batch.axes import BatchError, BatchTypeError
from jaxprtool.passes.batch.axis import Axis, Dim


class BatchUnsupported(UnsupportedError, NotImplementedError):
    """An equation that cannot be mapped over an axis; names it and its source line."""


#: The operands of a rule.
Operands = Sequence[jax.Array]

#: `rule(axis, primitive, operands, dims, params) -> (results, dims)`. Results and their dimensions
#: are lists if the primitive has multiple results, as in JAX's own table. At least one operand is
#: mapped, unless the equation has an effect. None leaves the case to JAX's own rule.
BatchRule = Callable[[Axis, Primitive, Operands, Sequence[Dim], Params], tuple[Any, Any] | None]

#: The open table: a plug-in adds its primitive's rule by name.
batch_rules: RuleTable[BatchRule] = RuleTable()


@dataclass(frozen=True)
class Rebuilt:
    """What replaces a structured equation.

    Attributes:
        operand_dims: The batch dimensions that operands must have; they are moved or broadcast.
        out_dims: The batch dimensions of the results.
        build: Makes the equation, of these operands and results.
        consts: Values that it takes as operands before those.
    """

    operand_dims: tuple[Dim, ...]
    out_dims: tuple[Dim, ...]
    build: Callable[[Sequence[Atom], Sequence[Var]], JaxprEqn]
    consts: tuple[Any, ...] = ()


def rebuilt(
    view: View,
    operand_dims: Iterable[Dim],
    out_dims: Iterable[Dim],
    consts: tuple[Any, ...] = (),
    **changes: Any,
) -> Rebuilt:
    """Return what replaces the equation of a view: one like it, with fields of the view changed.

    Those that hold its operands and results change in any case.
    """

    def build(operands: Sequence[Atom], outs: Sequence[Var]) -> JaxprEqn:
        new = view.eqn.replace(invars=list(operands), outvars=list(outs))
        return view.of(new).rebuild(**changes)

    return Rebuilt(tuple(operand_dims), tuple(out_dims), build, consts)


#: `rule(eqn, dims, axis) -> Rebuilt`, or None if the equation is one for `batch_rules` after all.
StructuredRule = Callable[[JaxprEqn, Sequence[Dim], Axis], Rebuilt | None]

#: The open table of rules for equations that hold jaxprs.
structured_rules: RuleTable[StructuredRule] = RuleTable()


def jaxs_rule(
    axis: Axis, primitive: Primitive, operands: Operands, dims: Sequence[Dim], params: Params
) -> tuple[Any, Any]:
    """Apply JAX's own rule for a primitive, from the table that other packages use too."""
    rule = jaxcompat.jaxs_batching_rules.get(primitive)
    if rule is None and not any(dim is not None for dim in dims):
        results = primitive.bind(*operands, **params)
        return results, [None] * len(results) if primitive.multiple_results else None
    if rule is None:
        raise NotImplementedError(f"Batching rule for '{primitive}' not implemented")
    return rule(axis.data, tuple(operands), tuple(dims), **params)


def refusal(
    eqn: JaxprEqn, reason: str, kind: type[JaxprToolError] = BatchUnsupported
) -> JaxprToolError:
    """Return the error for an equation that cannot be batched, which it names."""
    return kind(f"{named(eqn)} cannot be batched: {reason}")


def failed(eqn: JaxprEqn, error: Exception) -> JaxprToolError:
    """Return the error for an equation whose rule raised one, of its kind and in its words."""
    reason = " ".join(str(error).split()) or type(error).__name__
    kinds = {ValueError: BatchError, TypeError: BatchTypeError}
    kind = next((kinds[k] for k in kinds if isinstance(error, k)), BatchUnsupported)
    return refusal(eqn, reason, kind)
