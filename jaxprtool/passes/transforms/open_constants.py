"""open_constants: turn constants of a program into an argument, returned separately.

    constants, apply = program.apply("open_constants").values()
    apply(x, constants())           # program(x); other constants give other results

Constants of the bodies of loops, branches and calls are passed in from outside. Values that a
custom derivative closes over stay: JAX does not differentiate with respect to them, and the rule, a
Python function, has its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import jax

from jaxprtool import jaxcompat
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.basics.paths import paths, unique
from jaxprtool.ir.core.equations import equations, size_of, substitute, with_operands
from jaxprtool.ir.core.regions import open_regions
from jaxprtool.ir.core.structured import sub_jaxprs
from jaxprtool.ir.programs.program import Program, Programs
from jaxprtool.ir.programs.trees import filled, structure
from jaxprtool.ir.rewriting.constant_operands import Taken, pass_constants
from jaxprtool.ir.rewriting.custom_rules import custom_rule, has_rule, rule_jaxprs, rules_followed
from jaxprtool.ir.rewriting.rewrite import Memo
from jaxprtool.jaxcompat import AnyJaxpr, ClosedJaxpr, JaxprEqn, Var
from jaxprtool.jaxcompat.identity import identity
from jaxprtool.passes.framework.base import Pass
from jaxprtool.passes.framework.retrace import with_names


@dataclass(frozen=True)
class OpenConstants(Pass):
    """Turn constants into an argument, as `jax.closure_convert` does; the inverse of `closed`.

    The result is two programs: `constants`, which takes no arguments and returns a list of the
    values, and `apply`, which takes such a list after the other positional arguments. Constants in
    the bodies of loops, branches and calls are included, each once.

    Args:
        min_bytes: The minimum size in bytes of a constant to turn into an argument.

    Note:
        Values that a function with a custom derivative closes over stay constants: JAX does not
        differentiate with respect to them, and the rule holds them itself.

    Example:
        table = jnp.arange(3.0)

        def f(x):
            return x * table

        $ jaxprtool opt f.py:f --args "f32[3]" -p open_constants
        # constants
        { lambda a:f32[3]; . let  in (a,) }

        # apply
        { lambda ; a:f32[3] b:f32[3]. let c:f32[3] = mul a b in (c,) }
    """

    name: ClassVar[str] = "open_constants"
    group: ClassVar[str] = "split"
    preserves: ClassVar[bool] = False

    min_bytes: int = 0

    def __call__(self, program: Program) -> Programs:
        whole = jaxcompat.close_jaxpr(program.jaxpr)
        pinned = _Pinned()
        pinned.leading(whole, [False] * len(whole.outvars))
        body, taken = _Opener(self.min_bytes, pinned.values).opened(whole)
        constants, values = (
            [var for var, _ in taken.values()],
            [value for _, value in taken.values()],
        )
        count = len(program.in_avals)
        args, kwargs = filled(program.in_tree, range(count))
        place = len(jax.tree.leaves(args))
        own, names = body.invars[:count], program.arg_names
        arg_names = unique([*names[:place], *paths("constants", values), *names[place:]])
        invars = [*own[:place], *constants, *own[place:]]
        jaxpr = jaxcompat.replace_jaxpr(body, invars=invars)
        apply = program.replace(
            jaxpr=with_names(jaxpr, program.name, arg_names, program.out_names),
            in_tree=structure(((*args, values), kwargs)),
            arg_names=arg_names,
        )
        return Programs(
            {"constants": _constants_program(program, constants, values), "apply": apply}
        )


def _constants_program(
    program: Program, constants: Sequence[Var], values: Sequence[Any]
) -> Program:
    """Return the program without arguments that returns the list of these constants."""
    out_names = tuple(paths("result", values))
    parts: dict[str, Any] = {"constvars": constants, "consts": values, "invars": (), "eqns": ()}
    jaxpr = jaxcompat.replace_jaxpr(program.jaxpr, outvars=constants, **parts)
    return Program(
        name=program.name,
        jaxpr=with_names(jaxpr, program.name, (), out_names),
        in_tree=structure(((), {})),
        out_tree=structure(values),
        arg_names=(),
        out_names=out_names,
        roots=program.roots,
    )


# --- constants that become arguments --------------------------------------------------------------


@dataclass
class _Opener:
    """The state of opening one program's constants; bodies that equations share are opened once."""

    min_bytes: int
    pinned: set[int]
    memo: Memo = field(default_factory=Memo)

    def opened(self, body: ClosedJaxpr) -> tuple[ClosedJaxpr, Taken]:
        """Return a body that takes constants after its arguments, and these constants."""
        return self.memo(lambda: self._opened(body), body)

    def _opened(self, body: ClosedJaxpr) -> tuple[ClosedJaxpr, Taken]:
        taken: Taken = {}
        names: dict[Any, Var] = {}
        left: list[tuple[Var, Any]] = []
        for var, value in zip(body.constvars, body.consts, strict=True):
            if self._opens(var, value):
                names[var], _ = taken.setdefault((identity(value), var.aval), (var, value))
            else:
                left.append((var, value))
        eqns = [self._equation(eqn, names, taken) for eqn in body.eqns]
        if not taken:
            return body, taken
        new = jaxcompat.replace_jaxpr(
            body,
            constvars=[var for var, _ in left],
            consts=[value for _, value in left],
            invars=[*body.invars, *(var for var, _ in taken.values())],
            outvars=substitute(body.outvars, names),
            eqns=eqns,
        )
        return new, taken

    def _opens(self, var: Var, value: object) -> bool:
        size = None if isinstance(var.aval, jaxcompat.AbstractRef) else size_of(var.aval)
        return size is not None and size >= self.min_bytes and identity(value) not in self.pinned

    def _equation(self, eqn: JaxprEqn, names: Mapping[Any, Var], taken: Taken) -> JaxprEqn:
        """Return an equation whose bodies are passed their constants; adds new ones to `taken`."""
        eqn = with_operands(eqn, names)
        if (inside := open_regions(eqn)) is None:
            return eqn
        return pass_constants(
            inside, [self.opened(body) for body in inside.bodies], taken, self.memo
        )


# --- constants that stay --------------------------------------------------------------------------


@dataclass
class _Pinned:
    """The constants, by identity, that must stay: those that custom derivatives close over.

    So must those of bodies that cannot take more operands.
    """

    values: set[int] = field(default_factory=set)
    memo: Memo = field(default_factory=Memo)

    @rules_followed()
    def leading(self, body: ClosedJaxpr, outs: Sequence[bool]) -> list[bool]:
        """Record the constants that stay in a body, and return which of its arguments are fixed.

        `outs` states which results are fixed, and may not depend on a constant that varies.
        """
        return self.memo(lambda: self._leading(body, outs), body, tuple(outs))

    def _leading(self, body: ClosedJaxpr, outs: Sequence[bool]) -> list[bool]:
        fixed = {v for v, flag in zip(body.outvars, outs, strict=True) if flag and _is_var(v)}
        for eqn in reversed(body.eqns):
            given = [v in fixed for v in eqn.outvars]
            inside = open_regions(eqn)
            if inside is None:
                flags = [any(given)] * len(eqn.invars)
                if has_rule(eqn):
                    closed_over = eqn.params["num_consts"]
                    flags[:closed_over] = [True] * closed_over
                    self._note(_rule_constants(eqn))
                for _, held in sub_jaxprs(eqn):
                    self._note(_constants(held))
            else:
                flags = inside.backward(given, partial(self._through, inside.bodies))
            fixed |= {v for v, flag in zip(eqn.invars, flags, strict=True) if flag and _is_var(v)}
        for var, value in zip(body.constvars, body.consts, strict=True):
            if var in fixed:
                self._note([value])
        return [v in fixed for v in body.invars]

    def _through(
        self, bodies: Sequence[ClosedJaxpr], number: int, outs: Sequence[bool]
    ) -> list[bool]:
        return self.leading(bodies[number], outs)

    def _note(self, values: Iterable[Any]) -> None:
        self.values.update(map(identity, values))


def _is_var(atom: object) -> bool:
    return isinstance(atom, Var)


def _rule_constants(eqn: JaxprEqn) -> Iterator[Any]:
    """Yield the constants of the rule of a custom derivative, and of the rules in it."""
    try:
        rule = custom_rule(eqn)
    except UnsupportedError:
        return  # then it cannot be differentiated
    for jaxpr in rule_jaxprs(rule).values():
        yield from _constants(jaxpr)


def _constants(jaxpr: AnyJaxpr) -> Iterator[Any]:
    """Yield the constants of a jaxpr at any depth."""
    closed = jaxcompat.close_jaxpr(jaxpr)
    yield from closed.consts
    for eqn in equations(jaxcompat.open_jaxpr(closed)):
        for _, held in sub_jaxprs(eqn):
            yield from getattr(held, "consts", ())
