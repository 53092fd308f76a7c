"""One typed view of each of JAX's higher-order primitives, the same on every JAX.

A pass, a renderer or a format that meets a loop, a branch or a call asks `view(eqn)` and gets a
`Scan`, `While`, `Cond`, `Call`, `CustomJVP`, `CustomVJP`, `High` or `ShardMap`, whose fields are
the equation's operands by role and its bodies as closed jaxprs. `.rebuild(...)` takes the same
fields and gives an equation of the running JAX back, with its effects computed anew.

Primitives that hold jaxprs and are none of these (a reduction's computation, a linear solve's
closures, a plug-in's own) have no view; `sub_jaxprs` and `map_sub_jaxprs` reach their bodies too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, ClassVar

import jax

from jaxprtool import jaxcompat
from jaxprtool.jaxcompat import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Var

#: For each call primitive: the parameter that holds the body, those that hold one entry per
#: operand, and those that hold one per result.
CALLS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "jit": (
        "jaxpr",
        ("in_shardings", "in_layouts", "donated_invars"),
        ("out_shardings", "out_layouts"),
    ),
    "call": ("call_jaxpr", (), ()),
    "closed_call": ("call_jaxpr", (), ()),
    "eval_jaxpr": ("call_jaxpr", (), ()),
    "remat2": ("jaxpr", ("prevent_cse",), ()),
}

#: What a call says of an operand or a result of which nothing is asked.
UNASKED: dict[str, Any] = {
    "in_shardings": jaxcompat.UNSPECIFIED,
    "out_shardings": jaxcompat.UNSPECIFIED,
    "in_layouts": None,
    "out_layouts": None,
    "donated_invars": False,
    "prevent_cse": True,
}


@dataclass(frozen=True, eq=False)
class View:
    """What the views share: the equation they are of, and how a new one is made from it."""

    eqn: JaxprEqn

    def rebuild(self, **changes: Any) -> JaxprEqn:
        """An equation like this one with some of the view's fields changed."""
        return replace(self, **changes)._equation()

    def _equation(self) -> JaxprEqn:
        raise NotImplementedError

    def _new(
        self, operands: Sequence[Atom], outs: Sequence[Var], params: dict[str, Any], effs: set
    ) -> JaxprEqn:
        eqn = self.eqn
        return jaxcompat.new_jaxpr_eqn(
            list(operands), list(outs), eqn.primitive, params, effs, eqn.source_info, eqn.ctx
        )

    def _as_held(self, name: str, body: Any) -> Any:
        """`body` as this primitive's parameter `name` holds it: open or closed."""
        held = self.eqn.params[name]
        return body if isinstance(held, ClosedJaxpr) else jaxcompat.open_jaxpr(body)


@dataclass(frozen=True, eq=False)
class Scan(View):
    """`scan`: body(*consts, *carry, *x) -> (*carry, *y), over the leading axis of each of `xs`."""

    consts: tuple[Atom, ...]
    carry: tuple[Atom, ...]
    xs: tuple[Atom, ...]
    carry_outs: tuple[Var, ...]
    ys: tuple[Var, ...]
    body: Any
    length: int
    reverse: bool
    unroll: int

    primitives: ClassVar[tuple[str, ...]] = ("scan",)

    @classmethod
    def of(cls, eqn: JaxprEqn) -> Scan:
        p = eqn.params
        n, k = jaxcompat.scan_counts(p)
        ins, outs = tuple(eqn.invars), tuple(eqn.outvars)
        groups = (ins[:n], ins[n : n + k], ins[n + k :], outs[:k], outs[k:])
        body = jaxcompat.close_jaxpr(p["jaxpr"])
        return cls(eqn, *groups, body, p["length"], p["reverse"], p["unroll"])

    def _equation(self) -> JaxprEqn:
        operands = (*self.consts, *self.carry, *self.xs)
        params = {
            **self.eqn.params,
            **jaxcompat.scan_count_params(
                self.eqn.params, len(self.consts), len(self.carry), len(self.xs), len(self.ys)
            ),
            "jaxpr": self.body,
            "length": self.length,
            "reverse": self.reverse,
            "unroll": self.unroll,
        }
        effs = jaxcompat.operand_effects(self.body, operands)
        return self._new(operands, (*self.carry_outs, *self.ys), params, effs)


@dataclass(frozen=True, eq=False)
class While(View):
    """`while`: body(*body_consts, *carry) -> carry, while cond(*cond_consts, *carry) holds."""

    cond_consts: tuple[Atom, ...]
    body_consts: tuple[Atom, ...]
    carry: tuple[Atom, ...]
    outs: tuple[Var, ...]
    cond: Any
    body: Any

    primitives: ClassVar[tuple[str, ...]] = ("while",)

    @classmethod
    def of(cls, eqn: JaxprEqn) -> While:
        p, ins = eqn.params, tuple(eqn.invars)
        c, b = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
        cond, body = jaxcompat.close_jaxpr(p["cond_jaxpr"]), jaxcompat.close_jaxpr(p["body_jaxpr"])
        return cls(eqn, ins[:c], ins[c:b], ins[b:], tuple(eqn.outvars), cond, body)

    def _equation(self) -> JaxprEqn:
        params = {
            **self.eqn.params,
            "cond_nconsts": len(self.cond_consts),
            "cond_jaxpr": self.cond,
            "body_nconsts": len(self.body_consts),
            "body_jaxpr": self.body,
        }
        effs = jaxcompat.operand_effects(self.cond, (*self.cond_consts, *self.carry))
        effs |= jaxcompat.operand_effects(self.body, (*self.body_consts, *self.carry))
        operands = (*self.cond_consts, *self.body_consts, *self.carry)
        return self._new(operands, self.outs, params, effs)


@dataclass(frozen=True, eq=False)
class Cond(View):
    """`cond` and `switch`: branches[clamp(index)](*operands)."""

    index: Atom
    operands: tuple[Atom, ...]
    outs: tuple[Var, ...]
    branches: tuple[Any, ...]

    primitives: ClassVar[tuple[str, ...]] = ("cond",)

    @classmethod
    def of(cls, eqn: JaxprEqn) -> Cond:
        index, *operands = eqn.invars
        branches = tuple(map(jaxcompat.close_jaxpr, eqn.params["branches"]))
        return cls(eqn, index, tuple(operands), tuple(eqn.outvars), branches)

    def _equation(self) -> JaxprEqn:
        params = {**self.eqn.params, "branches": tuple(self.branches)}
        effs = set().union(*(jaxcompat.operand_effects(b, self.operands) for b in self.branches))
        return self._new((self.index, *self.operands), self.outs, params, effs)


@dataclass(frozen=True, eq=False)
class Call(View):
    """A plain call, `body(*operands)`: jit, closed_call (eval_jaxpr in 0.12), remat.

    `operand_params` and `out_params` hold the parameters with one entry per operand and per
    result (jit's shardings, layouts and donation); a rebuild that changes the number of operands
    or results gives them anew.
    """

    operands: tuple[Atom, ...]
    outs: tuple[Var, ...]
    body: Any
    operand_params: dict[str, tuple[Any, ...]]
    out_params: dict[str, tuple[Any, ...]]

    primitives: ClassVar[tuple[str, ...]] = tuple(CALLS)

    @classmethod
    def of(cls, eqn: JaxprEqn) -> Call:
        body, per_operand, per_out = CALLS[eqn.primitive.name]
        tuples = {k: v for k, v in eqn.params.items() if isinstance(v, tuple)}
        return cls(
            eqn,
            tuple(eqn.invars),
            tuple(eqn.outvars),
            jaxcompat.close_jaxpr(eqn.params[body]),
            {k: tuples[k] for k in per_operand if k in tuples},
            {k: tuples[k] for k in per_out if k in tuples},
        )

    def filtered(
        self,
        used_operands: Sequence[bool],
        used_outs: Sequence[bool],
        body: Any,
        more_operands: Sequence[Atom] = (),
        more_outs: Sequence[Var] = (),
    ) -> JaxprEqn:
        """The call of `body`, which takes and gives the operands and results marked used.

        It takes `more_operands` before these, and gives `more_outs` after them; of their
        sharding, layout and donation nothing is asked.
        """
        ins, outs = len(more_operands), len(more_outs)
        return self.rebuild(
            operands=(*more_operands, *keep(self.operands, used_operands)),
            outs=(*keep(self.outs, used_outs), *more_outs),
            body=body,
            operand_params={
                k: (UNASKED[k],) * ins + keep(v, used_operands)
                for k, v in self.operand_params.items()
            },
            out_params={
                k: keep(v, used_outs) + (UNASKED[k],) * outs for k, v in self.out_params.items()
            },
        )

    def _equation(self) -> JaxprEqn:
        name = CALLS[self.eqn.primitive.name][0]
        params = {**self.eqn.params, **self.operand_params, **self.out_params}
        params[name] = self._as_held(name, self.body)
        effs = jaxcompat.operand_effects(self.body, self.operands)
        return self._new(self.operands, self.outs, params, effs)


@dataclass(frozen=True, eq=False)
class CustomJVP(View):
    """`custom_jvp_call`: body(*operands), differentiated by the user's rule.

    The rule is a Python closure over flat values; it stays valid while the operands and results
    stay the same in number and type. `with_outputs` restricts it to some of the results.
    """

    operands: tuple[Atom, ...]
    outs: tuple[Var, ...]
    body: Any

    primitives: ClassVar[tuple[str, ...]] = ("custom_jvp_call",)

    @classmethod
    def of(cls, eqn: JaxprEqn) -> Any:
        body = jaxcompat.close_jaxpr(eqn.params["call_jaxpr"])
        return cls(eqn, tuple(eqn.invars), tuple(eqn.outvars), body)

    def with_outputs(self, used_outs: Sequence[bool]) -> Any:
        """The view of the same call with only the results marked used; the rule follows.

        The restriction of the rule is JAX's own; all operands stay, since the rule may read them.
        """
        if all(used_outs):
            return self
        _, eqn = jaxcompat.apply_jax_dce_rule(used_outs, self.eqn)
        return self.of(eqn)

    def _equation(self) -> JaxprEqn:
        params = {**self.eqn.params, "call_jaxpr": self._as_held("call_jaxpr", self.body)}
        effs = jaxcompat.operand_effects(self.body, self.operands)
        return self._new(self.operands, self.outs, params, effs)


@dataclass(frozen=True, eq=False)
class CustomVJP(CustomJVP):
    """`custom_vjp_call`: body(*operands), differentiated in reverse by the user's two rules."""

    primitives: ClassVar[tuple[str, ...]] = ("custom_vjp_call",)


@dataclass(frozen=True, eq=False)
class High(CustomJVP):
    """`call_hi_primitive`: body(*operands), with derivatives and batching of its own.

    The body is what JAX puts in the equation's place before it compiles. A rebuild changes nothing
    but that; all else is the object's that the equation holds.
    """

    primitives: ClassVar[tuple[str, ...]] = (jaxcompat.CALL_HIGH,)

    @classmethod
    def of(cls, eqn: JaxprEqn) -> Any:
        body = jaxcompat.high_body(eqn)
        return None if body is None else cls(eqn, tuple(eqn.invars), tuple(eqn.outvars), body)

    def _equation(self) -> JaxprEqn:
        return self.eqn.replace(params={"_prim": jaxcompat.with_high_body(self.eqn, self.body)})


@dataclass(frozen=True, eq=False)
class ShardMap(View):
    """`shard_map`: body on each shard of the operands, over the manual axes of a mesh."""

    operands: tuple[Atom, ...]
    outs: tuple[Var, ...]
    body: Any
    mesh: Any
    in_specs: tuple[Any, ...]
    out_specs: tuple[Any, ...]

    primitives: ClassVar[tuple[str, ...]] = ("shard_map",)

    @classmethod
    def of(cls, eqn: JaxprEqn) -> ShardMap:
        p = eqn.params
        body = jaxcompat.close_jaxpr(p["jaxpr"])
        specs = tuple(p["in_specs"]), tuple(p["out_specs"])
        return cls(eqn, tuple(eqn.invars), tuple(eqn.outvars), body, p["mesh"], *specs)

    def _equation(self) -> JaxprEqn:
        params = {
            **self.eqn.params,
            "jaxpr": self._as_held("jaxpr", self.body),
            "mesh": self.mesh,
            "in_specs": tuple(self.in_specs),
            "out_specs": tuple(self.out_specs),
        }
        effs = jaxcompat.operand_effects(self.body, self.operands)
        effs = jaxcompat.without_named_axes(effs, self.mesh.axis_names)
        return self._new(self.operands, self.outs, params, effs)


_VIEWS: dict[str, Any] = {
    name: cls
    for cls in (Scan, While, Cond, Call, CustomJVP, CustomVJP, High, ShardMap)
    for name in cls.primitives
}


def view(eqn: JaxprEqn) -> Any:
    """The typed view of a higher-order equation, or None if its primitive has none."""
    cls = _VIEWS.get(eqn.primitive.name)
    return None if cls is None else cls.of(eqn)


def keep(values: Sequence[Any], used: Sequence[bool]) -> tuple[Any, ...]:
    """Those of `values` that are marked used; both must be of one length."""
    if len(values) != len(used):
        raise ValueError(f"{len(used)} marks for {len(values)} values")
    return tuple(compress(values, used))


def call(body: Any, operands: Sequence[Atom], outs: Sequence[Var], like: JaxprEqn) -> JaxprEqn:
    """A jit call of a closed jaxpr, bearing its name, in the place and context of `like`."""
    empty = jaxcompat.traced_like(like, jax.jit(list), ()).eqns[0]
    unasked = {
        name: {k: (UNASKED[k],) * len(values) for k in CALLS["jit"][i]}
        for i, (name, values) in enumerate((("operand_params", operands), ("out_params", outs)), 1)
    }
    eqn = Call.of(empty).rebuild(operands=tuple(operands), outs=tuple(outs), body=body, **unasked)
    params = {**eqn.params, "name": body.debug_info.func_name}
    return eqn.replace(params=params, source_info=like.source_info)


# --- every jaxpr an equation holds, known primitive or not -------------------------------------


_JAXPRS = (Jaxpr, ClosedJaxpr)
_HOLDERS = (*_JAXPRS, jaxcompat.HighPrimitive)
_SEQUENCES = (tuple, list)
_LEAF, _SEQUENCE, _HOLDER = range(3)


class _Kinds(dict[type, int]):
    """Which types of parameter values hold jaxprs, may hold some among their items, or none."""

    def __missing__(self, kind: type) -> int:
        found = _SEQUENCE if issubclass(kind, _SEQUENCES) else _LEAF
        self[kind] = _HOLDER if issubclass(kind, _HOLDERS) else found
        return self[kind]


_KINDS = _Kinds()


def sub_jaxprs(eqn: JaxprEqn) -> Iterator[tuple[str, Any]]:
    """Each jaxpr in the equation's parameters, as held, with a path such as `branches[1]`."""
    if eqn.primitive.name in High.primitives:
        body = jaxcompat.high_body(eqn)
        yield from () if body is None else [("expand", body)]
        return
    if not holds_jaxpr(eqn.params.values()):
        return
    for name in sorted(eqn.params):
        yield from _jaxprs_in(name, eqn.params[name])


def _jaxprs_in(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, _JAXPRS):
        yield path, value
    elif isinstance(value, _SEQUENCES):
        names = getattr(value, "_fields", None)
        for i, item in enumerate(value):
            yield from _jaxprs_in(f"{path}.{names[i]}" if names else f"{path}[{i}]", item)


def holds_jaxpr(values: Iterable[Any]) -> bool:
    """Return whether there is a jaxpr among parameter values, or in a sequence among them.

    So there is, as a rule, in an object that `call_hi_primitive` holds. Passes ask this of every
    equation, so it is quicker than a look at `sub_jaxprs`.
    """
    for value in values:
        kind = _KINDS[type(value)]
        if kind == _HOLDER or (kind == _SEQUENCE and value and holds_jaxpr(value)):
            return True
    return False


def map_sub_jaxprs(function: Callable[[Any], Any], eqn: JaxprEqn) -> dict[str, Any]:
    """The equation's parameters with `function` applied to each jaxpr in them.

    `function` gets each jaxpr as held, open or closed, and gives one of the same kind.
    """
    if eqn.primitive.name in High.primitives and (high := High.of(eqn)):
        body = function(high.body)
        return eqn.params if body is high.body else high.rebuild(body=body).params
    return {name: _map_jaxprs(function, value) for name, value in eqn.params.items()}


def _map_jaxprs(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, _JAXPRS):
        return function(value)
    if not isinstance(value, _SEQUENCES):
        return value
    items = [_map_jaxprs(function, item) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
