"""Calls of Python functions that are not there: of functions that raise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxprtool import jaxcompat
from jaxprtool.formats.python.expressions import (
    Call,
    Expression,
    Function,
    Giving,
    Name,
    Slot,
    call,
)
from jaxprtool.formats.python.naming import identifier
from jaxprtool.formats.python.rules.calls import called_name
from jaxprtool.formats.python.rules.loops import group
from jaxprtool.formats.python.rules.table import python_rules, unsupported
from jaxprtool.formats.python.values import dtype_name
from jaxprtool.ir.callbacks import BATCHING_HINT, HINT, Stub, batching_rule, callback_name
from jaxprtool.ir.rules import rule
from jaxprtool.jaxcompat import JaxprEqn


@rule(python_rules, "pure_callback")
def _pure_callback(eqn: JaxprEqn, *operands: Slot) -> Iterator[Expression]:
    options = {k: v for k in ("sharding", "vmap_method") if (v := eqn.params[k]) is not None}
    yield _with_results("jax.pure_callback", eqn, operands, options)


@rule(python_rules, "io_callback")
def _io_callback(eqn: JaxprEqn, *operands: Slot) -> Iterator[Expression]:
    options = {k: v for k in ("sharding", "ordered") if (v := eqn.params[k])}
    yield _with_results("io_callback", eqn, operands, options)


@rule(python_rules, "debug_callback")
def _debug_callback(eqn: JaxprEqn, *operands: Slot) -> Iterator[Expression]:
    options = {"partitioned": True} if eqn.params["partitioned"] else {}
    if eqn.params["effect"] == jaxcompat.DEBUG_EFFECTS["OrderedDebugEffect"]:
        options["ordered"] = True
    yield Giving(Call(Name("jax.debug.callback"), (_stub(eqn), *operands), options), None)


def _with_results(
    path: str, eqn: JaxprEqn, operands: tuple[Slot, ...], options: dict[str, Any]
) -> Expression:
    types = tuple(
        call("jax.ShapeDtypeStruct", v.aval.shape, dtype_name(v.aval.dtype)) for v in eqn.outvars
    )
    called = Call(Name(path), (_stub(eqn), types, *operands), options)
    return Giving(called, tuple(range(len(types))))


@rule(python_rules, "custom_vmap_call")
def _custom_vmap(eqn: JaxprEqn, *operands: Slot) -> Iterator[Expression]:
    stub, results = eqn.params["rule"], group(range(len(eqn.outvars)))
    if not isinstance(stub, Stub):
        error = unsupported(eqn, f"it holds {batching_rule(eqn)}")
        error.hint = BATCHING_HINT
        raise error
    body = jaxcompat.close_jaxpr(eqn.params["call"])
    function = Function(
        body,
        called_name(eqn),
        tuple(range(len(operands))),
        results,
        decorators=(Name("jax.custom_batching.custom_vmap"),),
        rules=(("def_vmap", (_raising(stub),), {}),),
        kept=True,
        key=(jaxcompat.open_jaxpr(body), stub),
    )
    yield Giving(Call(function, operands), results)


def _stub(eqn: JaxprEqn) -> Function:
    """The function that stands for the callback of an equation. Raises UnsupportedError."""
    stub = eqn.params["callback"]
    if not isinstance(stub, Stub):
        error = unsupported(eqn, f"it calls a Python function ({callback_name(stub)})")
        error.hint = HINT
        raise error
    return _raising(stub)


def _raising(stub: Stub) -> Function:
    return Function(
        None,
        identifier(stub.name.rpartition(".")[2]),
        (),
        None,
        ("*operands",),
        kept=True,
        renamed=False,
        key=("stub", stub.name),
        raises=call("RuntimeError", stub.message),
    )
