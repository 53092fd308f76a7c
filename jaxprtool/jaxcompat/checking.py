"""JAX's type checker, and the residuals that `jax.checkpoint` saves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
from jax._src import ad_checkpoint, config, core, effects
from jax._src.effects import JaxprInputEffect
from jax._src.interpreters import ad as internal_ad
from jax._src.interpreters import mlir
from jax._src.interpreters import partial_eval as internal_pe
from jax.extend.core import (
    ClosedJaxpr,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    Primitive,
    Var,
    jaxprs_in_params,
)
from jax.extend.core import check_jaxpr as jaxs_check_jaxpr
from jax.extend.core.primitives import jit_p, remat_p
from jax.interpreters import ad
from jax.interpreters import partial_eval as pe
from jax.sharding import Mesh

from jaxprtool.jaxcompat.jaxprs import (
    AbstractRef,
    AnyJaxpr,
    Atom,
    Aval,
    Effect,
    Params,
    axes_bound,
    close_jaxpr,
    jax_dce_jaxpr,
    nested_type,
    open_jaxpr,
    rebound,
)
from jaxprtool.jaxcompat.kernels import OpaquePrimitive
from jaxprtool.jaxcompat.marks import MarkedCall

# --- checking -------------------------------------------------------------------------------------
# JAX's type checker, for jaxprs and for one equation, and the registered primitives.


def registered_primitives() -> Mapping[str, Primitive]:
    """Return the primitives that JAX can run, differentiate or check, also plug-ins', by name."""
    return _primitives_by_name(*map(len, _tables_of_primitives()))


@lru_cache(maxsize=1)
def _primitives_by_name(*sizes: int) -> Mapping[str, Primitive]:
    """Return all primitives in JAX's tables, which have these sizes now and only grow."""
    return {
        primitive.name: primitive
        for table in _tables_of_primitives()
        for primitive in table
        if not isinstance(primitive, MarkedCall | OpaquePrimitive)
    }


def _tables_of_primitives() -> list[Collection[Any]]:
    return [
        mlir._lowerings,
        *mlir._platform_specific_lowerings.values(),
        ad.primitive_jvps,
        core.custom_typechecks,
        pe.dce_rules,
    ]


#: Checks the body of a call, for the `check_jaxpr` that is running in this thread.
_check_body: ContextVar[Callable[[AnyJaxpr], None]] = ContextVar("_check_body")

#: The bodies that have been accepted before, each with the settings in which they were, and whether
#: their weak types were checked: passes keep most bodies as they are.
ACCEPTED: WeakKeyDictionary[AnyJaxpr, set[Hashable]] = WeakKeyDictionary()

#: The signatures of equations without bodies and effects that JAX's rules have accepted. A rule
#: takes a quarter of a millisecond, and a pass writes the same few kinds of equations each time.
ACCEPTED_SIGNATURES: set[Hashable] = set()
_MOST_SIGNATURES = 20_000

#: Primitives whose rules compare the types of operands and results with those of the bodies, but
#: do not check the bodies.
_BODIES_NOT_CHECKED = frozenset(
    ("scan", "while", "cond", "closed_call", "eval_jaxpr", "custom_jvp_call", "custom_vjp_call")
)


def check_jaxpr(
    jaxpr: Jaxpr, known: frozenset[JaxprEqn] | None = None, *, weak_types: bool = False
) -> None:
    """Check an open jaxpr with JAX's type checker, and each body in it, at every depth, once.

    JAX's own check visits a body at each call of it, which takes time in proportion to the calls
    with all bodies inlined. It does not visit the bodies of loops, branches and custom
    derivatives.

    Args:
        jaxpr: The jaxpr.
        known: The equations that JAX's checker accepts in the present context, outside of bodies
            that bind axes. Of other equations that are alike, one is checked. If None,
            all are checked.
        weak_types: Check that the results of the other equations, and constants, have the weak
            types that they are annotated with. JAX's checker does not check those.

    Raises:
        Exception: The error of JAX's checker.
    """
    alike = None if known is None else _FastCheck(known, weak_types)
    faults: dict[Hashable, Exception | None] = {}

    def once(body: ClosedJaxpr) -> None:
        request = body, config.trace_context()
        if request not in faults:
            try:
                if alike is None or not alike.is_accepted(body, request[1]):
                    check(body)
            except Exception as fault:  # raised again where the body is called
                faults[request] = fault
            else:
                faults[request] = None
                if alike is not None and body is not jaxpr:
                    alike.accept(body, request[1])
        if (error := faults[request]) is not None:
            raise error

    def check(body: ClosedJaxpr) -> None:
        if jax.debug_key_reuse.value or alike is None or not alike.is_well_typed(body):
            _check_with_jax(body)
        for eqn in body.eqns:
            if eqn.primitive.name in _BODIES_NOT_CHECKED:
                with eqn.ctx.manager:
                    for inner in jaxprs_in_params(eqn.params):
                        once(inner)

    token = _check_body.set(once)
    try:
        once(jaxpr)
    finally:
        _check_body.reset(token)


def _by_check_body(jaxpr: AnyJaxpr) -> None:
    """Check a body in the `check_jaxpr` that is running."""
    _check_body.get()(jaxpr)


class _CheckRules:
    """JAX's rules for checking equations by primitive; they check bodies by `_check_body`."""

    def __contains__(self, primitive: Primitive) -> bool:
        return primitive in core.custom_typechecks

    def __getitem__(self, primitive: Primitive) -> Any:
        return _rule(core.custom_typechecks[primitive])


@cache
def _rule(rule: Any) -> Any:
    return rebound(rule, core=SimpleNamespace(**{**vars(core), **_CHECKS}), **_CHECKS)


#: JAX's checks, which check bodies by `_check_body`.
_check_call = rebound(core._check_call, check_jaxpr=_by_check_body)
_check_eqn = rebound(core.check_eqn, check_jaxpr=_by_check_body)
_CHECKS = {"check_jaxpr": _by_check_body, "_check_call": _check_call, "check_eqn": _check_eqn}
_check_with_jax = rebound(
    jaxs_check_jaxpr,
    _check_jaxpr=rebound(core._check_jaxpr, custom_typechecks=_CheckRules(), check_eqn=_check_eqn),
)


class _FastCheck:
    """A fast check of jaxprs that calls JAX's rules once for equations that are alike.

    Equations are alike if they have the same primitive, context and parameters, and the same types
    of operands and results. JAX's checker decides on equations that this check rejects or does not
    know.
    """

    def __init__(self, known: frozenset[JaxprEqn], weak_types: bool):
        self._known = known
        self._weak_types = weak_types
        self._setting = config.trace_context()
        self._alike: set[Hashable] = set()
        # The same by the identity of their parts, each with an equation that keeps these alive.
        self._same: dict[Hashable, JaxprEqn] = {}
        # The numbers of settings, which take long to hash.
        self._settings: dict[object, int] = {}
        # Operations by number, and the numbers of objects, which equations here keep alive.
        self._operations: dict[Hashable, int] = {}
        self._operation_ids: dict[Hashable, tuple[int, JaxprEqn]] = {}
        # Types by number, and the numbers of type objects, which are kept alive here for their ids.
        self._numbers: dict[Aval, int] = {}
        # The settings inside of an equation's context, by the setting outside and the context.
        self._inside: dict[tuple[object, Any], object] = {}
        self._by_id: dict[int, tuple[int, Aval]] = {}

    def is_well_typed(self, jaxpr: AnyJaxpr) -> bool:
        """Return True if JAX's checker is certain to accept an open jaxpr."""
        setting = config.trace_context()
        number = self._settings.setdefault(setting, len(self._settings))
        known = self._known if setting == self._setting else frozenset()
        binders = [*jaxpr.constvars, *jaxpr.invars]
        bound = set(binders)
        count, bind = len(binders), bound.add
        if len(bound) != count or any(map(_changes_type, binders)):
            return False
        for eqn in jaxpr.eqns:  # written for speed: every pass runs it
            for x in eqn.invars:
                if type(x) is not Literal and x not in bound:
                    return False
            if (eqn not in known or eqn.effects) and not self._fits(eqn, jaxpr, setting, number):
                return False
            for v in eqn.outvars:
                if type(v) is not DropVar:
                    bind(v)
                    count += 1
        if len(bound) != count:  # a variable is bound twice
            return False
        return all(
            (type(x) is Literal or x in bound) and not isinstance(x.aval, AbstractRef)
            for x in jaxpr.outvars
        )

    def is_accepted(self, body: AnyJaxpr, setting: object) -> bool:
        """Return True if a body has been accepted in this setting, by this check or another."""
        accepted = ACCEPTED.get(_anchor(body), ())
        return (setting, self._weak_types) in accepted and not jax.debug_key_reuse.value

    def accept(self, body: AnyJaxpr, setting: object) -> None:
        """Record that a body is well typed in this setting."""
        ACCEPTED.setdefault(_anchor(body), set()).add((setting, self._weak_types))

    def _is_plain_jit(self, eqn: JaxprEqn, setting: object) -> bool:
        """Return True for a jit of an accepted body without effects that has exactly its types.

        JAX's rule compares nothing else, in a few times the time.
        """
        closed = eqn.params.get("jaxpr")
        if not isinstance(closed, ClosedJaxpr):
            return False
        body = open_jaxpr(closed)
        if body.effects or len(eqn.invars) != len(body.invars):
            return False
        for outer, inner in zip(eqn.invars, body.invars, strict=True):
            if type(outer) is Literal or isinstance(inner.aval, AbstractRef):
                return False
            if outer.aval is not inner.aval and outer.aval != inner.aval:
                return False
        if [v.aval for v in eqn.outvars] != [v.aval for v in body.outvars]:
            return False
        context = setting, eqn.ctx
        if context not in self._inside:
            with eqn.ctx.manager:
                self._inside[context] = config.trace_context()
        return self.is_accepted(closed, self._inside[context])

    def _fits(self, eqn: JaxprEqn, jaxpr: AnyJaxpr, setting: object, number: int) -> bool:
        """Return True if an equation's result types and effects are those of its rule."""
        if eqn.primitive is jit_p and not eqn.effects and self._is_plain_jit(eqn, setting):
            return True
        key: Hashable = None
        try:
            if not eqn.effects:
                same = self._parts(eqn, number)
                if same in self._same:
                    return True
                key = self._key(eqn, number)
                if key in self._alike:
                    self._same[same] = eqn
                    return True
        except TypeError:  # a parameter that is not hashable, or a ref
            key = None
        signature = None if key is None else self._signature(eqn, setting)
        if signature in ACCEPTED_SIGNATURES:
            self._alike.add(key)
            return True
        try:
            fits = _rule_agrees(eqn, jaxpr)
            fault = _weak_type_fault(eqn) if fits and self._weak_types else ""
        except Exception:  # JAX's checker reports the error
            return False
        if fault:
            raise TypeError(fault)
        if fits and key is not None:
            self._alike.add(key)
        if fits and signature is not None:
            if len(ACCEPTED_SIGNATURES) >= _MOST_SIGNATURES:
                ACCEPTED_SIGNATURES.clear()
            ACCEPTED_SIGNATURES.add(signature)
        return fits

    def _signature(self, eqn: JaxprEqn, setting: object) -> Hashable:
        """Return all that JAX's rule reads of an equation; None if it holds jaxprs or functions."""
        values = tuple(eqn.params.values())
        if any(map(callable, values)) or next(jaxprs_in_params(eqn.params), None) is not None:
            return None
        operands = [(x.aval, *_literal(x)) if type(x) is Literal else x.aval for x in eqn.invars]
        results = [v.aval for v in eqn.outvars]
        types = [nested_type(v) if isinstance(v, tuple) else type(v) for v in values]
        names = tuple(eqn.params)
        return (
            *(setting, self._weak_types, eqn.primitive, eqn.ctx, names, values, *types),
            *(len(operands), *operands, *results),
        )

    def _parts(self, eqn: JaxprEqn, setting: int) -> Hashable:
        """Return the identities of the parts of an equation: passes write many from the same."""
        operands = [id(x if type(x) is Literal else x.aval) for x in eqn.invars]
        results = [id(v.aval) for v in eqn.outvars]
        return eqn.primitive, id(eqn.ctx), id(eqn.params), setting, (*operands, 0, *results)

    def _key(self, eqn: JaxprEqn, setting: int) -> Hashable:
        """Return a key that equations share if they are alike. Raises TypeError for refs."""
        return (
            setting,
            self._operation(eqn),
            tuple(
                [
                    (self._number(x.aval), *_literal(x))
                    if type(x) is Literal
                    else self._number(x.aval)
                    for x in eqn.invars
                ]
            ),
            tuple([self._number(v.aval) for v in eqn.outvars]),
        )

    def _operation(self, eqn: JaxprEqn) -> int:
        """Return the number of an equation's primitive, context and parameters."""
        ids = eqn.primitive, id(eqn.ctx), id(eqn.params)
        entry = self._operation_ids.get(ids)
        if entry is None:
            values = tuple(eqn.params.values())
            types = [nested_type(v) if isinstance(v, tuple) else type(v) for v in values]
            operation = eqn.primitive, eqn.ctx, tuple(eqn.params), values, *types
            number = self._operations.setdefault(operation, len(self._operations))
            entry = self._operation_ids[ids] = number, eqn
        return entry[0]

    def _number(self, aval: Aval) -> int:
        """Return the number of a type. Raises TypeError for a ref's: refs must be distinct."""
        entry = self._by_id.get(id(aval))
        if entry is None:
            if isinstance(aval, AbstractRef):
                raise TypeError
            entry = self._numbers.setdefault(aval, len(self._numbers)), aval
            self._by_id[id(aval)] = entry
        return entry[0]


def _anchor(jaxpr: AnyJaxpr) -> AnyJaxpr:
    """Return the object that stays the same if a body without constants is closed again."""
    return jaxpr if getattr(jaxpr, "consts", ()) else open_jaxpr(jaxpr)


def _literal(literal: Literal) -> tuple[Any, ...]:
    """Return a key that determines whether a literal has its annotated type."""
    value = literal.val
    number = value if isinstance(value, int) else None  # it may be too large
    return type(value), getattr(value, "dtype", None), getattr(value, "shape", None), number


def _changes_type(var: Var) -> bool:
    """Return True if a variable is one of JAX's boxes, whose contents change their type."""
    return getattr(var, "initial_qdd", None) is not None


def _rule_agrees(eqn: JaxprEqn, jaxpr: AnyJaxpr) -> bool:
    """Return True if an equation's results and effects are those of its rule for the operands."""
    primitive, operands = eqn.primitive, eqn.invars
    if not all(core.typecheck(x.aval, x.val) for x in operands if type(x) is Literal):
        return False
    rule = core.custom_typechecks.get(primitive)
    with eqn.ctx.manager:
        if rule is not None:
            results, effects = _rule(rule)(_names_for_printing, *operands, **eqn.params)
        elif primitive.call_primitive:
            results, effects = _check_call(_names_for_printing, primitive, operands, eqn.params)
        else:
            results, effects = _check_eqn(primitive, [x.aval for x in operands], eqn.params)
    if core.resolve_input_effects(effects, operands) != eqn.effects:
        return False
    for effect in eqn.effects:
        if isinstance(effect, JaxprInputEffect):
            return False
        if not isinstance(effect, core.NamedAxisEffect) and effect not in jaxpr.effects:
            return False
    pairs = zip(eqn.outvars, results, strict=True)
    return all(core.typematch(v.aval, result) for v, result in pairs)


def _weak_type_fault(eqn: JaxprEqn) -> str:
    """Describe the fault in the weak types of an equation's results; "" if there is none.

    Equations with bodies are not checked: JAX's rule gives other weak types than their bodies. The
    pass must preserve those.
    """
    named = eqn.primitive in core.custom_typechecks or eqn.primitive.call_primitive
    if named or next(jaxprs_in_params(eqn.params), None) is not None:
        return ""
    with eqn.ctx.manager:
        results, _ = inferred_types(eqn.primitive, eqn.params, eqn.invars)
    for var, aval in zip(eqn.outvars, results, strict=True):
        weak, inferred = (getattr(side, "weak_type", False) for side in (var.aval, aval))
        if weak != inferred and type(var) is not DropVar:
            words = ["strongly", "weakly"]
            return f"{eqn.primitive} gives a {words[inferred]} typed {aval.str_short()}, " + (
                f"annotated as {words[weak]} typed"
            )
    return ""


def inferred_types(
    primitive: Primitive, params: Params, operands: Sequence[Atom]
) -> tuple[list[Aval], set[Effect]]:
    """Return the types of an equation's results, and its effects, from JAX's type checker.

    The effects are those of an equation on these operands. The equation's bodies are not checked,
    nor whether they match the operands of a jit.

    Args:
        primitive: The primitive of the equation.
        params: Its parameters.
        operands: Its operands.

    Raises:
        Exception: The error of the primitive's rule.
    """
    rule = core.custom_typechecks.get(primitive)
    if rule is None and primitive.call_primitive:
        results, effs = core._check_call(_names_for_printing, primitive, operands, params)
    elif rule is None or primitive is jit_p:
        results, effs = primitive.abstract_eval(*(x.aval for x in operands), **params)
        results = results if primitive.multiple_results else [results]
    else:
        results, effs = rule(_names_for_printing, *operands, **params)
    return list(results), core.resolve_input_effects(effs, operands)


def _names_for_printing() -> tuple[Any, Any]:
    return core.JaxprPpContext(), core.JaxprPpSettings()


#: Whether a variable of one type may represent a value of another, apart from weak types.
fits = core.typecompat


@contextmanager
def inside_shard_map(
    mesh: Mesh, newly_manual_axes: frozenset[Hashable], check_vma: bool, **_: Any
) -> Iterator[None]:
    """Enter the context in which the body of a `shard_map` with these parameters is traced."""
    axes = newly_manual_axes | set(mesh.manual_axes)
    sizes = [(name, size) for name, size in mesh.shape.items() if name in axes]
    with axes_bound(sizes), config._check_vma(check_vma):
        yield


# --- checkpointed ---------------------------------------------------------------------------------
# Find the residuals that `jax.checkpoint` saves, by JAX's own rules.
#
# When JAX differentiates a checkpointed function, it splits it into equations that are computed
# immediately, and equations that the backward pass computes from residuals. Here it is split
# without building the backward pass, in a small part of the time.

#: Returns whether the results of an equation may be saved.
Policy = Callable[..., Any]

#: Whether XLA keeps barriers when it compiles for the CPU. Older releases removed them early, and
#: merged the equations that `jax.checkpoint` recomputes with the forward pass.
_BARRIERS_STAY = jax.__version_info__ >= (0, 11)


def behind_barrier(eqn: JaxprEqn) -> Sequence[bool]:
    """Return, for each operand, whether XLA keeps a barrier between it and its definition.

    JAX inserts a barrier before the equations that a differentiated `jax.checkpoint` recomputes.
    """
    prevents = _BARRIERS_STAY and _prevents_merging(eqn)
    return prevents if isinstance(prevents, tuple) else (prevents,) * len(eqn.invars)


def has_barrier(eqn: JaxprEqn) -> bool:
    """Return True if JAX inserts a barrier before the equations of a call, kept by XLA or not."""
    prevents = _prevents_merging(eqn)
    return any(prevents) if isinstance(prevents, tuple) else prevents


def _prevents_merging(eqn: JaxprEqn) -> bool | tuple[bool, ...]:
    """Return whether an equation is behind a barrier, or whether each of its operands is."""
    if eqn.primitive is remat_p and eqn.params["differentiated"]:
        prevents: bool | tuple[bool, ...] = eqn.params["prevent_cse"]
        return prevents
    return eqn.primitive.name == "optimization_barrier"


class CheckpointHalves(NamedTuple):
    """What a call of `jax.checkpoint` computes in the two passes of a gradient, under a policy.

    Attributes:
        known: The jaxpr of the results, and then of all values that could be saved.
        read: Whether the backward pass reads each of these values.
        residuals: The values that it reads.
        backward: The jaxpr of residuals, arguments and tangents, which also recomputes values.
    """

    known: Jaxpr
    read: Sequence[bool]
    residuals: Sequence[Atom]
    backward: Jaxpr

    def forward(self) -> tuple[Jaxpr, Sequence[Var]]:
        """Return the jaxpr of results and residuals, and the arguments that it reads."""
        results = [True] * (len(self.known.outvars) - len(self.read))
        forward, reads, *_ = jax_dce_jaxpr(self.known, [*results, *self.read])
        return forward, [v for v, is_read in zip(self.known.invars, reads, strict=True) if is_read]


class CheckpointedJvp:
    """The forward-mode derivative of a call of `jax.checkpoint`, to be split by policies.

    Args:
        eqn: The call.
        differentiated: Whether each of its operands has a tangent.

    Raises:
        NotImplementedError: If JAX does not differentiate it.

    Attributes:
        consts: The constants of the derivative.
        jaxpr: The derivative, of the constants, the operands of the call, and their tangents.
        arguments: Its arguments without the tangents.
        has_tangent: Whether each result of the call has a tangent.
    """

    def __init__(self, eqn: JaxprEqn, differentiated: Sequence[bool]) -> None:
        body = eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["_prim"].jaxpr
        refused = effects.remat_allowed_effects.filter_not_in(body.effects)
        if refused:
            raise NotImplementedError(f"checkpoint does not take effects such as {refused}")
        jvp, has_tangent = internal_ad.jvp_jaxpr(close_jaxpr(body), list(differentiated), False)
        self.consts, self.has_tangent = list(jvp.consts), list(has_tangent)
        self.jaxpr = internal_pe.convert_constvars_jaxpr(open_jaxpr(jvp))
        self.arguments = self.jaxpr.invars[: len(self.consts) + len(eqn.invars)]
        self._transposed: tuple[Sequence[bool], Any, Any] = (), None, None

    def halves(self, policy: Policy) -> CheckpointHalves:
        """Return what the two passes compute under a policy."""
        unknown = [i >= len(self.arguments) for i in range(len(self.jaxpr.invars))]
        known, staged, out_unknown, out_staged, count = internal_pe.partial_eval_jaxpr_custom(
            self.jaxpr, unknown, [True] * len(unknown), False, False, policy
        )
        wanted = [unknown for unknown, flag in zip(out_unknown, out_staged, strict=True) if flag]
        backward, read, *_ = jax_dce_jaxpr(staged, wanted)
        saved = zip(known.outvars[len(known.outvars) - count :], read, strict=False)
        residuals = [v for v, is_read in saved if is_read]
        return CheckpointHalves(known, read[:count], residuals, backward)

    def transposed(
        self, backward: Jaxpr, same: Callable[[Jaxpr, Jaxpr], bool]
    ) -> tuple[Sequence[JaxprEqn], Sequence[Var], Jaxpr]:
        """Return the backward half with its linear part transposed.

        Returns the equations that recompute values, the values that the transpose reads, and the
        transpose: that of the last policy if the linear parts are the `same` up to variables.
        """
        tangents = set(self.jaxpr.invars[len(self.arguments) :])
        moves = [v in tangents for v in backward.invars]
        recomputed, linear, *_ = internal_pe.partial_eval_jaxpr_custom(
            backward, moves, [True] * len(moves), False, False, lambda *_, **__: True
        )
        # The linear parts differ in the operands that calls take without reading them.
        count, stays = len(linear.outvars), [v in tangents for v in linear.invars]
        linear, *_ = jax_dce_jaxpr(linear, [True] * count, stays)
        flags = [v in tangents for v in linear.invars]
        if self._transposed[0] != flags or not same(self._transposed[1], linear):
            zeros = [False] * count
            transpose, *_ = ad_checkpoint.transpose_jaxpr(close_jaxpr(linear), flags, zeros)
            self._transposed = flags, linear, open_jaxpr(transpose)
        return recomputed.eqns, [v for v in linear.invars if v not in tangents], self._transposed[2]
