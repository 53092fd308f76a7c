"""One structured view of each of JAX's higher-order primitives, the same in every JAX release.

`view(eqn)` returns a `Scan`, `While`, `Cond`, `Call`, `CustomJVP`, `CustomVJP`, `High` or
`ShardMap`, whose fields are the equation's operands by role and its bodies as closed jaxprs.
`.rebuild(...)` takes the same fields and returns an equation of the running JAX release, with its
effects recomputed.

Other primitives that hold jaxprs (a reduction, a linear solve) have no view; `sub_jaxprs` and
`map_sub_jaxprs` reach their bodies too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, ClassVar

import jax
from jax.sharding import Mesh, PartitionSpec

from jaxprtool import jaxcompat
from jaxprtool.ir.basics.rules import RuleTable, rule
from jaxprtool.jaxcompat import AnyJaxpr, Atom, ClosedJaxpr, Effect, Jaxpr, JaxprEqn, Params, Var

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

#: The entry of each parameter for a new operand or result: no options.
NO_OPTIONS: dict[str, Any] = {
    "in_shardings": jaxcompat.UNSPECIFIED,
    "out_shardings": jaxcompat.UNSPECIFIED,
    "in_layouts": None,
    "out_layouts": None,
    "donated_invars": False,
    "prevent_cse": True,
}


@dataclass(frozen=True, eq=False)
class Edges:
    """The edges along which values pass into, between and out of the bodies of a kind of equation.

    Operands, results and bodies are named by the fields of the view that hold them.

    Attributes:
        operands: The fields of the operands, in the order of the equation.
        results: The fields of the results, in the order of the equation.
        bodies: For each field that holds a body, or a tuple of similar bodies: the fields of its
            arguments, and the fields that its results become. The result of a body that becomes
            no field is the predicate of a loop: whether it continues.
        carried: For each field of operands that an iteration of a loop replaces, the field of the
            results; these have the operands' values if there is no iteration.
        sliced: The fields of operands of which each iteration gets a slice.
        stacked: The fields of results that are stacked from the iterations.
        predicate: The field of the operand that selects which body runs, if there is one.
        has_rule: Whether a custom rule, which is not a jaxpr, takes the same operands as the body.
            Then all operands must stay, and values that the body passes through may not be
            forwarded.
    """

    operands: tuple[str, ...] = ("operands",)
    results: tuple[str, ...] = ("outs",)
    bodies: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
        ("body", ("operands",), ("outs",)),
    )
    carried: tuple[tuple[str, str], ...] = ()
    sliced: tuple[str, ...] = ()
    stacked: tuple[str, ...] = ()
    predicate: str | None = None
    has_rule: bool = False


@dataclass(frozen=True, eq=False)
class View:
    """The base class of views: their equation, and the construction of a new one from it.

    A subclass has a field for each group of operands or results, and for each body. Its `of` fills
    them from an equation, and `params` returns the parameters that depend on them. A view that is
    added to the table `views`, by `@rule("view", "my_primitive")`, is used by all passes.
    """

    eqn: JaxprEqn

    #: The names of the view's primitives.
    primitives: ClassVar[tuple[str, ...]] = ()
    #: None if the equation is defined by an object, and the bodies only represent what it computes.
    edges: ClassVar[Edges | None] = Edges()

    @classmethod
    def of(cls, eqn: JaxprEqn) -> Any:
        """Return the view of an equation of one of the primitives."""
        raise NotImplementedError

    def rebuild(self, **changes: Any) -> JaxprEqn:
        """Return an equation like this one with some of the view's fields changed."""
        return replace(self, **changes)._equation()

    def entries(self, operands: Sequence[int | None], results: Sequence[int | None]) -> Params:
        """Return the parameters with an entry per operand or result, for a selection of these.

        Args:
            operands: For each operand of the new equation its position in this one, or None.
            results: The same for each result.
        """
        return {}

    @property
    def trips(self) -> Any:
        """The trip count of the bodies: a number, a symbolic dimension, or None if unknown."""
        return 1

    def params(self) -> Params:
        """Return the parameters that depend on the fields."""
        raise NotImplementedError

    def _effects(self) -> set[Effect]:
        """Return the effects of the bodies, on the equation's operands."""
        assert self.edges is not None
        effects: set[Any] = set()
        for field, arguments, _ in self.edges.bodies:
            operands = [atom for name in arguments for atom in getattr(self, name)]
            for body in as_tuple(getattr(self, field)):
                effects |= jaxcompat.operand_effects(body, operands)
        return effects

    def _equation(self) -> JaxprEqn:
        eqn, edges = self.eqn, self.edges
        assert edges is not None
        operands = [atom for name in edges.operands for atom in as_tuple(getattr(self, name))]
        outs = [var for name in edges.results for var in getattr(self, name)]
        params = {**eqn.params, **self.params()}
        return jaxcompat.new_jaxpr_eqn(
            operands, outs, eqn.primitive, params, self._effects(), eqn.source_info, eqn.ctx
        )

    def _as_held(self, name: str, body: ClosedJaxpr) -> AnyJaxpr:
        """Return `body` in the form of this primitive's parameter `name`: open or closed."""
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
    body: ClosedJaxpr
    length: int
    reverse: bool
    unroll: int

    primitives: ClassVar[tuple[str, ...]] = ("scan",)
    edges: ClassVar[Edges | None] = Edges(
        operands=("consts", "carry", "xs"),
        results=("carry_outs", "ys"),
        bodies=(("body", ("consts", "carry", "xs"), ("carry_outs", "ys")),),
        carried=(("carry", "carry_outs"),),
        sliced=("xs",),
        stacked=("ys",),
    )

    @classmethod
    def of(cls, eqn: JaxprEqn) -> Scan:
        p = eqn.params
        n, k = jaxcompat.scan_counts(p)
        ins, outs = tuple(eqn.invars), tuple(eqn.outvars)
        groups = (ins[:n], ins[n : n + k], ins[n + k :], outs[:k], outs[k:])
        body = jaxcompat.close_jaxpr(p["jaxpr"])
        return cls(eqn, *groups, body, p["length"], p["reverse"], p["unroll"])

    @property
    def trips(self) -> Any:
        return self.length

    def params(self) -> Params:
        counts = len(self.consts), len(self.carry), len(self.xs), len(self.ys)
        return {
            **jaxcompat.scan_count_params(self.eqn.params, *counts),
            "jaxpr": self.body,
            "length": self.length,
            "reverse": self.reverse,
            "unroll": self.unroll,
        }


@dataclass(frozen=True, eq=False)
class While(View):
    """`while`: body(*body_consts, *carry) -> carry, while cond(*cond_consts, *carry) holds."""

    cond_consts: tuple[Atom, ...]
    body_consts: tuple[Atom, ...]
    carry: tuple[Atom, ...]
    outs: tuple[Var, ...]
    cond: ClosedJaxpr
    body: ClosedJaxpr

    primitives: ClassVar[tuple[str, ...]] = ("while",)
    edges: ClassVar[Edges | None] = Edges(
        operands=("cond_consts", "body_consts", "carry"),
        bodies=(
            ("cond", ("cond_consts", "carry"), ()),
            ("body", ("body_consts", "carry"), ("outs",)),
        ),
        carried=(("carry", "outs"),),
    )

    @classmethod
    def of(cls, eqn: JaxprEqn) -> While:
        p, ins = eqn.params, tuple(eqn.invars)
        c, b = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
        cond, body = jaxcompat.close_jaxpr(p["cond_jaxpr"]), jaxcompat.close_jaxpr(p["body_jaxpr"])
        return cls(eqn, ins[:c], ins[c:b], ins[b:], tuple(eqn.outvars), cond, body)

    @property
    def trips(self) -> Any:
        return None

    def params(self) -> Params:
        return {
            "cond_nconsts": len(self.cond_consts),
            "cond_jaxpr": self.cond,
            "body_nconsts": len(self.body_consts),
            "body_jaxpr": self.body,
        }


@dataclass(frozen=True, eq=False)
class Cond(View):
    """`cond` and `switch`: branches[clamp(index)](*operands)."""

    index: Atom
    operands: tuple[Atom, ...]
    outs: tuple[Var, ...]
    branches: tuple[ClosedJaxpr, ...]

    primitives: ClassVar[tuple[str, ...]] = ("cond",)
    edges: ClassVar[Edges | None] = Edges(
        operands=("index", "operands"),
        bodies=(("branches", ("operands",), ("outs",)),),
        predicate="index",
    )

    @classmethod
    def of(cls, eqn: JaxprEqn) -> Cond:
        index, *operands = eqn.invars
        branches = tuple(map(jaxcompat.close_jaxpr, eqn.params["branches"]))
        return cls(eqn, index, tuple(operands), tuple(eqn.outvars), branches)

    def params(self) -> Params:
        return {"branches": tuple(self.branches)}


@dataclass(frozen=True, eq=False)
class Call(View):
    """A plain call, `body(*operands)`: jit, closed_call (eval_jaxpr in 0.12), remat.

    `operand_params` and `out_params` hold the parameters with one entry per operand and per result:
    jit's shardings, layouts and donation. A rebuild that changes the number of operands or results
    makes new ones.
    """

    operands: tuple[Atom, ...]
    outs: tuple[Var, ...]
    body: ClosedJaxpr
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

    def entries(self, operands: Sequence[int | None], results: Sequence[int | None]) -> Params:
        """Return the parameters with an entry per operand or result; new ones have no options."""
        pairs = ("operand_params", operands), ("out_params", results)
        return {
            field: {
                k: tuple(NO_OPTIONS[k] if i is None else values[i] for i in positions)
                for k, values in getattr(self, field).items()
            }
            for field, positions in pairs
        }

    def params(self) -> Params:
        name = CALLS[self.eqn.primitive.name][0]
        body = self._as_held(name, self.body)
        return {**self.operand_params, **self.out_params, name: body}


@dataclass(frozen=True, eq=False)
class CustomJVP(View):
    """`custom_jvp_call`: body(*operands), differentiated by the user's rule.

    The rule is a Python closure over flat values; it stays valid while the operands and results
    stay the same in number and type. `with_outputs` restricts it to some of the results.
    """

    operands: tuple[Atom, ...]
    outs: tuple[Var, ...]
    body: ClosedJaxpr

    primitives: ClassVar[tuple[str, ...]] = ("custom_jvp_call",)
    edges: ClassVar[Edges | None] = Edges(has_rule=True)

    @classmethod
    def of(cls, eqn: JaxprEqn) -> Any:
        body = jaxcompat.close_jaxpr(eqn.params["call_jaxpr"])
        return cls(eqn, tuple(eqn.invars), tuple(eqn.outvars), body)

    def with_outputs(self, used_outs: Sequence[bool]) -> Any:
        """Return the view of the same call, and its rule, with only the results marked used.

        JAX restricts the rule; all operands stay, since the rule may read them.
        """
        if all(used_outs):
            return self
        _, eqn = jaxcompat.apply_jax_dce_rule(used_outs, self.eqn)
        return self.of(eqn)

    def params(self) -> Params:
        return {"call_jaxpr": self._as_held("call_jaxpr", self.body)}


@dataclass(frozen=True, eq=False)
class CustomVJP(CustomJVP):
    """`custom_vjp_call`: body(*operands), differentiated in reverse by the user's two rules."""

    primitives: ClassVar[tuple[str, ...]] = ("custom_vjp_call",)


@dataclass(frozen=True, eq=False)
class High(CustomJVP):
    """`call_hi_primitive`: body(*operands), with derivatives and batching of its own.

    JAX replaces the equation by the body before it compiles. A rebuild changes only the body; all
    else is defined by the equation's object.
    """

    primitives: ClassVar[tuple[str, ...]] = (jaxcompat.CALL_HIGH,)
    edges: ClassVar[Edges | None] = None

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
    body: ClosedJaxpr
    mesh: Mesh
    in_specs: tuple[Any, ...]
    out_specs: tuple[Any, ...]

    primitives: ClassVar[tuple[str, ...]] = ("shard_map",)

    @classmethod
    def of(cls, eqn: JaxprEqn) -> ShardMap:
        p = eqn.params
        body = jaxcompat.close_jaxpr(p["jaxpr"])
        specs = tuple(p["in_specs"]), tuple(p["out_specs"])
        return cls(eqn, tuple(eqn.invars), tuple(eqn.outvars), body, p["mesh"], *specs)

    def entries(self, operands: Sequence[int | None], results: Sequence[int | None]) -> Params:
        """Return the parameters with an entry per operand or result; new ones are unsharded."""
        pairs = ("in_specs", operands), ("out_specs", results)
        return {
            field: tuple(PartitionSpec() if i is None else getattr(self, field)[i] for i in places)
            for field, places in pairs
        }

    def params(self) -> Params:
        return {
            "jaxpr": self._as_held("jaxpr", self.body),
            "mesh": self.mesh,
            "in_specs": tuple(self.in_specs),
            "out_specs": tuple(self.out_specs),
        }

    def _effects(self) -> set[Effect]:
        return jaxcompat.without_named_axes(super()._effects(), self.mesh.axis_names)


#: The open table of views: all that a plug-in needs to add for its own loop, branch or call.
views: RuleTable[type[View]] = RuleTable()

for _cls in (Scan, While, Cond, Call, CustomJVP, CustomVJP, High, ShardMap):
    rule(views, *_cls.primitives)(_cls)


def view(eqn: JaxprEqn) -> Any:
    """Return the structured view of a higher-order equation, or None if its primitive has none."""
    cls = views.get(eqn.primitive.name)
    return None if cls is None else cls.of(eqn)


def as_tuple(value: object) -> tuple[Any, ...]:
    """Return the values of a field that holds several values, or one, as a tuple."""
    return tuple(value) if isinstance(value, _SEQUENCES) else (value,)


def keep(values: Sequence[Any], used: Sequence[bool]) -> tuple[Any, ...]:
    """Return the elements of `values` that are marked used; both must have the same length."""
    if len(values) != len(used):
        raise ValueError(f"{len(used)} marks for {len(values)} values")
    return tuple(compress(values, used))


def call(
    body: ClosedJaxpr, operands: Sequence[Atom], outs: Sequence[Var], like: JaxprEqn
) -> JaxprEqn:
    """Return a jit call of a closed jaxpr, with its name, in the place and context of `like`."""
    empty = jaxcompat.traced_like(like, jax.jit(list), ()).eqns[0]
    unasked = {
        name: {k: (NO_OPTIONS[k],) * len(values) for k in CALLS["jit"][i]}
        for i, (name, values) in enumerate((("operand_params", operands), ("out_params", outs)), 1)
    }
    eqn = Call.of(empty).rebuild(operands=tuple(operands), outs=tuple(outs), body=body, **unasked)
    params = {**eqn.params, "name": body.debug_info.func_name}
    return eqn.replace(params=params, source_info=like.source_info)


def scan(
    body: ClosedJaxpr,
    operands: tuple[Sequence[Atom], Sequence[Atom], Sequence[Atom]],
    results: tuple[Sequence[Var], Sequence[Var]],
    length: int,
    reverse: bool,
    like: JaxprEqn,
) -> JaxprEqn:
    """Return a scan of a closed jaxpr, in the place and context of `like`.

    Args:
        body: Takes (consts, carry, slices of xs), and returns (carry, slices of ys).
        operands: The consts, the carry and the xs.
        results: The last carry and the ys.
        length: The number of iterations.
        reverse: Whether the first iteration takes the last slice.
        like: Another equation.
    """

    def empty() -> list[Any]:
        return [jax.lax.scan(lambda carry, _: (carry, None), 0, None, length=1)[0]]

    template = Scan.of(jaxcompat.traced_like(like, empty, ()).eqns[0])
    fields = ("consts", "carry", "xs", "carry_outs", "ys")
    groups = dict(zip(fields, map(tuple, (*operands, *results)), strict=True))
    eqn = template.rebuild(**groups, body=body, length=length, reverse=reverse)
    return eqn.replace(source_info=like.source_info)


# --- every jaxpr an equation holds, known primitive or not -------------------------------------


_JAXPRS = (Jaxpr, ClosedJaxpr)
_HOLDERS = (*_JAXPRS, jaxcompat.HighPrimitive)
_SEQUENCES = (tuple, list)
_LEAF, _SEQUENCE, _HOLDER = range(3)


class _Kinds(dict[type, int]):
    """Whether values of a type are jaxprs, may contain jaxprs, or neither."""

    def __missing__(self, kind: type) -> int:
        found = _SEQUENCE if issubclass(kind, _SEQUENCES) else _LEAF
        self[kind] = _HOLDER if issubclass(kind, _HOLDERS) else found
        return self[kind]


_KINDS = _Kinds()


def copies_of_body(eqn: JaxprEqn) -> int:
    """Return how often JAX lowers the body of an equation because of its option `unroll`; else 1.

    In JAX 0.12, `jnp.polyval` is one equation with this option, whose body has no jaxpr.
    """
    unroll = eqn.params.get("unroll", 1)
    length = eqn.params.get("length", len(eqn.invars) - 1)
    if not isinstance(length, int) or unroll <= 1:
        return int(unroll)
    return length if unroll >= length else unroll + length % unroll


def sub_jaxprs(eqn: JaxprEqn) -> Iterator[tuple[str, AnyJaxpr]]:
    """Yield each jaxpr in the equation's parameters, as held, with a path such as `branches[1]`."""
    if eqn.primitive.name in High.primitives:
        body = jaxcompat.high_body(eqn)
        yield from () if body is None else [("expand", body)]
        return
    if not holds_jaxpr(eqn.params.values()):
        return
    for name in sorted(eqn.params):
        yield from _jaxprs_in(name, eqn.params[name])


#: The path of the body that runs, for primitives that hold others for their derivatives.
_RUN_BODIES = {"custom_linear_solve": "jaxprs.solve"}


def run_jaxprs(eqn: JaxprEqn) -> Iterator[tuple[str, AnyJaxpr]]:
    """Yield those of `sub_jaxprs` that run when the equation does."""
    path = _RUN_BODIES.get(eqn.primitive.name)
    yield from (held for held in sub_jaxprs(eqn) if path in (None, held[0]))


def _jaxprs_in(path: str, value: object) -> Iterator[tuple[str, AnyJaxpr]]:
    if isinstance(value, _JAXPRS):
        yield path, value
    elif isinstance(value, _SEQUENCES):
        names = getattr(value, "_fields", None)
        for i, item in enumerate(value):
            yield from _jaxprs_in(f"{path}.{names[i]}" if names else f"{path}[{i}]", item)


def holds_jaxpr(values: Iterable[Any]) -> bool:
    """Return True if a jaxpr is among parameter values, or in a sequence among them.

    This also holds for most objects in `call_hi_primitive`. Passes call this for every equation,
    so it is faster than `sub_jaxprs`.
    """
    for value in values:
        kind = _KINDS[type(value)]
        if kind == _HOLDER or (kind == _SEQUENCE and value and holds_jaxpr(value)):
            return True
    return False


def map_sub_jaxprs(function: Callable[[AnyJaxpr], AnyJaxpr], eqn: JaxprEqn) -> Params:
    """Return the equation's parameters with `function` applied to each jaxpr in them.

    `function` gets each jaxpr as held, open or closed, and returns one of the same kind.
    """
    if eqn.primitive.name in High.primitives and (high := High.of(eqn)):
        body = function(high.body)
        return eqn.params if body is high.body else high.rebuild(body=body).params
    return {
        name: value if _KINDS[type(value)] == _LEAF else _map_jaxprs(function, value)
        for name, value in eqn.params.items()
    }


def _map_jaxprs(function: Callable[[AnyJaxpr], AnyJaxpr], value: object) -> Any:
    if isinstance(value, _JAXPRS):
        return function(value)
    if not (isinstance(value, _SEQUENCES) and holds_jaxpr(value)):
        return value
    items = [_map_jaxprs(function, item) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
