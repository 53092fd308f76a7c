"""Turn the arrays that a jaxpr holds as literals into constants.

With `jax_use_simplified_jaxpr_constants` JAX writes an array that a function closes over as a
literal into the equations that read it, also in the bodies of loops and calls. Here it is always a
constant: of the program, once however often it is read, or of the `jit` that closes over it. Loops,
branches and other calls take it as an operand. JAX does the same without that switch, and analyses
and passes rely on it: to them a literal is a number.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxprtool import jaxcompat
from jaxprtool.ir.basics.caches import JaxprCache
from jaxprtool.ir.core.equations import is_flat
from jaxprtool.ir.core.regions import Regions, regions
from jaxprtool.ir.core.structured import holds_jaxpr, sub_jaxprs
from jaxprtool.ir.core.traits import traits
from jaxprtool.ir.rewriting.constant_operands import Taken, pass_constants
from jaxprtool.ir.rewriting.rewrite import Memo, with_bodies
from jaxprtool.jaxcompat import AnyJaxpr, Atom, ClosedJaxpr, JaxprEqn, Literal, Var
from jaxprtool.jaxcompat.identity import identity

#: By jaxpr: whether it has array literals at any depth, and the jaxpr without them.
_known = JaxprCache()


def as_constants(jaxpr: AnyJaxpr) -> AnyJaxpr:
    """Return a jaxpr, closed or open, in which array literals are constants.

    Bodies of primitives without a structured view are left alone.

    Returns:
        The jaxpr, the same object for the same jaxpr; `jaxpr` itself if it has no array literals.
    """
    if not _has_literals(jaxpr):
        return jaxpr
    known, request = _known.of(jaxpr), ("without", type(jaxpr))
    if request not in known:
        known[request] = _Hoister().holding(jaxpr)
    return known[request]


def _is_array(atom: Atom) -> bool:
    return type(atom) is Literal and bool(getattr(atom.aval, "shape", ()))


def _has_literals(jaxpr: AnyJaxpr) -> bool:
    known = _known.of(jaxpr)
    found = known.get("has")
    if found is None:
        body = jaxcompat.open_jaxpr(jaxpr)
        operands = [v for eqn in body.eqns for v in eqn.invars if type(v) is Literal]
        found = any(map(_is_array, (*operands, *body.outvars)))
        if not found and not is_flat(body):
            found = any(_has_literals(inner) for eqn in body.eqns for inner in _bodies(eqn))
        known["has"] = found
    return found


def _holds_its_own(eqn: JaxprEqn) -> bool:
    """Return True if an equation is a call whose body has constants of its own."""
    row = traits(eqn)
    return bool(row.call) and row.holds_constants


def _bodies(eqn: JaxprEqn) -> Sequence[AnyJaxpr]:
    """Return the bodies of an equation that can have constants or take them as operands."""
    if not eqn.params or not holds_jaxpr(eqn.params.values()):
        return ()
    if _holds_its_own(eqn):
        return [body for _, body in sub_jaxprs(eqn)]
    inside = regions(eqn)
    return () if inside is None else inside.bodies


class _Hoister:
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
        held = len(taken)
        eqns, outvars = self._parts(body.eqns, body.outvars, taken)
        new = list(taken.values())[held:]
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

        made = []
        for eqn in eqns:
            new = eqn
            if any(map(_is_array, eqn.invars)):
                new = eqn.replace(invars=list(map(taking, eqn.invars)))
            inside = any(map(_has_literals, _bodies(eqn)))
            made.append(self._inside(new, taken) if inside else new)
        return made, list(map(taking, outvars))

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
        body, own = self._opened(inside.bodies[0])
        count = len(eqn.invars)
        invars = [*body.invars[count:], *body.invars[:count]]
        body = jaxcompat.replace_jaxpr(body, invars=invars)
        operands = [
            taken.setdefault(key, (Var(var.aval), value))[0] for key, (var, value) in own.items()
        ]
        call = inside.view.rebuild(operands=(*operands, *eqn.invars), body=body)
        more = jaxcompat.with_leading_consts(call.params, len(own))
        return call.replace(params={**call.params, **more})
