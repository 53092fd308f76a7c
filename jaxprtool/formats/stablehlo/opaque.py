"""Operations without a rule, kept as equations.

An operation that XLA compiles becomes a `call_exported` equation, whose artifact has the operation
alone. It can be shown, written, lowered and run; it has no derivative and no batching rule. One of
another dialect becomes an opaque equation, which can only be looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax import export
from jax.extend.mlir.dialects import func as func_dialect

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError, described
from jaxprtool.formats.stablehlo.reader import Operation, attribute_names, ir, stablehlo_rules
from jaxprtool.ir.equations import equations
from jaxprtool.ir.rules import rule

#: The bindings of the dialect, which have no types.
func: Any = func_dialect

#: Operations that do more than to compute their results.
_EFFECTS = ("infeed", "outfeed", "send", "recv")


@rule(stablehlo_rules, "opaque")
def _kept(op: Operation, error: UnsupportedError) -> list[Any]:
    """Return the results of an equation that stands for an operation.

    Args:
        op: The operation.
        error: Why it cannot be read.

    Raises:
        UnsupportedError: If it has effects, whose order and count an equation would not keep.
    """
    has_effect = "has_side_effect" in op.op.attributes and op.op.attributes["has_side_effect"].value
    if has_effect or op.name.removeprefix("stablehlo.") in _EFFECTS:
        raise op.refused("it has effects, so --opaque does not keep it")
    captured = _captured(op.op)
    operands = [op.reader.value(x) for x in captured]
    try:
        code = jaxcompat.portable_artifact(_alone(op, captured))
    except Exception as fault:  # jaxlib's errors have no common class
        return _opaque(op, operands, error, described(fault))
    artifact = _artifact(op, captured, code)
    traced = jax.make_jaxpr(artifact.call)(*artifact.in_avals)
    (eqn,) = (
        eqn
        for eqn in equations(jaxcompat.open_jaxpr(traced))
        if eqn.primitive.name == "call_exported"
    )
    return list(eqn.primitive.bind(*operands, **eqn.params))


def _captured(op: Any) -> list[Any]:
    """Return the operands of an operation, and the values that its regions read from outside."""
    inside: set[Any] = set()
    values: dict[Any, None] = dict.fromkeys(op.operands)

    def visit(inner: Any) -> Any:
        inside.update(inner.results)
        for region in inner.regions:
            for block in region.blocks:
                inside.update(block.arguments)
        return ir.WalkResult.ADVANCE

    op.walk(visit)

    def read(inner: Any) -> Any:
        values.update(dict.fromkeys(value for value in inner.operands if value not in inside))
        return ir.WalkResult.ADVANCE

    op.walk(read)
    return [*values]


def _alone(op: Operation, operands: Sequence[Any]) -> Any:
    """Return a module of an operation alone, and of the functions that it may call."""
    module = ir.Module.create(loc=op.op.location)
    results = [result.type for result in op.op.results]
    with ir.InsertionPoint(module.body), op.op.location:
        kind = ir.FunctionType.get([value.type for value in operands], results)
        main = func.FuncOp("main", kind, visibility="public")
        if any(_names_symbol(op.op.attributes[n]) for n in attribute_names(op.op.attributes)):
            main_of_module = op.reader.main.attributes["sym_name"].value
            for name, other in (op.reader.functions | op.reader.symbols).items():
                if name != main_of_module:
                    other.clone(ir.InsertionPoint(module.body))
        block = main.add_entry_block()
    with ir.InsertionPoint(block), op.op.location:
        copy = op.op.clone()
        arguments = dict(zip(operands, block.arguments, strict=True))

        def visit(inner: Any) -> Any:
            for i, value in enumerate(inner.operands):
                if value in arguments:
                    inner.operands[i] = arguments[value]
            return ir.WalkResult.ADVANCE

        copy.operation.walk(visit)
        func.ReturnOp([*copy.operation.results])
    module.operation.verify()
    return module


def _names_symbol(attribute: Any) -> bool:
    match attribute:
        case ir.FlatSymbolRefAttr():
            return True
        case ir.ArrayAttr():
            return any(map(_names_symbol, attribute))
    return False


def _artifact(op: Operation, operands: Sequence[Any], code: bytes) -> export.Exported:
    """Return an artifact of a module with the signature of an operation, for all platforms."""
    kinds = [op.reader.type_of(value.type) for value in operands]
    results = op.result_types

    def like(*args: Any) -> Any:
        return tuple(np.zeros(kind.shape, kind.dtype) for kind in results)

    checks = [export.DisabledSafetyCheck.platform()]
    jitted = jax.jit(like, keep_unused=True)
    artifact = export.export(jitted, disabled_checks=checks)(*kinds)
    return replace(artifact, fun_name=op.kind, mlir_module_serialized=code, _get_vjp=None)


def _opaque(op: Operation, operands: Sequence[Any], error: UnsupportedError, why: str) -> list[Any]:
    """Return the results of an opaque equation, with the attributes as its parameters."""
    avals = [jax.core.ShapedArray(kind.shape, kind.dtype) for kind in op.result_types]
    primitive = jaxcompat.opaque_primitive(
        op.kind,
        tuple(jax.typeof(x) for x in operands),
        tuple(avals),
        frozenset(),
        f"{op.kind}{op.place}",
        f"it has no rule, and is none of XLA's operations ({why})",
        error.hint,
    )
    names = attribute_names(op.op.attributes)
    return list(primitive.bind(*operands, **{n: str(op.op.attributes[n]) for n in names}))
