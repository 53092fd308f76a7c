"""The pass `mixed_precision`: equations that take and return a narrower dtype, and their places."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias
from typing import Literal as OneOf

import jax
import numpy as np
from jax import numpy as jnp

from jaxprtool import jaxcompat
from jaxprtool.errors import PipelineError, did_you_mean
from jaxprtool.ir.documents import some
from jaxprtool.ir.equations import all_jaxprs, is_array
from jaxprtool.ir.frames import frames_now
from jaxprtool.ir.program import Program
from jaxprtool.ir.regions import Regions, regions
from jaxprtool.ir.scopes import ScopePaths
from jaxprtool.ir.traits import nondefault_options, traits
from jaxprtool.jaxcompat import (
    AnyJaxpr,
    Atom,
    Aval,
    ClosedJaxpr,
    DropVar,
    DType,
    JaxprEqn,
    Literal,
    Var,
)
from jaxprtool.passes import Pass

# --- mixed precision ------------------------------------------------------------------------------
# The pass `mixed_precision`.

#: The dtypes to compute in.
COMPUTE_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class MixedPrecision(Pass):
    """Compute in a narrower dtype, except at chosen lines and scopes.

    Products, elementwise functions, and equations that move values take and return the narrower
    dtype. Sums and other accumulations, linear algebra, and random numbers stay in the program's
    dtype, as do arguments, results and carried values of loops. A value is cast once, and not for
    each use. The rules of custom_jvp and custom_vjp calls stay as they are: apply `grad` first.

    Args:
        compute_dtype: `bfloat16`, `float16`, or `float32` for programs in double precision.
        keep: Lines (`'model.py:30'`) and scopes (`'Block_0/LayerNorm_0'`) that stay in the
            program's dtype.

    Raises:
        PipelineError: If there is no such dtype, or a place to keep computes no floats.

    Example:
        def f(x, w):
            return jnp.tanh(x @ w)

        $ jaxprtool opt f.py:f --args "f32[8,3], f32[3,4]" -p mixed_precision
        { lambda ; a:f32[8,3] b:f32[3,4]. let
            c:bf16[8,3] = convert_element_type[new_dtype=bfloat16 weak_type=False] a
            d:bf16[3,4] = convert_element_type[new_dtype=bfloat16 weak_type=False] b
            e:bf16[8,4] = dot_general[
              dimension_numbers=(([1], [0]), ([], []))
              preferred_element_type=bfloat16
            ] c d
            f:bf16[8,4] = tanh e
            g:f32[8,4] = convert_element_type[new_dtype=float32 weak_type=False] f
          in (g,) }
    """

    name: ClassVar[str] = "mixed_precision"
    group: ClassVar[str] = "transform"
    preserves: ClassVar[bool] = False

    compute_dtype: str = "bfloat16"
    keep: list[str] | tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.compute_dtype not in COMPUTE_DTYPES:
            raise PipelineError(
                f"{self.name}: '{self.compute_dtype}' is not a compute_dtype",
                did_you_mean(self.compute_dtype, COMPUTE_DTYPES)
                or f"available: {', '.join(COMPUTE_DTYPES)}",
            )

    @property
    def jax_dtype(self) -> DType:
        """The dtype to compute in."""
        return jnp.dtype(self.compute_dtype)

    def __call__(self, program: Program) -> Program:
        kept = KeptPlaces(program, self.keep)
        jaxpr = Narrowing(self.jax_dtype, kept).of(program.jaxpr)
        kept.require_matches()
        return program.replace(jaxpr=jaxpr)


# --- narrowing ------------------------------------------------------------------------------------
# The rewriting of `mixed_precision`: a jaxpr whose equations take and return a narrower dtype.
#
# A value of a wide dtype has a wide form, a narrow form, or both. The equation that defines it
# defines one; the other is a cast, written where it is first read. So a value is cast at most once
# in each body. A body takes an argument in its narrow form if the operand has one, or if all that
# the body does with it is to cast it: parameters that a loop reads are cast before the loop.
# Arguments and results of the whole program, carried values of loops, and those of calls with a
# rule of their own keep their types, as donated operands do.

_CAST = jax.lax.convert_element_type_p


class Narrowing:
    """Rewrites jaxprs to a narrower dtype.

    Args:
        dtype: The dtype to compute in.
        keeps: Returns True for an equation that stays wide. It is called with each equation that
            can be narrow, preceded by those whose bodies contain it.
    """

    def __init__(self, dtype: DType, keeps: Callable[[EquationPath], bool]) -> None:
        self.dtype, self.keeps = dtype, keeps

    def of(self, jaxpr: AnyJaxpr) -> ClosedJaxpr:
        """Return a jaxpr, rewritten; the same object if nothing changes."""
        body = _NarrowedBody(self, jaxpr, [False] * len(jaxcompat.open_jaxpr(jaxpr).invars), ())
        return body.closed([False] * len(body.jaxpr.outvars))

    def is_wide(self, atom: Atom) -> bool:
        """Return True for an array of floats wider than the dtype."""
        aval = atom.aval
        if not is_array(aval) or not jnp.issubdtype(aval.dtype, jnp.floating):
            return False
        return bool(np.dtype(aval.dtype).itemsize > np.dtype(self.dtype).itemsize)

    def narrowed(self, aval: Aval) -> Aval:
        """Return the type of the narrow form of a value."""
        return aval.update(dtype=self.dtype)


@dataclass(eq=False)
class _Called:
    """An equation with bodies, while its types are chosen."""

    bodies: list[_NarrowedBody]
    #: For each operand, whether it is passed in its narrow form.
    narrow: list[bool]


class _NarrowedBody:
    """The rewriting of one body.

    Args:
        narrowing: The options.
        jaxpr: The body.
        narrow: For each argument, whether the body takes it in its narrow form.
        around: The equations around the body.
    """

    def __init__(
        self, narrowing: Narrowing, jaxpr: AnyJaxpr, narrow: Sequence[bool], around: EquationPath
    ) -> None:
        self._to, self._given, self._around = narrowing, jaxpr, around
        self.jaxpr = jaxcompat.open_jaxpr(jaxpr)
        self._eqns: list[JaxprEqn] = []
        #: The forms of values that are not, or not only, their own variable.
        self._wide: dict[Var, Atom] = {}
        self._narrow: dict[Var, Atom] = {}
        #: The values whose defining equation returns the narrow form.
        self._born_narrow: set[Var] = set()
        #: The values that are read in their wide form, or in a form that has no choice.
        self._read_wide: set[Var] = set()
        self._definition: dict[Var, JaxprEqn] = {}
        self._donated = {
            v
            for eqn in self.jaxpr.eqns
            if eqn.primitive.name == "jit"
            for v, donated in zip(eqn.invars, eqn.params["donated_invars"], strict=True)
            if donated and type(v) is not Literal
        }
        self._invars = []
        for var, is_narrow in zip(self.jaxpr.invars, narrow, strict=True):
            self._invars.append(self._new_narrow(var) if is_narrow else var)
        for eqn in self.jaxpr.eqns:
            self._equation(eqn)

    # --- the result -----------------------------------------------------------------------------

    def defined_narrow(self, atom: Atom) -> bool:
        """Return True if a value is defined in its narrow form."""
        return type(atom) is not Literal and atom in self._born_narrow

    def only_cast(self, position: int) -> bool:
        """Return True if an argument is read, and only in its narrow form."""
        var = self.jaxpr.invars[position]
        outs = {v for v in self.jaxpr.outvars if type(v) is not Literal}
        return var in self._narrow and var not in self._read_wide and var not in outs

    def closed(self, narrow: Sequence[bool]) -> ClosedJaxpr:
        """Return the body; for each result, `narrow` is whether it is in its narrow form."""
        outs = []
        for atom, is_narrow in zip(self.jaxpr.outvars, narrow, strict=True):
            like = self._definition.get(atom) if type(atom) is not Literal else None
            like = like or (self._around[-1] if self._around else None)
            outs.append(self._narrow_form(atom, like) if is_narrow else self._form(atom, like))
        same = len(self._eqns) == len(self.jaxpr.eqns) and all(
            a is b for a, b in zip(self._eqns, self.jaxpr.eqns, strict=True)
        )
        if same and list(outs) == list(self.jaxpr.outvars) and self._invars == self.jaxpr.invars:
            return self._given
        return jaxcompat.replace_jaxpr(
            self._given, invars=self._invars, outvars=outs, eqns=self._eqns
        )

    # --- forms of values ------------------------------------------------------------------------

    def _new_narrow(self, var: Var) -> Var:
        """Define a value in its narrow form, and return the variable of that form."""
        narrow = Var(self._to.narrowed(var.aval))
        self._narrow[var] = narrow
        self._born_narrow.add(var)
        return narrow

    def _form(self, atom: Atom, like: JaxprEqn | None) -> Atom:
        """Return a value in the type that it has in the program."""
        if type(atom) is Literal:
            return atom
        self._read_wide.add(atom)
        if atom not in self._wide:
            is_narrow = atom in self._born_narrow
            self._wide[atom] = (
                self._cast(self._narrow[atom], atom.aval, like) if is_narrow else atom
            )
        return self._wide[atom]

    def _narrow_form(self, atom: Atom, like: JaxprEqn | None) -> Atom:
        """Return a value of a wide dtype in its narrow form."""
        if type(atom) is Literal:
            return self._narrow_literal(atom, like)
        if atom not in self._narrow:
            aval = self._to.narrowed(atom.aval)
            self._narrow[atom] = self._cast(self._wide.get(atom, atom), aval, like)
        return self._narrow[atom]

    def _narrow_literal(self, atom: Literal, like: JaxprEqn | None) -> Atom:
        aval = self._to.narrowed(atom.aval)
        with np.errstate(over="ignore"):  # an infinity, as the cast of an array would give
            literal = jaxcompat.as_literal(np.asarray(atom.val).astype(self._to.dtype), aval)
        return self._cast(atom, aval, like) if literal is None else literal

    def _cast(self, atom: Atom, aval: Aval, like: JaxprEqn | None) -> Var:
        assert like is not None  # a value of the whole program's signature is not cast
        out = Var(aval)
        params = {"new_dtype": aval.dtype, "weak_type": aval.weak_type, "sharding": None}
        eqn = jaxcompat.new_jaxpr_eqn(
            [atom], [out], _CAST, params, set(), like.source_info, like.ctx
        )
        self._eqns.append(eqn)
        return out

    # --- equations ------------------------------------------------------------------------------

    def _equation(self, eqn: JaxprEqn) -> None:
        self._definition.update(dict.fromkeys(eqn.outvars, eqn))
        inside = regions(eqn)
        if inside is not None:
            self._held(eqn, inside)
        elif not self._can_be_narrow(eqn) or self._to.keeps((*self._around, eqn)):
            self._write(eqn, [self._form(x, eqn) for x in eqn.invars], eqn.outvars)
        elif eqn.primitive is _CAST:
            self._of_cast(eqn)
        else:
            ins = [
                self._narrow_form(x, eqn) if self._to.is_wide(x) else self._form(x, eqn)
                for x in eqn.invars
            ]
            outs = [self._new_narrow(v) if self._to.is_wide(v) else v for v in eqn.outvars]
            self._write(eqn, ins, outs, _narrow_params(eqn, self._to.dtype))

    def _write(
        self,
        eqn: JaxprEqn,
        operands: Sequence[Atom],
        outs: Sequence[Var],
        changes: dict[str, Any] | None = None,
    ) -> None:
        new, old = (*operands, *outs), (*eqn.invars, *eqn.outvars)
        if any(a is not b for a, b in zip(new, old, strict=True)):
            params = {**eqn.params, **(changes or {})}
            eqn = eqn.replace(invars=list(operands), outvars=list(outs), params=params)
        self._eqns.append(eqn)

    def _can_be_narrow(self, eqn: JaxprEqn) -> bool:
        if not traits(eqn).narrows or eqn.effects or _has_algorithm(eqn):
            return False
        if "out_dtype" in nondefault_options(eqn):  # it names the dtype that it computes in
            return False
        if eqn.primitive is _CAST:
            return self._is_plain_cast(eqn)
        return any(map(self._to.is_wide, eqn.invars))

    def _is_plain_cast(self, eqn: JaxprEqn) -> bool:
        """Return True for a cast of the program whose operand and result have one narrow form."""
        (x,), (out,) = eqn.invars, eqn.outvars
        dtypes = self._to.dtype, x.aval.dtype, out.aval.dtype
        floats = all(self._to.is_wide(v) or v.aval.dtype == dtypes[0] for v in (x, out))
        same = x.aval.weak_type == out.aval.weak_type and eqn.params["sharding"] is None
        return floats and same and type(x) is not Literal and type(out) is not DropVar

    def _of_cast(self, eqn: JaxprEqn) -> None:
        (x,), (out,) = eqn.invars, eqn.outvars
        narrow = self._narrow_form(x, eqn) if self._to.is_wide(x) else self._form(x, eqn)
        if self._to.is_wide(out):
            self._narrow[out] = narrow
            self._born_narrow.add(out)
        else:
            self._wide[out] = narrow

    # --- bodies ---------------------------------------------------------------------------------

    def _held(self, eqn: JaxprEqn, inside: Regions) -> None:
        """Write an equation with bodies, with narrow operands and results where possible."""
        fixed = inside.edges.has_rule or traits(eqn).custom_derivative
        carried_in = {i for i, _ in inside.carried}
        free = [
            not fixed
            and i not in carried_in
            and self._to.is_wide(x)
            and not (type(x) is not Literal and x in self._donated)
            for i, x in enumerate(eqn.invars)
        ]
        narrow = [
            is_free and self.defined_narrow(x) for x, is_free in zip(eqn.invars, free, strict=True)
        ]
        called = self._called(eqn, inside, narrow)
        more = [
            is_free and (is_narrow or self._casts(inside, called, i))
            for i, (is_free, is_narrow) in enumerate(zip(free, narrow, strict=True))
        ]
        if more != narrow:
            called = self._called(eqn, inside, more)
        outs_narrow = [not fixed and self._to.is_wide(v) for v in eqn.outvars]
        for _, carried in inside.carried:
            outs_narrow[carried] = False
        for body, region in zip(called.bodies, inside.regions, strict=True):
            for atom, out in zip(body.jaxpr.outvars, region.outs, strict=True):
                if out is not None:
                    outs_narrow[out] &= body.defined_narrow(atom)
        bodies = [
            body.closed([out is not None and outs_narrow[out] for out in region.outs])
            for body, region in zip(called.bodies, inside.regions, strict=True)
        ]
        operands = [
            self._narrow_form(x, eqn) if is_narrow else self._form(x, eqn)
            for x, is_narrow in zip(eqn.invars, called.narrow, strict=True)
        ]
        outs = [
            self._new_narrow(v) if is_narrow else v
            for v, is_narrow in zip(eqn.outvars, outs_narrow, strict=True)
        ]
        if any(new is not old for new, old in zip(bodies, inside.bodies, strict=True)):
            new = inside.with_bodies(bodies)
            new = new.replace(invars=operands, outvars=outs)
            self._eqns.append(new)
        else:
            self._write(eqn, operands, outs)

    def _called(self, eqn: JaxprEqn, inside: Regions, narrow: list[bool]) -> _Called:
        return _Called(
            [
                _NarrowedBody(self._to, body, [narrow[i] for i in region.ins], (*self._around, eqn))
                for body, region in zip(inside.bodies, inside.regions, strict=True)
            ],
            narrow,
        )

    def _casts(self, inside: Regions, called: _Called, operand: int) -> bool:
        """Return True if the bodies read an operand, and only in its narrow form."""
        uses = [
            called.bodies[number].only_cast(inside.jaxprs[number].invars.index(var))
            for number, var in inside.arguments_by_operand[operand]
        ]
        return bool(uses) and all(uses)


def _has_algorithm(eqn: JaxprEqn) -> bool:
    """Return True if the program requests an algorithm, which fixes the dtype of the operands."""
    algorithms = jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset
    return isinstance(eqn.params.get("precision"), algorithms)


def _narrow_params(eqn: JaxprEqn, dtype: DType) -> dict[str, Any]:
    """Return the parameters that name the dtype of a result."""
    name = "preferred_element_type"
    return {name: dtype} if name in eqn.params else {}


# --- places ---------------------------------------------------------------------------------------
# The places of equations that a user can name: source lines and scopes.
#
# A place is the text that reports show: `model.py:30`, or `GPT/Block_0/Attention_0`. An equation in
# a body belongs to the line and the scope of its enclosing equations if it has none of its own.

#: The kinds of places.
By: TypeAlias = OneOf["line", "scope"]

#: An equation, preceded by those whose bodies contain it, the outermost first.
EquationPath: TypeAlias = tuple[JaxprEqn, ...]

#: Whether a name, split at slashes, stands for a place.
_Matches: TypeAlias = Callable[[Sequence[str], Sequence[str]], bool]

#: The number of places to list if none matches.
_SHOWN = 8


def places_of(program: Program, by: By) -> Callable[[EquationPath], str]:
    """Return a function from an equation to its place; "" if that is unknown."""
    if by == "line":
        frames = frames_now(program.roots, chosen=False)
        return lambda path: frames.line_of(path).user
    scopes = ScopePaths(all_jaxprs(jaxcompat.open_jaxpr(program.jaxpr)), program.roots)
    return lambda path: "/".join(scopes.of(path))


class KeptPlaces:
    """Decides which equations are at one of the places that a user names.

    Args:
        program: The program.
        names: Lines, with as many folders as the user likes (`model.py:30`), and scopes, by the end
            of their path (`Block_0/Attention_0`). The scopes in a named scope belong to it.
    """

    def __init__(self, program: Program, names: Sequence[str]) -> None:
        lines = [name for name in names if re.search(r":\d+$", name)]
        scopes = [name for name in names if name not in lines]
        self._program = program
        kinds: list[tuple[By, list[str], _Matches]] = [
            ("line", lines, _is_end),
            ("scope", scopes, _holds),
        ]
        self._readers = [
            (places_of(program, by), [name.split("/") for name in named], matches)
            for by, named, matches in kinds
            if named
        ]
        self._unmatched = dict.fromkeys(names)
        self._seen: dict[str, bool] = {}

    def __call__(self, path: EquationPath) -> bool:
        """Return True if an equation is at one of the places."""
        kept = False
        for read, names, matches in self._readers:
            place = read(path)
            if place not in self._seen:
                matched = [name for name in names if matches(name, place.split("/"))]
                for name in matched:
                    self._unmatched.pop("/".join(name), None)
                self._seen[place] = bool(matched)
            kept |= self._seen[place]
        return kept

    def require_matches(self) -> None:
        """Raise PipelineError if no equation was at one of the places."""
        if not self._unmatched:
            return
        name, places = next(iter(self._unmatched)), [place for place in self._seen if place]
        there = f"it computes floats in: {some(places, _SHOWN)}" if places else None
        raise PipelineError(
            f"mixed_precision: {self._program.name} computes no floats in '{name}'",
            did_you_mean(name, places) or there,
        )


def _is_end(name: Sequence[str], place: Sequence[str]) -> bool:
    return list(place[-len(name) :]) == list(name)


def _holds(name: Sequence[str], place: Sequence[str]) -> bool:
    """Return True if a scope ends a path of scopes, or one around it."""
    count = len(name)
    return any(list(place[i : i + count]) == list(name) for i in range(len(place) - count + 1))
