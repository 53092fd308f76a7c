"""Reduction steps on types: smaller sizes and plainer dtypes, everywhere in a program at once.

A size or dtype is replaced in all types and parameters. This is a guess, since 3 may be a size in
one place and an axis in another; ill-typed candidates are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.ir.basics.dtypes import is_extended, is_wide
from jaxprtool.ir.core.equations import equations
from jaxprtool.ir.core.structured import map_sub_jaxprs
from jaxprtool.ir.programs.program import Program
from jaxprtool.jaxcompat import AnyJaxpr, Atom, Aval, DropVar, Literal, Var
from jaxprtool.passes.reduction.candidates import Candidate, ReductionStep, is_array, with_body

#: A function of an aval, a parameter, or the value of a constant.
_Mapped = Callable[[Any], Any]


class _Retyper:
    """A mapping of the avals, parameters and constants of a jaxpr and all jaxprs in it."""

    def __init__(self, aval: _Mapped, param: _Mapped, value: _Mapped):
        self._aval, self._param, self._value = aval, param, value
        self._made: dict[int, tuple[AnyJaxpr, AnyJaxpr]] = {}

    def jaxpr(self, old: AnyJaxpr) -> AnyJaxpr:
        if id(old) not in self._made:
            self._made[id(old)] = old, self._retyped(old)
        return self._made[id(old)][1]

    def _retyped(self, old: AnyJaxpr) -> AnyJaxpr:
        env: dict[Var, Var] = {}

        def new(var: Var) -> Var:
            if type(var) is DropVar:
                return DropVar(self._aval(var.aval))
            env[var] = Var(self._aval(var.aval))
            return env[var]

        def read(atom: Atom) -> Atom:
            if type(atom) is not Literal:
                return env[atom]
            aval = self._aval(atom.aval)
            return jaxcompat.as_literal(atom.val, aval) or atom

        parts: dict[str, Any] = {"constvars": list(map(new, old.constvars))}
        parts["invars"] = list(map(new, old.invars))
        eqns = []
        for eqn in old.eqns:
            params = {k: self._param(v) for k, v in map_sub_jaxprs(self.jaxpr, eqn).items()}
            invars = list(map(read, eqn.invars))
            effects = jaxcompat.renamed_effects(eqn.effects, env) if eqn.effects else eqn.effects
            outvars = list(map(new, eqn.outvars))
            eqns.append(eqn.replace(invars=invars, outvars=outvars, params=params, effects=effects))
        consts = getattr(old, "consts", None)
        if consts is not None:
            parts["consts"] = list(map(self._value, consts))
        return jaxcompat.replace_jaxpr(
            old, **parts, eqns=eqns, outvars=list(map(read, old.outvars))
        )


def _avals(program: Program) -> list[Aval]:
    jaxpr = jaxcompat.open_jaxpr(program.jaxpr)
    values = [*jaxpr.constvars, *jaxpr.invars]
    values += [v for eqn in equations(jaxpr) for v in eqn.outvars]
    return [v.aval for v in values if is_array(v)]


def _sizes(program: Program) -> Sequence[tuple[int, int, bool]]:
    """Return triples: a size, the largest first, a smaller one, and whether to scale multiples."""
    sizes = {n for aval in _avals(program) for n in aval.shape if isinstance(n, int) and n > 1}
    return [
        (n, small, multiples)
        for n in sorted(sizes, reverse=True)
        for small in dict.fromkeys((1, 2, n // 2))
        if small < n
        for multiples in (False, True)
    ]


def _smaller(program: Program, chosen: Sequence[tuple[int, int, bool]]) -> Candidate | None:
    ((old, new, multiples),) = chosen

    def size(n: Any) -> Any:
        if type(n) is not int or n == 0 or n % old or (n != old and not multiples):
            return n
        return n // old * new

    def aval(given: Aval) -> Aval:
        shape = getattr(given, "shape", None)
        if not shape or isinstance(given, jaxcompat.AbstractRef):
            return given
        return given.update(shape=tuple(map(size, shape)))

    def param(value: Any) -> Any:
        if type(value) is tuple:
            return tuple(map(param, value))
        return size(value)

    def cut(value: Any) -> Any:
        shape = np.shape(value)
        if tuple(map(size, shape)) == shape:
            return value
        return value[tuple(slice(size(n)) for n in shape)]

    return _mapped(program, _Retyper(aval, param, cut), cut)


def _dtypes(program: Program) -> Sequence[tuple[Any, Any]]:
    """Return each dtype that is not a plain one, with its 32-bit replacement."""
    plain = {"f": "float32", "V": "float32", "i": "int32", "u": "uint32"}
    dtypes = dict.fromkeys(aval.dtype for aval in _avals(program) if not is_extended(aval.dtype))
    return [
        (dtype, np.dtype(plain[dtype.kind]))
        for dtype in dtypes
        if dtype.kind in plain and dtype != np.dtype(plain[dtype.kind]) and not _is_float0(dtype)
    ]


def _is_float0(dtype: Any) -> bool:
    return dtype.kind == "V" and dtype.names is not None and not is_wide(dtype)


def _plainer(program: Program, chosen: Sequence[tuple[Any, Any]]) -> Candidate | None:
    dtypes = dict(chosen)

    def aval(given: Aval) -> Aval:
        dtype = getattr(given, "dtype", None)
        return given.update(dtype=dtypes[dtype]) if dtype in dtypes else given

    def param(value: Any) -> Any:
        return dtypes.get(value, value) if isinstance(value, np.dtype) else value

    def cast(value: Any) -> Any:
        dtype = getattr(value, "dtype", None)
        return value.astype(dtypes[dtype]) if dtype in dtypes else value

    return _mapped(program, _Retyper(aval, param, cast), cast)


def _mapped(program: Program, retyping: _Retyper, resize: _Mapped) -> Candidate | None:
    try:
        jaxpr = retyping.jaxpr(program.jaxpr)
    except Exception:  # JAX has no such type
        return None
    return Candidate(with_body(program, jaxpr), resize=resize)


TYPES = (
    ReductionStep("shrinking sizes", _sizes, _smaller, alone=True),
    ReductionStep("simplifying dtypes", _dtypes, _plainer),
)
