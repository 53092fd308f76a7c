"""Rewrite a jaxpr equation by equation, at every depth: the basis of most passes.

`rewrite` walks each body once, in order, with the rule that a visitor returns for the body. The
rule gets each equation, with its operands looked up and its bodies rewritten, and returns the
atoms that replace its results, or None to keep it. `map_equations` is for rules that replace an
equation by other equations.

A body that several equations share stays shared, and one in which nothing changes stays the same
object, since JAX's caches use identity.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from operator import is_not
from typing import Any, TypeAlias, TypeVar

import jax
from jax import lax

from jaxprtool import jaxcompat
from jaxprtool.ir.backends import JaxprCache, anchor
from jaxprtool.ir.equations import donated_operands, free_variables, is_flat
from jaxprtool.ir.regions import (
    CALLS,
    High,
    Region,
    Regions,
    ShardMap,
    holds_jaxpr,
    keep,
    map_sub_jaxprs,
    regions,
    sub_jaxprs,
    view,
)
from jaxprtool.ir.traits import traits
from jaxprtool.jaxcompat import (
    AnyJaxpr,
    Atom,
    Aval,
    ClosedJaxpr,
    DropVar,
    JaxprEqn,
    Literal,
    Params,
    Primitive,
    Var,
)
from jaxprtool.jaxcompat.jaxprs import identity

T = TypeVar("T")

#: Returns the atoms that replace an equation's results, or None to keep it. In that case, the
#: equations and constants that it has written (`Writer.add`, `emit`, `splice`, `constant`) are
#: rolled back.
RewriteRule = Callable[[JaxprEqn], Sequence[Atom] | None]
#: Returns the rule for the equations of a body, or None to keep all of them.
Visitor = Callable[["Writer"], RewriteRule | None]


#: Returns the equations that replace an equation, or None to keep it. Together they must
#: define the equation's own `outvars`, with their types, and may define fresh variables.
EquationRule = Callable[[JaxprEqn], Sequence[JaxprEqn] | None]


def rewrite(
    jaxpr: AnyJaxpr,
    visitor: Visitor,
    *,
    nested: bool = True,
    outside_in: bool = False,
    flat: bool = True,
) -> AnyJaxpr:
    """Rewrite a jaxpr by the rule that `visitor` returns for each of its bodies.

    Arguments and results keep their number and types, in the jaxpr and in each of its bodies. A
    rule's result is rejected, and its equation kept, if it would change a type. Weak types count: a
    gradient has the weak type of the value that it is taken with respect to. The Python closures of
    custom derivatives are left alone, and so are values that a call in the same body donates.

    Args:
        jaxpr: The jaxpr, closed or open.
        visitor: Called once for each body, with its `Writer`. Returns the rule for its equations,
            or None to keep them; their bodies are rewritten all the same.
        nested: Rewrite the bodies of equations too.
        outside_in: Call the rule with an equation before its bodies are rewritten, which happens
            only if the equation is kept.
        flat: Visit bodies without loops, branches and calls too.

    Returns:
        The jaxpr rewritten; the same object if nothing changes.
    """
    memo = Memo()

    def body_of(body: AnyJaxpr, constants: bool, in_kernel: bool) -> AnyJaxpr:
        if not flat and is_flat(jaxcompat.open_jaxpr(body)):
            return body

        def run() -> AnyJaxpr:
            return Writer(body, constants, partial(inside, in_kernel), outside_in).run(visitor)

        return memo(run, body, constants, in_kernel)

    def inside(in_kernel: bool, eqn: JaxprEqn) -> JaxprEqn:
        if not nested or not holds_jaxpr(eqn.params.values()):
            return eqn
        # A kernel takes arrays as operands only, also at the depth of a call in it.
        in_kernel = in_kernel or _is_kernel(eqn)
        constants = traits(eqn).holds_constants and not in_kernel
        return with_bodies(eqn, lambda body: body_of(body, constants, in_kernel))

    return body_of(jaxpr, True, False)


def _is_kernel(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "pallas_call" or bool(jaxcompat.kernel_axes(eqn.params))


def map_equations(jaxpr: AnyJaxpr, rule: EquationRule) -> AnyJaxpr:
    """Apply a rule to every equation of a jaxpr, at every depth, from the inside out.

    Args:
        jaxpr: The jaxpr, closed or open.
        rule: Called with each equation, after the bodies that the equation holds are rewritten.

    Returns:
        The jaxpr rewritten; the same object if nothing changes. Arguments, results and constants
        stay as they are, of the jaxpr and of each body. The Python closures of custom derivatives
        are left alone.
    """

    def visitor(writer: Writer) -> RewriteRule:
        def visit(eqn: JaxprEqn) -> Sequence[Atom] | None:
            new = rule(eqn)
            if new is None:
                return None
            for new_eqn in new:
                writer.add(new_eqn)
            return eqn.outvars

        return visit

    return rewrite(jaxpr, visitor)


def with_bodies(eqn: JaxprEqn, function: Callable[[AnyJaxpr], AnyJaxpr]) -> JaxprEqn:
    """Apply a function to each jaxpr that an equation holds.

    Args:
        eqn: The equation.
        function: Maps a jaxpr, as it is held, to one with the same arguments and results.

    Returns:
        The equation with the new bodies; `eqn` itself if none changes. If its primitive has a view,
        its effects are those of the bodies.
    """
    params = map_sub_jaxprs(function, eqn)
    if all(value is eqn.params[name] for name, value in params.items()):
        return eqn
    eqn = eqn.replace(params=params)
    structured = view(eqn)
    return eqn if structured is None or isinstance(structured, High) else structured.rebuild()


def partition(jaxpr: AnyJaxpr, first: Sequence[JaxprEqn]) -> tuple[list[JaxprEqn], list[Var]]:
    """Split the equations of a jaxpr in two.

    Args:
        jaxpr: The jaxpr.
        first: The equations to run first.

    Returns:
        The other equations, and the results of the first ones that these, or the jaxpr's results,
        read.
    """
    gone = set(map(id, first))
    rest = [eqn for eqn in jaxpr.eqns if id(eqn) not in gone]
    read = free_variables(rest, jaxpr.outvars)
    return rest, [v for eqn in first for v in eqn.outvars if v in read]


def narrow(
    body: ClosedJaxpr, invars: Sequence[Var], outvars: Sequence[Atom], eqns: Sequence[JaxprEqn]
) -> ClosedJaxpr:
    """Return a closed jaxpr of some equations of a closed one, with the constants that they read.

    Args:
        body: The jaxpr of the equations.
        invars: The arguments of the new one.
        outvars: Its results.
        eqns: Its equations.
    """
    read = free_variables(eqns, outvars)
    used = [v in read for v in body.constvars]
    constants = {"constvars": keep(body.constvars, used), "consts": keep(body.consts, used)}
    return jaxcompat.replace_jaxpr(body, invars=invars, outvars=outvars, eqns=eqns, **constants)


class Memo:
    """The results of one run of a pass by jaxpr: a shared jaxpr is processed once.

    It lives as long as the run that owns it. Results to keep between runs belong in a
    `caches.JaxprCache`.
    """

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def __call__(self, make: Callable[[], T], jaxpr: AnyJaxpr, *request: Hashable) -> T:
        """Return the result of `make()` from the first request for this jaxpr."""
        key = anchor(jaxpr), type(jaxpr), request
        if key not in self._made:
            self._made[key] = make()
        result: T = self._made[key]
        return result


class Writer:
    """One body while it is rewritten: its new equations, and the environment of its variables."""

    def __init__(
        self,
        body: ClosedJaxpr,
        holds_constants: bool,
        inside: Callable[[JaxprEqn], JaxprEqn],
        outside_in: bool = False,
    ):
        self.body = body
        #: Whether `constant` may return arrays; scalars are literals and always possible.
        self.holds_constants = holds_constants
        self._inside = inside
        self._outside_in = outside_in
        jaxpr = jaxcompat.open_jaxpr(body)
        self.eqns: list[JaxprEqn] = []
        #: The atoms that replace variables which no equation defines any more.
        self.env: dict[Var, Atom] = {}
        #: The equation that defines a variable, of those written so far.
        self.definition: dict[Var, JaxprEqn] = {}
        #: The written equations whose results are no longer read, by identity; removed at the end.
        self.dead: dict[int, JaxprEqn] = {}
        #: Arrays that a call donates. Under a second name, one might be read after the call.
        self.donated = {v for v, _ in donated_operands(jaxpr.eqns)}
        self.constvars = list(jaxpr.constvars)
        closed = body if isinstance(body, jaxcompat.ClosedJaxpr) else None
        self.consts = list(closed.consts) if closed is not None else []
        #: The values of constants of the body, by variable.
        self.constant_values: dict[Var, Any] = dict(zip(self.constvars, self.consts, strict=False))
        #: The variables of these constants by the identity of the value and its type, created on
        #: the first request, each with the requested value.
        self._constant_of: dict[tuple[int, Aval], tuple[Var, object]] | None = None

    # --- for rules -----------------------------------------------------------------------------

    def lookup(self, atom: Atom) -> Atom:
        """Return the atom that replaces an atom of the old body."""
        return atom if type(atom) is Literal else self.env.get(atom, atom)

    def value(self, atom: Atom) -> Any:
        """Return the value of a literal or a constant of the body; None for any other atom."""
        if type(atom) is Literal:
            return atom.val
        return self.constant_values.get(atom)

    def defined_by(self, atom: Atom, primitive: str) -> JaxprEqn | None:
        """Return the equation that defines an atom, if it is one of this primitive, or None."""
        if type(atom) is Literal:
            return None
        eqn = self.definition.get(atom)
        return eqn if eqn is not None and eqn.primitive.name == primitive else None

    def repeated_row(self, atom: Atom) -> Atom | None:
        """Return the value that an array repeats in each row, or None."""
        eqn = self.defined_by(atom, "broadcast_in_dim")
        if eqn is None or len(eqn.invars) != 1:
            return None
        (row,), dims = eqn.invars, eqn.params["broadcast_dimensions"]
        shape = atom.aval.shape
        same = row.aval.shape == shape[1:] and tuple(dims) == tuple(range(1, len(shape)))
        return row if same else None

    def add(self, eqn: JaxprEqn) -> list[Var]:
        """Write an equation as it is, and return its results."""
        self.eqns.append(eqn)
        for var in eqn.outvars:
            self.definition[var] = eqn
        return eqn.outvars

    def emit(
        self, primitive: Primitive, operands: Sequence[Atom], params: Params, like: JaxprEqn
    ) -> list[Var]:
        """Write an equation without effects, and return its results.

        Args:
            primitive: The primitive itself, `like.primitive` or that of another equation.
            operands: Its operands.
            params: Its parameters.
            like: The equation whose result types, source line and context it gets.
        """
        outs = [Var(v.aval) for v in like.outvars]
        return self.add(
            jaxcompat.new_jaxpr_eqn(
                list(operands), outs, primitive, params, set(), like.source_info, like.ctx
            )
        )

    def trace(
        self, fun: Callable[..., Any], operands: Sequence[Atom], like: JaxprEqn
    ) -> list[Atom]:
        """Write the equations of a JAX function of flat operands, and return its results.

        The function is traced in the context of `like`, whose source line the equations get.
        """
        closed = jaxcompat.traced_like(like, fun, operands)
        return self.splice(closed, operands, like, keep_source=False)

    def splice(
        self,
        closed: ClosedJaxpr,
        operands: Sequence[Atom],
        call: JaxprEqn,
        *,
        keep_source: bool = True,
        rule: RewriteRule | None = None,
    ) -> list[Atom]:
        """Write the equations of a closed jaxpr, on fresh variables, and return its results.

        Calls among them donate nothing.

        Args:
            closed: The jaxpr.
            operands: The atoms that replace its arguments.
            call: The equation that they replace; they get its name scopes.
            keep_source: Keep the source lines of the equations; else they get that of `call`.
            rule: Applied to each equation like a visitor's rule. Its results are not checked.

        Raises:
            ValueError: If the jaxpr has constants that this body cannot hold.
        """
        jaxpr = jaxcompat.open_jaxpr(closed)
        names: dict[Var, Atom] = {
            var: self._as_weak(atom, var.aval, call)
            for var, atom in zip(jaxpr.invars, operands, strict=True)
        }
        for var, const in zip(jaxpr.constvars, closed.consts, strict=True):
            names[var] = self.constant(const, var.aval)
        source_of = jaxcompat.source_under(call) if keep_source else lambda _: call.source_info
        written, definition = self.eqns, self.definition
        for eqn in jaxpr.eqns:  # written for speed: most have no effects
            ins = [v if type(v) is Literal else names[v] for v in eqn.invars]
            outs = []
            for old in eqn.outvars:
                names[old] = var = old if type(old) is DropVar else Var(old.aval)
                outs.append(var)
            effects, params = eqn.effects, eqn.params
            if effects:
                effects = jaxcompat.renamed_effects(effects, names)
            if "donated_invars" in params and any(params["donated_invars"]):
                # JAX ignores the donation of a call inside a call; in this body it would not.
                params = {**params, "donated_invars": (False,) * len(ins)}
            source = source_of(eqn.source_info)
            new = JaxprEqn(ins, outs, eqn.primitive, params, effects, source, eqn.ctx)
            new = _with_static_slices(new) if effects else new
            if rule is not None:
                num_eqns, num_consts = len(self.eqns), len(self.constvars)
                if (atoms := rule(new)) is not None:
                    names.update(zip(eqn.outvars, atoms, strict=True))
                    continue
                self.rollback(num_eqns, num_consts)
                new = self._inside(new) if self._outside_in else new
                self.add(new)
                continue
            written.append(new)
            for var in outs:
                definition[var] = new
        return [v if type(v) is Literal else names[v] for v in jaxpr.outvars]

    def constant(self, value: object, aval: Aval) -> Atom:
        """Return an atom for a constant: a literal for a scalar, else a constant of the body.

        Raises:
            ValueError: If it is an array, and the body cannot hold constants.
        """
        if literal := jaxcompat.as_literal(value, aval):
            return literal
        if self._constant_of is None:
            constants = self.constant_values.items()
            self._constant_of = {(id(const), var.aval): (var, const) for var, const in constants}
        if (id(value), aval) in self._constant_of:
            return self._constant_of[id(value), aval][0]
        if not self.holds_constants:
            raise ValueError("this body cannot hold constants")
        const = jaxcompat.weakly_typed(value) if getattr(aval, "weak_type", False) else value
        var = Var(aval)
        self.constvars.append(var)
        self.consts.append(const)
        self.constant_values[var] = const
        self._constant_of[id(value), aval] = var, value
        return var

    def can_hold(self, closed: ClosedJaxpr) -> bool:
        """Return True if the constants of a closed jaxpr can be constants of this body."""
        return self.holds_constants or all(
            jaxcompat.as_literal(const, var.aval)
            for var, const in zip(closed.constvars, closed.consts, strict=True)
        )

    def rollback(self, num_eqns: int, num_consts: int) -> None:
        """Remove all but the first `num_eqns` equations and the first `num_consts` constants."""
        del self.eqns[num_eqns:]
        if len(self.constvars) == num_consts:
            return
        for var in self.constvars[num_consts:]:
            del self.constant_values[var]
        del self.constvars[num_consts:], self.consts[num_consts:]
        self._constant_of = None

    def may_replace(self, var: Var, atom: Atom, num_eqns: int | None = None) -> bool:
        """Return True if an atom would be accepted in the place of a result.

        Args:
            var: The result.
            atom: The atom to replace it by.
            num_eqns: The number of equations written before the rule, if some are the rule's own.
        """
        if var.aval != atom.aval and type(var) is not DropVar:
            return False
        if not self.donated or var is atom:
            return True
        return self._may_rename(var, atom, len(self.eqns) if num_eqns is None else num_eqns)

    # --- the walk ------------------------------------------------------------------------------

    def run(self, visitor: Visitor) -> AnyJaxpr:
        """Return the body, rewritten by the visitor's rule; the same object if nothing changes."""
        jaxpr = jaxcompat.open_jaxpr(self.body)
        env, rule, definition = self.env, visitor(self), self.definition
        inside = None if is_flat(jaxpr) else self._inside
        if rule is None:
            if inside is None:
                return self.body
            rule = _keep
        before, after = (None, inside) if self._outside_in else (inside, None)
        eqns, constvars = self.eqns, self.constvars
        changed = False
        for old in jaxpr.eqns:  # written for speed: most equations stay as they are
            eqn = old
            if env:
                operands = [v if type(v) is Literal else env.get(v, v) for v in eqn.invars]
                if any(map(is_not, operands, eqn.invars)):
                    eqn = eqn.replace(invars=operands)
                    if eqn.effects:
                        effects = jaxcompat.renamed_effects(eqn.effects, env)
                        eqn = _with_static_slices(eqn.replace(effects=effects))
            if before is not None and eqn.params:
                eqn = before(eqn)
            num_eqns, num_consts = len(eqns), len(constvars)
            atoms = rule(eqn)
            if atoms is not None and self._accept(eqn, atoms, num_eqns):
                changed = True
                continue
            if len(eqns) > num_eqns or len(constvars) > num_consts:
                self.rollback(num_eqns, num_consts)
            if after is not None and eqn.params:
                eqn = after(eqn)
            eqns.append(eqn)
            for var in eqn.outvars:
                definition[var] = eqn
            if eqn is not old:
                changed = True
        outvars = list(map(self.lookup, jaxpr.outvars))
        if not changed and len(self.constvars) == len(jaxpr.constvars):
            return self.body
        return jaxcompat.replace_jaxpr(
            self.body,
            constvars=self.constvars,
            consts=self.consts,
            outvars=outvars,
            eqns=[e for e in eqns if id(e) not in self.dead] if self.dead else eqns,
            debug_info=jaxpr.debug_info,
        )

    def _accept(self, eqn: JaxprEqn, atoms: Sequence[Atom], num_eqns: int) -> bool:
        """Replace results by atoms, and return True; return False if one is rejected.

        The equations after the first `num_eqns` ones are the rule's. Results of a body are cast to
        the weak types of the equation's results: JAX allows a loop, branch or call to have others.
        """
        outvars = eqn.outvars
        pairs = list(zip(outvars, atoms, strict=True))
        same = all(var.aval is atom.aval or var.aval == atom.aval for var, atom in pairs)
        if not same and eqn.params and holds_jaxpr(eqn.params.values()):
            atoms = [self._as_weak(atom, var.aval, eqn) for var, atom in pairs]
        for var, atom in zip(outvars, atoms, strict=True) if self.donated or not same else ():
            if not self.may_replace(var, atom, num_eqns):
                return False
        for var, atom in zip(outvars, atoms, strict=True):
            if var is not atom:
                self.env[var] = atom
        return True

    def _as_weak(self, atom: Atom, aval: Aval, like: JaxprEqn) -> Atom:
        """Return an atom with the weak type of `aval`: itself, another literal, or a cast of it."""
        if atom.aval is aval or atom.aval == aval or not hasattr(aval, "weak_type"):
            return atom
        weak = bool(aval.weak_type)
        new = atom.aval.update(weak_type=weak)
        if new == atom.aval:
            return atom
        if type(atom) is Literal:
            return jaxcompat.as_literal(atom.val, new)
        params = {"new_dtype": new.dtype, "weak_type": weak, "sharding": None}
        cast = jaxcompat.new_jaxpr_eqn(
            [atom],
            [Var(new)],
            lax.convert_element_type_p,
            params,
            set(),
            like.source_info,
            like.ctx,
        )
        return self.add(cast)[0]

    def _may_rename(self, var: Var, atom: Atom, num_eqns: int) -> bool:
        """Return True if no donated array gets a second name, that is, if the atom is new."""
        if type(atom) is not Literal and atom in self.donated:
            return False
        new = (v for eqn in self.eqns[num_eqns:] for v in eqn.outvars)
        return var not in self.donated or any(v is atom for v in new)


def _keep(eqn: JaxprEqn) -> None:
    """Keep an equation: the rule of a body in which only the bodies inside change."""


#: Operations on a part of a ref: the parameter with its structure, and the operands before it.
_INDEXED = {
    "get": ("tree", 1),
    "swap": ("tree", 2),
    "addupdate": ("tree", 2),
    "masked_load": ("args_tree", 0),
    "masked_swap": ("args_tree", 0),
}


def _with_static_slices(eqn: JaxprEqn) -> JaxprEqn:
    """Return an equation in whose part of a ref no slice starts at a literal.

    A slice that starts at a number has it in its structure. JAX's compilers of kernels take a
    literal for such a number, and then find that they have an operand too many.
    """
    parameter, first = _INDEXED.get(eqn.primitive.name, ("", 0))
    if not parameter or not any(type(v) is Literal for v in eqn.invars[first:]):
        return eqn

    def static(index: Any) -> Any:
        is_literal = isinstance(index, jaxcompat.IndexSlice) and type(index.start) is Literal
        return replace(index, start=int(index.start.val)) if is_literal else index

    def with_static(node: Any) -> Any:
        if not isinstance(node, jaxcompat.NDIndexer):
            return node
        return replace(node, indices=tuple(map(static, node.indices)))

    part = eqn.params[parameter].unflatten(eqn.invars[first:])
    part = jax.tree.map(
        with_static, part, is_leaf=lambda node: isinstance(node, jaxcompat.NDIndexer)
    )
    operands = [*eqn.invars[:first], *jax.tree.leaves(part)]
    if len(operands) == len(eqn.invars):
        return eqn
    params = {**eqn.params, parameter: jax.tree.structure(part)}
    return eqn.replace(invars=operands, params=params)


# --- constant operands ----------------------------------------------------------------------------
# Constants that the bodies of loops, branches and calls take from outside, as operands.

#: Constants by identity and type, each with the variable of the body that represents it.
Taken: TypeAlias = dict[tuple[int, Aval], tuple[Var, Any]]


def pass_constants(
    inside: Regions, opened: Sequence[tuple[ClosedJaxpr, Taken]], taken: Taken, memo: Memo
) -> JaxprEqn:
    """Return an equation that passes to its bodies the constants that they take.

    Args:
        inside: The regions of the equation. It must not have a user-defined rule.
        opened: Each body, which takes constants after its arguments, and these constants.
        taken: The constants of the jaxpr around the equation. New ones are added to it.
        memo: The results of this run of the pass: equations that share a body share the new one.
    """
    fields = [_constants_field(inside, region) for region in inside.regions]
    wanted: dict[str, Taken] = {name: {} for name in fields}
    for name, (_, consts) in zip(fields, opened, strict=True):
        wanted[name] = {**consts, **wanted[name]}
    same = all(body is old for (body, _), old in zip(opened, inside.bodies, strict=True))
    if same and not any(wanted.values()):
        return inside.eqn
    bodies = [
        _with_constants(inside, region, *parts, name, wanted[name], memo)
        for region, parts, name in zip(inside.regions, opened, fields, strict=True)
    ]
    sharded = isinstance(inside.view, ShardMap)  # inside it the types are those of a shard
    more: dict[str, list[Var]] = {name: [] for name in wanted}
    for name, constants in wanted.items():
        for (number, own_type), (_, value) in constants.items():
            aval = jax.typeof(value) if sharded else own_type
            var, _ = taken.setdefault((number, aval), (Var(aval), value))
            more[name].append(var)
    return inside.rebuild(bodies, more=more)


def _constants_field(inside: Regions, region: Region) -> str:
    """Return the loop-invariant field of operands through which a body takes its constants."""
    changing = {*(name for name, _ in inside.edges.carried), *inside.edges.sliced}
    return region.constants or next(name for name in region.groups if name not in changing)


def _with_constants(
    inside: Regions,
    region: Region,
    body: ClosedJaxpr,
    consts: Taken,
    name: str,
    wanted: Taken,
    memo: Memo,
) -> ClosedJaxpr:
    """Return a body that takes all `wanted` constants, in the field of operands `name`."""
    taken = {
        consts[key][0] if key in consts else Var(var.aval): key for key, (var, _) in wanted.items()
    }
    invars = inside.arguments(region, body.invars[: len(region.ins)], {name: list(taken)})
    if invars == list(body.invars):
        return body
    positions: dict[Var, Hashable] = {**taken, **{v: i for i, v in enumerate(body.invars)}}
    order = tuple(positions[v] for v in invars)
    return memo(lambda: jaxcompat.replace_jaxpr(body, invars=invars), body, order)


# --- array literals -------------------------------------------------------------------------------
# Turn the arrays that a jaxpr holds as literals into constants.
#
# With `jax_use_simplified_jaxpr_constants` JAX writes an array that a function closes over as a
# literal into the equations that read it, also in the bodies of loops and calls. Here it is always
# a constant: of the program, once however often it is read, or of the `jit` that closes over it.
# Loops, branches and other calls take it as an operand. JAX does the same without that switch, and
# analyses and passes rely on it: to them a literal is a number.

#: By jaxpr: whether it has array literals at any depth, and the jaxpr without them.
_known = JaxprCache()


def as_constants(jaxpr: AnyJaxpr, old: AnyJaxpr | None = None) -> AnyJaxpr:
    """Return a jaxpr, closed or open, in which array literals are constants.

    Bodies of primitives without a structured view are left alone.

    Args:
        jaxpr: The jaxpr.
        old: One from which it is made. If that has no array literals, equations in both are not
            visited.

    Returns:
        The jaxpr, the same object for the same jaxpr; `jaxpr` itself if it has no array literals.
    """
    if not _has_literals(jaxpr, old):
        return jaxpr
    cached, request = _known.of(jaxpr), ("without", type(jaxpr))
    if request not in cached:
        cached[request] = _LiteralHoister().holding(jaxpr)
    return cached[request]


def _is_array(atom: Atom) -> bool:
    return type(atom) is Literal and bool(getattr(atom.aval, "shape", ()))


def _has_literals(jaxpr: AnyJaxpr, old: AnyJaxpr | None = None) -> bool:
    cached = _known.of(jaxpr)
    has_literals = cached.get("has")
    if has_literals is None:
        body, eqns = jaxcompat.open_jaxpr(jaxpr), jaxpr.eqns
        if old is not None and not _has_literals(old):
            eqns = set(eqns).difference(old.eqns)
        operands = [v for eqn in eqns for v in eqn.invars if type(v) is Literal]
        has_literals = any(map(_is_array, (*operands, *body.outvars)))
        if not has_literals and not is_flat(body, old and jaxcompat.open_jaxpr(old)):
            has_literals = any(_has_literals(inner) for eqn in eqns for inner in _bodies(eqn))
        cached["has"] = has_literals
    return has_literals


def _holds_its_own(eqn: JaxprEqn) -> bool:
    """Return True if an equation is a call whose body has constants of its own."""
    row = traits(eqn)
    return bool(row.call) and row.holds_constants


def _bodies(eqn: JaxprEqn) -> Sequence[AnyJaxpr]:
    """Return the bodies of an equation that can have constants or take them as operands."""
    if not eqn.params:
        return ()
    if eqn.primitive.name in CALLS and _holds_its_own(eqn):  # fast, as most bodies are those of jit
        return (eqn.params[CALLS[eqn.primitive.name][0]],)
    if not holds_jaxpr(eqn.params.values()):
        return ()
    if _holds_its_own(eqn):
        return [body for _, body in sub_jaxprs(eqn)]
    inside = regions(eqn)
    return () if inside is None else inside.bodies


class _LiteralHoister:
    """Turns the array literals of a jaxpr into constants; shared bodies stay shared."""

    def __init__(self) -> None:
        self._memo = Memo()

    def holding(self, jaxpr: AnyJaxpr) -> AnyJaxpr:
        """Return a jaxpr that holds its array literals, and those of its loops, as constants."""
        return self._memo(lambda: self._holding(jaxpr), jaxpr, "holding")

    def _holding(self, jaxpr: AnyJaxpr) -> AnyJaxpr:
        body = jaxcompat.open_jaxpr(jaxpr)
        consts = getattr(jaxpr, "consts", ())
        pairs = zip(body.constvars, consts, strict=True) if consts else ()
        taken: Taken = {(identity(value), var.aval): (var, value) for var, value in pairs}
        count = len(taken)
        eqns, outvars = self._parts(body.eqns, body.outvars, taken)
        new = list(taken.values())[count:]
        return jaxcompat.replace_jaxpr(
            jaxpr,
            constvars=[*body.constvars, *(var for var, _ in new)],
            consts=[*consts, *(value for _, value in new)],
            eqns=eqns,
            outvars=outvars,
            debug_info=body.debug_info,
        )

    def _opened(self, body: ClosedJaxpr) -> tuple[ClosedJaxpr, Taken]:
        """Return a body that takes its array literals after its arguments, and these literals."""
        return self._memo(lambda: self._taking(body), body, "opened")

    def _taking(self, body: ClosedJaxpr) -> tuple[ClosedJaxpr, Taken]:
        taken: Taken = {}
        if not _has_literals(body):
            return body, taken
        eqns, outvars = self._parts(body.eqns, body.outvars, taken)
        invars = [*body.invars, *(var for var, _ in taken.values())]
        return jaxcompat.replace_jaxpr(body, invars=invars, outvars=outvars, eqns=eqns), taken

    def _parts(
        self, eqns: Sequence[JaxprEqn], outvars: Sequence[Atom], taken: Taken
    ) -> tuple[list[JaxprEqn], list[Atom]]:
        """Replace array literals by variables, and add new ones to `taken`."""

        def taking(atom: Atom) -> Atom:
            if not _is_array(atom):
                return atom
            key = identity(atom.val), atom.aval
            return taken.setdefault(key, (Var(atom.aval), atom.val))[0]

        rewritten = []
        for eqn in eqns:
            new = eqn
            if any(map(_is_array, eqn.invars)):
                new = eqn.replace(invars=list(map(taking, eqn.invars)))
            inside = any(map(_has_literals, _bodies(eqn)))
            rewritten.append(self._inside(new, taken) if inside else new)
        return rewritten, list(map(taking, outvars))

    def _inside(self, eqn: JaxprEqn, taken: Taken) -> JaxprEqn:
        """Return an equation whose bodies have no array literals."""
        if _holds_its_own(eqn):
            return with_bodies(
                eqn, lambda body: self.holding(body) if _has_literals(body) else body
            )
        inside = regions(eqn)
        if inside is None:
            return eqn
        if inside.edges.has_rule:
            return self._custom_call(inside, taken)
        return pass_constants(inside, list(map(self._opened, inside.bodies)), taken, self._memo)

    def _custom_call(self, inside: Regions, taken: Taken) -> JaxprEqn:
        """Return a custom call that takes its constants first; its rule does not take them."""
        eqn = inside.eqn
        body, consts = self._opened(inside.bodies[0])
        count = len(eqn.invars)
        invars = [*body.invars[count:], *body.invars[:count]]
        body = jaxcompat.replace_jaxpr(body, invars=invars)
        operands = [
            taken.setdefault(key, (Var(var.aval), value))[0] for key, (var, value) in consts.items()
        ]
        call = inside.view.rebuild(operands=(*operands, *eqn.invars), body=body)
        more = jaxcompat.with_leading_consts(call.params, len(consts))
        return call.replace(params={**call.params, **more})
