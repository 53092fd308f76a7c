"""Opaque equations, whose code a file cannot hold, and calls of Python from a program.

An equation of a kernel has a compiler's objects among its parameters; one of another package has a
primitive that may be unknown where the file is read. Each has an `OpaquePrimitive` of its own
signature. It has the name of the original, the types of its operands and results, and its effects,
so a program with it can be looked at, checked and rewritten around it. Whatever needs to know how
it computes (running, lowering, derivatives, batching) raises UnsupportedError.
"""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import FunctionType, SimpleNamespace
from typing import Any, NoReturn

import jax
import numpy as np
from jax._src import callback, checkify, core, custom_batching, debugging, dtypes, effects
from jax._src.lib import xla_client
from jax._src.state import discharge
from jax._src.state import types as state_types
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir

from jaxprtool.errors import UnsupportedError
from jaxprtool.jaxcompat.jaxprs import Aval, Effect, Params

# --- opaque ---------------------------------------------------------------------------------------
# Opaque equations: those that a file describes, but from which JAX cannot rebuild what they run.


class OpaquePrimitive(Primitive):
    """The primitive of opaque equations with one signature at one line of the user's.

    Args:
        name: The name of the original primitive.
        operands: The types of the operands.
        results: The types of the results.
        effects: The effects; those on refs name the position of an operand.
        place: The equation in messages: `pallas_call at model.py:9`.
        reason: Why the file cannot have it: `the file only describes its compiler_params`.
        hint: What the user can do, or None.
    """

    multiple_results = True

    def __init__(
        self,
        name: str,
        operands: tuple[Aval, ...],
        results: tuple[Aval, ...],
        effects: frozenset[Effect],
        place: str,
        reason: str,
        hint: str | None,
    ) -> None:
        super().__init__(name)
        self.operands, self.results = operands, results
        self.place, self.reason, self.hint = place, reason, hint
        self._effects = effects
        self.def_effectful_abstract_eval(self._types)
        self.def_impl(self._refuse("run"))
        mlir.register_lowering(self, self._refuse("compiled"))
        batching.primitive_batchers[self] = self._refuse("batched")
        ad.primitive_jvps[self] = self._refuse("differentiated")
        ad.primitive_transposes[self] = self._refuse("transposed")
        discharge.register_discharge_rule(self)(self._refuse("run"))

    def refusal(self, what: str) -> UnsupportedError:
        """Return the error for a use that needs to know how the equation computes."""
        message = f"{self.place} is opaque in the file of this program, so it cannot be {what}"
        return UnsupportedError(f"{message}: {self.reason}", self.hint)

    def _refuse(self, what: str) -> Callable[..., NoReturn]:
        def refuse(*args: Any, **kwargs: Any) -> NoReturn:
            raise self.refusal(what)

        return refuse

    def _types(self, *operands: Aval, **params: Any) -> tuple[list[Aval], frozenset[Effect]]:
        got, wanted = ([aval.str_short() for aval in avals] for avals in (operands, self.operands))
        if got != wanted:
            raise self.refusal("given other operands")
        return list(self.results), self._effects


opaque_primitive = cache(OpaquePrimitive)


def is_opaque(eqn: JaxprEqn) -> bool:
    """Return True if an equation is opaque."""
    return isinstance(eqn.primitive, OpaquePrimitive)


# --- effects --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpaqueEffect(effects.Effect):
    """An effect of another package, by its name."""

    name: str

    def __str__(self) -> str:
        return self.name


for _table in (
    effects.lowerable_effects,
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,
):
    _table.add_type(OpaqueEffect)

_ON_REFS = {
    cls.__name__: cls
    for cls in (state_types.ReadEffect, state_types.WriteEffect, state_types.AccumEffect)
}
_AXIS = core.NamedAxisEffect.__name__


def effect_texts(eqn: JaxprEqn) -> tuple[Any, ...]:
    """Return the effects of an equation as texts, sorted, or pairs of a text and an operand."""
    texts = [
        (type(e).__name__, eqn.invars.index(e.input))
        if isinstance(e, state_types.RefEffect)
        else (_AXIS, e.name)
        if isinstance(e, core.NamedAxisEffect)
        else next((name for name, effect in DEBUG_EFFECTS.items() if e is effect), type(e).__name__)
        for e in eqn.effects
    ]
    return tuple(sorted(texts, key=str))


def effects_of(texts: Sequence[Any]) -> frozenset[Effect]:
    """Return the effects that `effect_texts` wrote. Raises ValueError."""
    return frozenset(map(_effect, texts))


def _effect(text: Any) -> Effect:
    match text:
        case (str(name), int(operand)) if name in _ON_REFS:
            return _ON_REFS[name](operand)
        case (str(name), axis) if name == _AXIS:
            return core.NamedAxisEffect(axis)
        case str(name):
            return DEBUG_EFFECTS.get(name) or OpaqueEffect(name)
    raise ValueError(f"{text!r} is not an effect")


# --- types ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpaqueMemory:
    """A memory space of a kernel, by its name."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class OpaqueDType(dtypes.ExtendedDType):
    """A dtype of another package, by its name, stored as an element of a known type."""

    name: str
    physical: Aval

    type = jax.dtypes.extended

    @property
    def _rules(self) -> Any:  # JAX asks for the rules by this name
        return SimpleNamespace(
            allow_conversion=False,
            physical_element_aval=lambda dtype: self.physical,
            tangent_dtype=lambda dtype: jax.dtypes.float0,
        )

    def __repr__(self) -> str:
        return self.name


# --- primitives -----------------------------------------------------------------------------------


def defining_module(primitive: Primitive) -> str | None:
    """Return the module that defines a primitive; None if `import jax` defines it.

    A primitive does not know its module: it is that of its rules. A script is the module that other
    processes import it as.
    """
    lowerings = (mlir._lowerings, *mlir._platform_specific_lowerings.values())
    rules = [
        *(getattr(table.get(primitive), "rule", None) for table in lowerings),
        *(getattr(primitive, name, None) for name in ("impl", "abstract_eval")),
        ad.primitive_jvps.get(primitive),
    ]
    modules = [module for rule in rules for module in _modules(rule)]
    others = (module for module in modules if not module.startswith(_OF_JAX))
    extensions = (module for module in modules if module.startswith(_EXTENSIONS))
    origin = next(others, None) or next(extensions, None)
    if origin == "__main__":
        script = getattr(sys.modules[origin], "__file__", None) or origin
        return os.path.splitext(os.path.basename(script))[0]
    return origin


#: Python's and JAX's modules. JAX's own extensions are imported separately.
_OF_JAX = ("functools", "builtins", "jax.", "jax._src.", "jaxlib.", "jaxprtool.")
_EXTENSIONS = ("jax._src.pallas.", "jax.experimental.", "jax._src.tpu_custom_call")


def _modules(rule: Any) -> list[str]:
    """Return the modules of a rule, and of the functions that a wrapper of JAX's closes over."""
    cells = [cell.cell_contents for cell in getattr(rule, "__closure__", None) or ()]
    functions = [getattr(rule, "func", None), *filter(callable, cells), rule]
    modules = (getattr(function, "__module__", None) for function in functions)
    return [module for module in modules if isinstance(module, str)]


def raised_by_pallas(error: BaseException) -> bool:
    """Return True if an exception passed through JAX's rules for kernels."""
    frames = traceback.walk_tb(error.__traceback__)
    modules = (frame.f_globals.get("__name__", "") for frame, _ in frames)
    return any(name.startswith(_EXTENSIONS[0]) for name in modules)


# --- callbacks ------------------------------------------------------------------------------------
# Calls of the user's Python functions from a program, and debugging effects.

Traceback = xla_client.Traceback

#: The object in `pure_callback` and `io_callback`: a function, and the tree of its arguments.
FlatCallback = callback._FlatCallback

DEBUG_EFFECTS = {
    "DebugEffect": debugging.debug_effect,
    "OrderedDebugEffect": debugging.ordered_debug_effect,
}

_OF_CHECKS = (*map(type, DEBUG_EFFECTS.values()), checkify.ErrorEffect)


#: The registry for the structure of a custom_vmap call's operands.
_OPERANDS = getattr(custom_batching, "tracing_registry", jax.tree_util.default_registry)


def flat_custom_vmap_trees(operands: int, results: int) -> Params:
    """Return the structures among the parameters of a custom_vmap call, for flat operands."""
    in_tree = _OPERANDS.flatten((0,) * operands)[1]
    return {"in_tree": in_tree, "out_tree": jax.tree_util.tree_structure((0,) * results)}


def is_check_effect(effect: Effect) -> bool:
    """Return True for the effect of a debugging callback or print, or of a `checkify.check`."""
    return isinstance(effect, _OF_CHECKS)


def checked_errors(eqn: JaxprEqn) -> tuple[tuple[str, ...], ...] | None:
    """Return the type and the texts of each error that a `checkify.check` may raise.

    Returns None for a check that was read from a file, which has only a description of the errors.
    """
    cls, errors = eqn.params["err_tree"].node_data()
    if cls is not checkify.Error:
        return None
    described = []
    for _, tree in sorted(errors.items()):
        cls, data = tree.node_data()
        texts = [str(leaf) for leaf in jax.tree.leaves(data) if not isinstance(leaf, Traceback)]
        described.append((cls.__name__, *texts))
    return tuple(described)


def numbered_errors(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Return the operands of an equation; of a `checkify.check`, with errors numbered from 0.

    JAX 0.10 numbers all errors of the process, so that each trace has other numbers.
    """
    if "err_tree" not in eqn.params or checked_errors(eqn) is None:
        return list(operands)
    error = jax.tree.unflatten(eqn.params["err_tree"], operands)
    codes = jax.tree.map(lambda code: np.searchsorted(sorted(error._metadata), code), error._code)
    return jax.tree.leaves((error._pred, codes, error._payload))


def callback_function(called: object) -> Any:
    """Return the user's function in an equation's parameter `called`, or custom_vmap's `rule`."""
    if isinstance(called, custom_batching.ClosedRule):
        return called.rule
    if isinstance(called, FunctionType) and called.__module__ == custom_batching.__name__:
        closed = inspect.getclosurevars(called).nonlocals.get("rule")  # for its derivative
        return called if closed is None else callback_function(closed)
    if isinstance(called, FlatCallback):
        return called.callback_func
    if isinstance(called, FunctionType) and called.__module__ == debugging.__name__:
        cells = zip(called.__code__.co_freevars, called.__closure__ or (), strict=True)
        return next((c.cell_contents for name, c in cells if name == "callback"), called)
    return called
