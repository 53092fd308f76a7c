"""The names in the listing of a whole program, without writing the listing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jaxprtool import jaxcompat
from jaxprtool.ir.notation.names import shared_jaxprs
from jaxprtool.ir.notation.signatures import Notation, Signature, Value
from jaxprtool.jaxcompat import Jaxpr, JaxprEqn, Var
from jaxprtool.jaxcompat.identity import identity


class Naming:
    """The names of a program's variables and shared jaxprs in a notation.

    Attributes:
        shared: The jaxprs that are written once, each with its name, in the order of the listing.
        variables: The names of variables, each assigned at its first mention.
    """

    def __init__(self, root: Jaxpr, notation: Notation):
        self._root = root
        self._notation = notation
        self.shared = shared_jaxprs(root, notation.called)
        self.variables = notation.variable_names(root, set(self.shared.values()))

    def name_all(self) -> None:
        """Mention each variable in the order of the listing."""
        for jaxpr in (*self.shared, self._root):
            self._name(jaxpr)

    def name_call(self, eqn: JaxprEqn, signature: Signature) -> None:
        """Name the variables of the bodies of a jit after those of the call."""
        for _, body in signature.called:
            if body not in self.shared:
                self.variables.follow_call(eqn, body)

    def _name(self, jaxpr: Jaxpr) -> None:
        self._mention(jaxpr.constvars)
        self._mention(jaxpr.invars)
        known, mention = self.variables.spaced, self.variables.mention
        for eqn, signature in zip(jaxpr.eqns, self._notation.signatures(jaxpr), strict=True):
            if signature.by_rule:
                jaxcompat.print_with_rule(eqn, self.variables, self.shared, types=False)
                continue
            if signature.named_by_call:
                self.name_call(eqn, signature)
            for var in eqn.outvars:
                if identity(var) not in known:
                    mention(var)
            if signature.head is None:
                for _, value in signature.pairs:
                    for body in _inside(value):
                        if body not in self.shared:
                            self._name(body)

    def _mention(self, variables: Iterable[Var]) -> None:
        for var in variables:
            self.variables.mention(var)


def _inside(value: Value) -> Iterator[Jaxpr]:
    """Yield the jaxprs in a parameter, in the order in which they are written."""
    if isinstance(value, Jaxpr):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _inside(part)
