"""Random functions, harvested, against the same functions run step by step by plain Python.

A plan is data: operations, sown values, and the loops, branches and calls around them. `Staged`
runs a plan with JAX's control flow and our `sow`. `Eager` runs it with Python's, and keeps what is
sown in a dict of its own, or takes it from one: that is what the modes mean, written a second time.
"""

import random
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxprtool_harvest import call_and_reap, harvest, plant

import jaxprtool
from jaxprtool import nest, sow
from jaxprtool.errors import UnsupportedError
from jaxprtool.ir.program import type_check

CALLS = ("jit", "remat", "custom", "nest")


# --- plans ----------------------------------------------------------------------------------------


class Plans:
    """Random plans: tuples of steps, each a tuple that begins with its kind."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.names = 0

    def plan(self, depth, modes=("strict", "append", "clobber")):
        return tuple(self.step(depth, modes) for _ in range(self.random.randint(1, 4)))

    def step(self, depth, modes):
        choose = self.random.choice
        kind = choose(["op", "sow", "sow", *(["scan", "while", "cond", *CALLS] if depth else [])])
        if kind == "op":
            return kind, self.random.uniform(0.3, 1.2)
        if kind == "sow":
            return self.sow(choose(modes))
        inner = tuple(mode for mode in modes if mode != "strict")
        if kind == "scan":
            return kind, choose([0, 1, 3]), choose([False, True]), self.plan(depth - 1, inner)
        if kind == "while":
            return kind, choose([0, 1, 2]), self.plan(depth - 1, ("clobber",))
        if kind == "cond":
            one = self.plan(depth - 1, modes)
            return kind, choose([False, True]), one, self.varied(one)
        self.names += 1
        return kind, f"scope{self.names}", self.plan(depth - 1, modes)

    def sow(self, mode):
        self.names += mode == "strict"
        name = f"s{self.names}" if mode == "strict" else f"{mode}{self.random.choice('ab')}"
        return "sow", name, mode

    def varied(self, plan):
        """A plan that sows the same and computes something else."""
        return (("op", self.random.uniform(0.3, 1.2)), *plan)


# --- two ways to run them -------------------------------------------------------------------------


class Staged:
    def run(self, plan, x):
        for kind, *rest in plan:
            x = getattr(self, kind)(x, *rest)
        return x

    def op(self, x, k):
        return jnp.sin(k * x) + 0.1

    def sow(self, x, name, mode):
        return sow({"v": x}, tag="t", name=name, mode=mode)["v"]

    def scan(self, x, length, reverse, plan):
        def step(x, a):
            return self.run(plan, x + a), None

        return lax.scan(step, x, jnp.arange(1.0, length + 1), reverse=reverse)[0]

    def while_(self, x, count, plan):
        return lax.while_loop(
            lambda s: s[0] < count, lambda s: (s[0] + 1, self.run(plan, s[1])), (0, x)
        )[1]

    def cond(self, x, taken, one, other):
        # What decides is computed, so that no branch is left out when the function is traced.
        decides = (x.sum() < 1e6) == taken
        return lax.cond(decides, partial(self.run, one), partial(self.run, other), x)

    def jit(self, x, _, plan):
        return jax.jit(partial(self.run, plan))(x)

    def remat(self, x, _, plan):
        return jax.checkpoint(partial(self.run, plan))(x)

    def nest(self, x, scope, plan):
        return nest(partial(self.run, plan), scope=scope)(x)

    def custom(self, x, _, plan):
        f = jax.custom_jvp(partial(self.run, plan))
        f.defjvp(lambda primals, tangents: (self.run(plan, *primals), tangents[0]))
        return f(x)


setattr(Staged, "while", Staged.while_)


class Eager(Staged):
    """Runs a plan as Python; `reaps` and `plants` are flat, by path."""

    def __init__(self, plants=None, scope=()):
        self.scope = scope
        self.plants = {} if plants is None else plants
        self.reaps = {}

    def again(self, plants=None):
        return Eager(self.plants if plants is None else plants, self.scope)

    def keep(self, path, mode, values):
        old = self.reaps.get(path, (mode, []))[1]
        self.reaps[path] = (mode, [*old, *values] if mode == "append" else values)

    def sow(self, x, name, mode):
        path = (*self.scope, name)
        if path in self.plants:
            planted = self.plants[path]
            return planted.pop(0) if mode == "append" else planted[0]
        self.keep(path, mode, [x])
        return x

    def scan(self, x, length, reverse, plan):
        appended = {
            path: [self.plants[path].pop(0) for _ in values]
            for path, (mode, values) in self.sown_by(plan, x).items()
            if mode == "append" and path in self.plants
        }
        rounds = []
        for i in reversed(range(length)) if reverse else range(length):
            at_i = {path: [v[i] for v in values] for path, values in appended.items()}
            one = self.again({**self.plants, **at_i})
            x = one.run(plan, x + i + 1.0)
            rounds.append(one.reaps)
        in_order = rounds[::-1] if reverse else rounds
        for path, (mode, values) in self.unplanted(plan, x).items():
            if mode == "clobber":
                last = rounds[-1][path][1] if rounds else self.before(path, values)
                self.keep(path, mode, last)
            else:
                stacks = [
                    jnp.stack([r[path][1][i] for r in in_order])
                    if in_order
                    else jnp.zeros((0, *v.shape))
                    for i, v in enumerate(values)
                ]
                self.keep(path, mode, stacks)
        return x

    def while_(self, x, count, plan):
        unplanted = self.unplanted(plan, x)
        if not count:
            for path, (mode, values) in unplanted.items():
                self.keep(path, mode, self.before(path, values))
        for _ in range(count):
            x = self.run(plan, x)
        return x

    def cond(self, x, taken, one, other):
        return self.run(one if taken else other, x)

    def jit(self, x, _, plan):
        return self.run(plan, x)

    remat = jit

    def nest(self, x, scope, plan):
        one = Eager(self.plants, (*self.scope, scope))
        x = one.run(plan, x)
        for path, (mode, values) in one.reaps.items():
            self.keep(path, mode, values)
        return x

    def custom(self, x, _, plan):
        return self.run(plan, x)

    def before(self, path, values):
        """What stands under a name if the loop that sows it runs no iteration."""
        return self.reaps.get(path, (None, [jnp.zeros_like(v) for v in values]))[1]

    def sown_by(self, plan, x):
        """What a plan sows where nothing is planted: by path, the mode and values alike."""
        one = Eager({}, self.scope)
        one.run(plan, x)
        return one.reaps

    def unplanted(self, plan, x):
        return {p: each for p, each in self.sown_by(plan, x).items() if p not in self.plants}


setattr(Eager, "while", Eager.while_)


def as_dict(flat):
    """The reaps of an `Eager` as those of `reap`."""
    root = {}
    for path, (_, values) in flat.items():
        level = root
        for scope in path[:-1]:
            level = level.setdefault(scope, {})
        values = [{"v": v} for v in values]
        level[path[-1]] = values[0] if len(values) == 1 else values
    return root


def near(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), actual, expected)


X = jnp.array([0.3, -0.7])


def cases(count, first=0, depth=2):
    """Plans that can be harvested, and the functions that they stand for."""
    for seed in range(first, first + count):
        plan = Plans(seed).plan(depth)
        fun = partial(Staged().run, plan)
        try:
            jax.eval_shape(call_and_reap(fun, tag="t"), X)
        except UnsupportedError as error:
            assert "may run no iteration" in error.message
            continue
        yield seed, plan, fun


def check_reaped(plan, fun):
    """Everything reaped. Gives the results, and the reaps by path."""
    eager = Eager()
    expected = eager.run(plan, X), as_dict(eager.reaps)
    near(jax.jit(call_and_reap(fun, tag="t"))(X), expected)
    type_check(jaxprtool.trace(call_and_reap(fun, tag="t"), X))
    return expected[0], eager.reaps


def check_planted(plan, fun, seed, out, reaps):
    """Some of the values planted, the others reaped; then those alone that `reap` gave."""
    choose = random.Random(seed)
    planted = {p: each for p, each in reaps.items() if choose.random() < 0.5}
    moved = {p: (mode, [v + 0.25 for v in values]) for p, (mode, values) in planted.items()}
    one = Eager({path: list(values) for path, (_, values) in moved.items()})
    expected = one.run(plan, X), as_dict(one.reaps)
    near(jax.jit(harvest(fun, tag="t"))(as_dict(moved), X), expected)
    type_check(jaxprtool.trace(partial(plant(fun, tag="t")), as_dict(moved), X))
    exact = {p: each for p, each in reaps.items() if each[0] != "clobber"}
    near(jax.jit(plant(fun, tag="t"))(as_dict(exact), X), out)


def check_differentiated(plan, fun):
    """Derivatives of all that comes out, forwards; with a custom function, of the results alone."""

    def staged(x):
        out, reaps = call_and_reap(fun, tag="t")(x)
        return (out, {}) if custom else (out, reaps)

    def eager(x):
        run = Eager()
        return (fun(x), {}) if custom else (run.run(plan, x), as_dict(run.reaps))

    custom = "custom" in str(plan)
    derivative = jax.jit(lambda x: jax.jvp(staged, (x,), (x + 1.0,))[1])
    near(derivative(X), jax.jvp(eager, (X,), (X + 1.0,))[1])


@pytest.mark.proof
@pytest.mark.parametrize("group", range(3))
def test_random_functions_are_harvested_as_python_would(group):
    tried = 0
    for seed, plan, fun in cases(8, first=8 * group):
        check_planted(plan, fun, seed, *check_reaped(plan, fun))
        check_differentiated(plan, fun)
        tried += 1
    assert tried >= 5


@pytest.mark.sweep
@pytest.mark.parametrize("group", range(30))
def test_many_random_functions_are_harvested_as_python_would(group):
    for seed, plan, fun in cases(20, first=1000 + 20 * group, depth=3):
        check_planted(plan, fun, seed, *check_reaped(plan, fun))
        check_differentiated(plan, fun)


def test_the_random_functions_sow_everywhere():
    """The plans of the quick test have every kind of step, and every mode in some loop."""
    text = " ".join(str(plan) for _, plan, _ in cases(24))
    for word in ("scan", "while", "cond", "append", "clobber", "strict", *CALLS):
        assert f"'{word}" in text
