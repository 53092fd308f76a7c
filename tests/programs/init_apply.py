"""Check `unzip`: do init and apply together compute what the program computes?

`prove_unzip(program, key_args, args)` compares the two with the original and with the reference of
`variables.py`. Everything is first evaluated one equation at a time (`stepwise.py`), where results
must be bitwise equal, and then by JAX's own evaluator, where they may differ by rounding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxprtool import jaxcompat
from jaxprtool.errors import UserFunctionError
from jaxprtool.ir.equations import equations
from jaxprtool.ir.program import Program, type_check
from jaxprtool.loading.trace import trace
from jaxprtool.passes.unzip import Unzip
from tests.programs import stepwise
from tests.programs.gradients import (
    NO_DERIVATIVE,
    NO_DERIVATIVE_OF_REFS,
    Gradients,
    derivative_of,
    has_refs,
    is_xla_fault,
)
from tests.programs.recorder import Event, recording
from tests.programs.values import bits_agree, first_value_difference, on_device, values_agree
from tests.programs.variables import KEY, LATE, Fact, Path, Reference, Site, flow

Run = tuple[list[Any], list[Event]]


@dataclass(frozen=True)
class Proof:
    """The two programs, the number of variables, and how gradients were compared."""

    init: Program
    apply: Program
    variables: int
    gradients: str


def prove_unzip(
    program: Program,
    key_args: int | tuple[int, ...] | None,
    args: Sequence[Any],
    *,
    tag: str = "variable",
    gradients: bool = True,
    compiled: bool = True,
) -> Proof:
    """Unzip a program and check both halves on flat `args`.

    Raises AssertionError if they are wrong, CheckError if one is not well typed, and the errors of
    `Unzip`.
    """
    unzipped = Unzip(tag=tag, key_args=key_args)(program)
    init, apply = unzipped["init"], unzipped["apply"]
    type_check(init)
    type_check(apply)
    case = _Case(program, init, apply, key_args, tag, args)
    case.check_declarations()
    variables = case.check_values()
    if compiled:
        case.check_compiled(variables)
    kind = case.check_gradients() if gradients else "not asked for"
    return Proof(init, apply, len(case.sites), kind)


def unzips(
    f: Callable[..., Any],
    *args: Any,
    count: int,
    key_args: int | tuple[int, ...] = 0,
    gradients: str = "reverse",
) -> tuple[Program, Program]:
    """Prove init and apply of a function with `count` variables and this kind of gradients.

    Values are compared one equation at a time. Gradients are those of compiled programs; all of
    what is compiled is compared on the corpus of the proofs.
    """
    proof = prove_unzip(trace(f, *args), key_args, jax.tree.leaves(args), compiled=False)
    expect("variables", count, proof.variables)
    expect("gradients", gradients, proof.gradients.split(":")[0])
    return proof.init, proof.apply


def primitives(program: Program) -> Counter[str]:
    """Count each primitive of a program, at any depth; in shared bodies once."""
    return Counter(eqn.primitive.name for eqn in equations(jaxcompat.open_jaxpr(program.jaxpr)))


class _Case:
    """One program, its halves, and its arguments."""

    def __init__(
        self,
        program: Program,
        init: Program,
        apply: Program,
        key_args: int | tuple[int, ...] | None,
        tag: str,
        args: Sequence[Any],
    ):
        self.program, self.init, self.apply, self.tag = program, init, apply, tag
        # JAX narrows NumPy's 64-bit arrays.
        self.args = list(map(on_device, args))
        positional, kwargs = jax.tree.unflatten(program.in_tree, list(range(len(args))))
        keys = [
            k % len(positional)
            for k in ([key_args] if isinstance(key_args, int) else key_args or [])
        ]
        self.early = jax.tree.leaves([positional[k] for k in keys])
        late = [x for i, x in enumerate(positional) if i not in keys]
        self.late = jax.tree.leaves((late, kwargs))
        self.late_tree = (late, kwargs)
        self.facts: list[Fact] = [KEY if i in self.early else LATE for i in range(len(args))]
        self.sites = flow(program.jaxpr, self.facts, tag).sites

    # --- what the programs declare ------------------------------------------------------------

    def check_declarations(self) -> None:
        """Check that no key is left, that the variables are the sown ones, and their types."""
        early = [self.args[i] for i in self.early]
        types = self._variables(lambda path, site, number: list(site.eqn.outvars))
        positional, kwargs = self.late_tree
        expect("init's arguments", _types(early), _types(self.init.in_avals))
        expect("init's results", jax.tree.structure(types), self.init.out_tree)
        expect(
            "apply's arguments",
            jax.tree.structure(((types, *positional), kwargs)),
            self.apply.in_tree,
        )
        given = [*self.init.out_avals, *(self.program.in_avals[i] for i in self.late)]
        expect("apply's types", _types(given), _types(self.apply.in_avals))
        expect("the results' structure", self.program.out_tree, self.apply.out_tree)
        expect(
            "the results' types",
            *(list(map(_shown, p.out_avals)) for p in (self.program, self.apply)),
        )
        expect("the results' names", self.program.out_names, self.apply.out_names)

    def _variables(self, leaves: Callable[[Path, Site, int], list[Any]]) -> Any:
        """Return the pytree of variables, from the leaves of the n-th one sown at a path."""
        tree: dict[str, Any] = {}
        count: Counter[Path] = Counter()
        for site in self.sites:
            level = tree
            for scope in site.path[:-1]:
                level = level.setdefault(scope, {})
            number, name = count[site.path], site.path[-1]
            count[site.path] += 1
            params = site.eqn.params
            value = jax.tree.unflatten(params["tree"], leaves(site.path, site, number))
            if params["mode"] == "append":
                level.setdefault(name, []).append(value)
            else:
                assert name not in level, f"{site.path} is there twice"
                level[name] = value
        return tree

    # --- what they compute ----------------------------------------------------------------------

    def check_values(self) -> list[Any]:
        """Compare all values, one equation at a time. Return the flat initial variables."""
        original = _run(stepwise.evaluate, self.program.jaxpr, self.args)
        variables, made = _run(
            stepwise.evaluate, self.init.jaxpr, [self.args[i] for i in self.early]
        )
        self._check_recorded(variables)
        outs, used = self._apply(stepwise.evaluate, variables)
        agree("apply of init's variables", original[0], outs)
        _same_events(original[1], made + used)
        for change in (_moved, _reversed):
            self._check_others([change(leaf) for leaf in variables])
        return variables

    def _apply(self, evaluate: Callable[..., Any], variables: list[Any]) -> Run:
        late = [self.args[i] for i in self.late]
        return _run(evaluate, self.apply.jaxpr, [*variables, *late])

    def _check_recorded(self, variables: list[Any]) -> None:
        """Compare init's variables with those that the reference records where they are sown."""
        reference = Reference(self.tag)
        with recording():
            reference.evaluate(self.program.jaxpr, self.facts, self.args)
        tree = jax.tree.unflatten(self.init.out_tree, variables)

        def check(path: Path, site: Site, number: int) -> list[Any]:
            leaves = _find(tree, path, number if site.eqn.params["mode"] == "append" else None)
            entries = reference.recorded.get(path, [])
            rounds = entries[number] if number < len(entries) else {}
            for leaf, var in zip(leaves, site.eqn.outvars, strict=True):
                known = tuple(n for n in site.lengths if n is not None)
                assert len(leaf.shape) == len(site.lengths) + len(var.aval.shape), path
                if len(known) == len(site.lengths):
                    expect(f"the shape of {path}", (*known, *var.aval.shape), leaf.shape)
            for at, expected in rounds.items():
                rows = [leaf[at] if at else leaf for leaf in leaves]
                agree(f"variable {path} at {at}", expected, rows)
            return [0 for _ in leaves]

        self._variables(check)

    def _check_others(self, variables: list[Any]) -> None:
        """Compare apply of other variables with the reference, given the same variables."""
        given = jax.tree.unflatten(self.init.out_tree, variables)
        with recording():
            expected = Reference(self.tag, given).evaluate(
                self.program.jaxpr, self.facts, self.args
            )
        agree("apply of other variables", expected, self._apply(stepwise.evaluate, variables)[0])

    def check_compiled(self, stepped: list[Any]) -> None:
        """Compare with JAX's evaluator, up to rounding, where the original is well conditioned."""
        original, variables = self.program.jaxpr, [self.args[i] for i in self.early]
        steps = _run(stepwise.evaluate, original, self.args)[0]
        try:
            before = _run(_compiled, original, self.args)
            made = _run(_compiled, self.init.jaxpr, variables)
            after = self._apply(_compiled, made[0])
        except jax.errors.JaxRuntimeError as error:
            if not is_xla_fault(error):
                raise
            return
        expect(
            "callbacks", *(Counter(e.tag for e in run) for run in (before[1], made[1] + after[1]))
        )
        ordered = ([e.tag for e in run if e.ordered] for run in (before[1], made[1] + after[1]))
        expect("ordered callbacks", *ordered)
        if first_value_difference(steps, before[0], values_agree) is None:
            agree("apply, compiled", before[0], after[0], values_agree)

    # --- derivatives ------------------------------------------------------------------------------

    def check_gradients(self) -> str:
        """Compare the derivative of apply by variables and arguments with the reference's."""
        early = [self.args[i] for i in self.early]
        with recording():
            variables = list(map(on_device, stepwise.evaluate(self.init.jaxpr, early)))
        given = [*variables, *(self.args[i] for i in self.late)]
        at = [i for i, x in enumerate(given) if _is_inexact(x)]
        results = [i for i, v in enumerate(self.program.jaxpr.outvars) if _is_inexact(v.aval)]
        if not at or not results:
            return "nothing to differentiate"

        def apply(full: list[Any]) -> list[Any]:
            return _compiled(self.apply.jaxpr, full)

        def reference(full: list[Any]) -> list[Any]:
            count = len(variables)
            args = list(self.args)
            for i, x in zip(self.late, full[count:], strict=True):
                args[i] = x
            sown = jax.tree.unflatten(self.init.out_tree, full[:count])
            return Reference(self.tag, sown).evaluate(self.program.jaxpr, self.facts, args)

        def original(full: list[Any]) -> list[Any]:
            """The original program, differentiated by its late arguments only."""
            args = list(self.args)
            for i, x in zip(self.late, full[len(variables) :], strict=True):
                args[i] = x
            return _compiled(self.program.jaxpr, args)

        refs = NO_DERIVATIVE_OF_REFS if has_refs(self.program.jaxpr) else ()
        expected_errors = (*NO_DERIVATIVE, *refs, UserFunctionError)

        def of(
            function: Callable[[list[Any]], list[Any]], by: list[int], mode: str | None = None
        ) -> Gradients | str:
            def restricted(*xs: Any) -> list[Any]:
                full = list(given)
                for i, x in zip(by, xs, strict=True):
                    full[i] = x
                outs = function(full)
                return [jnp.asarray(outs[i]) for i in results]

            primals = [on_device(given[i]) for i in by]
            return derivative_of(restricted, primals, mode, expected_errors)

        found = of(apply, at)
        if not isinstance(found, Gradients):
            # If the original is differentiable by its arguments, so must this be.
            late = [i for i in at if i >= len(variables)]
            if isinstance(of(original, late), Gradients) and isinstance(of(apply, late), str):
                raise AssertionError(f"gradients are lost: {found}")
            return found
        expected = of(reference, at, found.mode)
        if not isinstance(expected, Gradients):
            return f"the reference has none: {expected}"
        agree(f"{found.mode} gradients", expected.values, found.values, values_agree)
        return found.mode


def _compiled(closed: Any, args: Sequence[Any]) -> list[Any]:
    # Compiled as a whole, unless XLA's CSE could change the order of effects.
    function = jaxcompat.jaxpr_as_fun(closed)
    return (function if closed.effects else jax.jit(function))(*args)


def _run(evaluate: Callable[..., Any], closed: Any, args: Sequence[Any]) -> Run:
    with recording() as record:
        outs = jax.block_until_ready(list(evaluate(closed, args)))
    # A literal result is a Python number with a dtype.
    return [x if hasattr(x, "shape") else jnp.asarray(x) for x in outs], record.events


def _same_events(before: Sequence[Event], after: Sequence[Event]) -> None:
    """Compare the callbacks and their values. Only ordered ones must come in the same order."""
    seen = (Counter((e.tag, e.value.tobytes()) for e in events) for events in (before, after))
    expect("callbacks and what they saw", *seen)
    expect("ordered callbacks", *([e.tag for e in run if e.ordered] for run in (before, after)))


def _find(tree: Any, path: Path, number: int | None) -> list[Any]:
    for name in path:
        tree = tree[name]
    return jax.tree.leaves(tree if number is None else tree[number])


def _moved(x: Any) -> Any:
    """Return another value of the same type. A number moves only slightly."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        flat = jnp.reshape(x, -1)
        return jnp.reshape(jax.vmap(lambda k: jax.random.fold_in(k, 1))(flat), x.shape)
    x = np.asarray(x)  # NumPy compiles nothing
    if x.dtype == bool:
        moved = ~x
    elif jnp.issubdtype(x.dtype, jnp.inexact):
        with np.errstate(all="ignore"):
            moved = x * np.asarray(0.75, x.dtype) + np.asarray(0.125, x.dtype)
    else:
        moved = x ^ np.asarray(1, x.dtype)
    return on_device(np.asarray(moved, x.dtype))


def _reversed(x: Any) -> Any:
    """Return the same elements in another order."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jnp.reshape(jnp.reshape(x, -1)[::-1], x.shape)
    return on_device(np.asarray(x).reshape(-1)[::-1].reshape(x.shape))


def _is_inexact(x: Any) -> bool:
    dtype = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
    return jnp.issubdtype(dtype, jnp.inexact)


def _types(values: Sequence[Any]) -> list[str]:
    return [
        str(jax.typeof(x).str_short() if not hasattr(x, "str_short") else x.str_short())
        for x in values
    ]


def _shown(aval: Any) -> str:
    weak = ", weakly typed" if getattr(aval, "weak_type", False) else ""
    return f"{aval.str_short(short_dtypes=True)}{weak}"


def expect(what: str, expected: Any, found: Any) -> None:
    """Raise AssertionError with `what` unless the two are equal."""
    if expected != found:
        raise AssertionError(f"{what}: expected {expected}, found {found}")


def agree(
    what: str,
    expected: Sequence[Any],
    found: Sequence[Any],
    comparison: Callable[..., Any] = bits_agree,
) -> None:
    """Raise AssertionError with the first difference between two lists of values."""
    fault = first_value_difference(expected, found, comparison)
    if fault is not None:
        raise AssertionError(f"{what}: {fault}")
