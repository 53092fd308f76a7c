"""Build the Python function that a plan describes, and its arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback

from tests.programs.layers import layers_of, trained, tree_of
from tests.programs.ops import COLLECTIVES, OPS, Type, coerce, is_key
from tests.programs.plans import (
    Block,
    Call,
    Cond,
    Const,
    Copy,
    Detail,
    Effect,
    Mutate,
    Op,
    Plan,
    Repeat,
    Scan,
    Shared,
    While,
)
from tests.programs.recorder import record
from tests.programs.repetition import differing
from tests.programs.rules import with_jvp_rule, with_vjp_rule
from tests.programs.values import on_device
from tests.programs.waste import WASTEFUL

Values = list[Any]

EVERY = OPS | COLLECTIVES | WASTEFUL


def function_of(plan: Plan) -> Callable[..., tuple[Any, ...]]:
    """Return the function that the plan describes, of its inputs and stacks."""

    def random_program(*args: Any) -> tuple[Any, ...]:
        def run(args: Sequence[Any]) -> Values:
            inputs, trees = args[: len(plan.body.inputs)], args[len(plan.body.inputs) :]
            layers = [layers_of(*pair) for pair in zip(plan.stacks, trees, strict=True)]
            leaks = [rows[0][0] for s, rows in zip(plan.stacks, layers, strict=True) if s.leaks]
            return _Builder(plan, layers).run(plan.body, leaks, inputs)

        return trained(run, args) if plan.trains else tuple(run(args))

    return random_program


def arguments_of(plan: Plan) -> tuple[Any, ...]:
    """Return concrete values for the plan's inputs and stacks, the same at each call."""
    rng = np.random.RandomState(plan.seed)
    inputs = [_argument(t, rng, plan) for t in plan.body.inputs]
    rows = (
        [[_argument(t, rng, plan) for t in s.types] for _ in range(s.count)] for s in plan.stacks
    )
    return (*inputs, *(tree_of(s, layers) for s, layers in zip(plan.stacks, rows, strict=True)))


def _argument(t: Type, rng: np.random.RandomState, plan: Plan) -> Any:
    if t.kind == "k":
        return jnp.broadcast_to(jax.random.key(rng.randint(100)), t.shape)
    values = _values(t, rng)
    if plan.specials and t.kind in "fc" and values.size:
        values.flat[rng.randint(values.size)] = rng.choice([np.nan, np.inf, -np.inf, -0.0])
    if plan.weak and t.shape == () and str(t) in ("f32[]", "i32[]"):
        return values.item()
    return on_device(values)


def _values(t: Type, rng: np.random.RandomState) -> np.ndarray:
    if t.kind in "fec":
        values = rng.normal(size=t.shape)
        if t.kind == "c":
            values = values + 1j * rng.normal(size=t.shape)
    else:
        low, high = {"b": (0, 2), "u": (0, 7), "n": (0, 7)}.get(t.kind, (-4, 5))
        values = rng.randint(low, high, size=t.shape)
    return np.asarray(values).astype(t.jax_dtype)


class _Builder:
    """Runs a plan's blocks on (usually traced) values."""

    def __init__(self, plan: Plan, layers: Sequence[Sequence[Values]] = ()):
        self.plan, self.layers = plan, layers
        self.shared = [self._shared(block) for block in plan.functions]
        self.tags = 0

    def _shared(self, block: Block) -> Callable[..., Any]:
        def shared(*args: Any) -> Values:
            return self.run(block, [], args)

        return jax.jit(shared)

    def run(self, block: Block, around: Values, args: Sequence[Any]) -> Values:
        """Return the outputs of a block, whose steps can use the values of `around` and `args`."""
        env = [*around, *(coerce(x, t) for x, t in zip(args, block.inputs, strict=True))]
        if not env:
            env = [jnp.float32(0.75)]
        for step in block.steps:
            env += self.step(step, env)
        return [pick(env, ref) for ref in block.outputs]

    def step(self, step: Any, env: Values) -> Values:
        """Return the values that one step adds."""
        match step:
            case Op():
                operation = EVERY[step.name]
                out = operation.apply(*(coerce(pick(env, r), step.type) for r in step.args))
                return list(out) if isinstance(out, tuple | list) else [out]
            case Const():
                return [_captured(step)]
            case Call():
                operands = _operands(env, step.args, step.body.inputs)
                return self.call(step.how, step.body, env, operands)
            case Shared():
                if not self.shared:
                    return []
                number = step.function % len(self.shared)
                inputs = self.plan.functions[number].inputs
                operands = _operands(env, step.args[: len(inputs)], inputs)
                return list(self.shared[number](*operands))
            case Scan():
                return self.scan(step, env)
            case While():
                return self.while_loop(step, env)
            case Cond():
                return self.cond(step, env)
            case Effect():
                return self.effect(step, env)
            case Mutate():
                return self.mutate(step, env)
            case Detail():
                return self.detail(step, env)
            case Repeat():
                return self.repeat(step, env)
        raise TypeError(step)

    def call(self, how: str, block: Block, env: Values, operands: Values) -> Values:
        """Call a block with operands; see `Call` and `Copy`."""
        if how in _CALLS:
            return list(_CALLS[how](lambda *xs: self.run(block, env, xs))(*operands))

        def body(*xs: Any) -> tuple[Any, ...]:
            return tuple(self.run(block, [], xs))

        if how == "custom_jvp":
            return list(with_jvp_rule(body)(*operands))
        return list(with_vjp_rule(body, saving=how == "custom_vjp_saving")(*operands))

    def scan(self, step: Scan, env: Values) -> Values:
        k = len(step.init)
        types = step.body.inputs

        def body(carry: Values, xs: Values) -> tuple[Values, Values]:
            outs = self.run(step.body, env, [*carry, *xs])
            new = [coerce(out, t) for out, t in zip(outs[:k], types[:k], strict=True)]
            return new, outs[k:]

        init = _operands(env, step.init, types[:k])
        xs = _operands(env, step.xs, [t.stacked(step.length) for t in types[k:]])
        carry, ys = lax.scan(
            body, init, xs, length=step.length, reverse=step.reverse, unroll=step.unroll
        )
        return [*carry, *ys]

    def while_loop(self, step: While, env: Values) -> Values:
        types = step.body.inputs
        limit: Any = step.limit
        if step.traced_limit:
            limit = coerce(pick(env, 1), Type("i32")) % (step.limit + 1)

        def more(state: tuple[Any, Values]) -> Any:
            count, carry = state
            if not step.early:
                return count < limit
            return (count < limit) & ~coerce([*env, *carry][-1], Type("bool"))

        def body(state: tuple[Any, Values]) -> tuple[Any, Values]:
            count, carry = state
            outs = self.run(step.body, env, carry)
            return count + 1, [coerce(out, t) for out, t in zip(outs, types, strict=False)]

        _, carry = lax.while_loop(more, body, (0, _operands(env, step.init, types)))
        return list(carry)

    def cond(self, step: Cond, env: Values) -> Values:
        def branch(block: Block) -> Callable[..., Values]:
            def call(*xs: Any) -> Values:
                outs = self.run(block, env, xs)
                return [coerce(pick(outs, i), t) for i, t in enumerate(step.outs)]

            return call

        branches = [branch(block) for block in step.branches]
        args = _operands(env, step.args, step.branches[0].inputs)
        index = pick(env, step.index)
        if len(branches) == 2:
            return list(lax.cond(coerce(index, Type("bool")), *branches, *args))
        return list(lax.switch(coerce(index, Type("i32")), branches, *args))

    def effect(self, step: Effect, env: Values) -> Values:
        x = pick(env, step.arg)
        x = jax.random.key_data(x) if is_key(x) else x
        tag = self.tags = self.tags + 1
        ordered = step.how.startswith("ordered")
        if step.how.endswith("debug"):
            jax.debug.callback(_debug, tag, ordered, x, ordered=ordered)
            return []
        result = jax.ShapeDtypeStruct((3,), jnp.float32)
        if step.how == "pure":
            return [jax.pure_callback(_thirds, result, x)]
        return [io_callback(_input, result, tag, ordered, x, ordered=ordered)]

    def mutate(self, step: Mutate, env: Values) -> Values:
        ref = jax.new_ref(coerce(pick(env, step.init), step.type))
        x = coerce(pick(env, step.arg), step.type)

        def write(*_: Any) -> Any:
            ref[...] = jnp.where(ref[...] == x, x, ref[...] + x)
            return x

        match step.within:
            case "jit":
                jax.jit(write)()
            case "scan":
                lax.scan(lambda c, _: (c + 1, write()), 0, None, length=2)
            case "cond":
                lax.cond(coerce(x, Type("bool")), write, lambda: x)
            case "while":
                lax.while_loop(lambda i: i < 2, lambda i: (write(), i + 1)[1], 0)
            case _:
                write()
        return [ref[...]] if step.read else []

    def detail(self, step: Detail, env: Values) -> Values:
        x, y = _operands(env, step.args, [step.type] * 2)
        x = lax.tanh(x) * step.scale
        x = y - x if step.swapped else x - y
        x = lax.cumsum(x.reshape(-1), reverse=step.backwards).reshape(x.shape)
        if step.weak:  # the value is about one, so that only the type changes
            x = x * jnp.where(jnp.sum(x) > 0, 1.0, 1.0)
        added = [x]
        if step.effect:
            added += self.effect(Effect("ordered_debug", 0), [x])
        return added

    def repeat(self, step: Repeat, env: Values) -> Values:
        around, added, outs = [] if step.closed else list(env), [], []
        for number, copy in enumerate(step.copies):
            block = differing(step.body, copy.difference)
            seen = env if step.chained else [*env, *added]
            given = _operands(seen, copy.args, block.inputs)
            row = self.row(step, number)[: len(given)]
            free = len(given) - len(row)
            given[free:] = [coerce(x, t) for x, t in zip(row, block.inputs[free:], strict=True)]
            if step.chained:
                carried = zip(outs, block.inputs[:free], strict=False)
                given[: min(free, len(outs))] = [coerce(x, t) for x, t in carried]
            with jax.named_scope(f"layer_{number}") if step.scoped else nullcontext():
                outs = self.copied(copy, block, around, given)
            added += outs
            if step.between:
                among = step.between[number % len(step.between)]
                added += self.step(among, [*env, *added])
        return added

    def row(self, step: Repeat, number: int) -> Values:
        """Return the arrays of a layer that are passed to one copy."""
        if step.stack is None or not self.layers:
            return []
        rows = self.layers[step.stack % len(self.layers)]
        return rows[(-1 - number if step.reverse else number) % len(rows)]

    def copied(self, copy: Copy, block: Block, around: Values, given: Values) -> Values:
        """Return the outputs of a copy."""
        if copy.how == "donating":
            # A donated argument has no other use.
            given[:1] = [jnp.copy(x) for x in given[:1]]
        with jax.named_scope("inner") if copy.difference == "scope" else nullcontext():
            if not copy.how:
                return self.run(block, around, given)
            return self.call(copy.how, block, around, given)


_CALLS: dict[str, Callable[..., Any]] = {
    "jit": jax.jit,
    "donating": lambda f: jax.jit(f, donate_argnums=0),
    "remat": jax.checkpoint,
}


def pick(env: Values, ref: int) -> Any:
    """Return the value of a backward reference."""
    return env[-1 - ref % len(env)]


def _operands(env: Values, refs: Sequence[int], types: Sequence[Type]) -> Values:
    return [coerce(pick(env, ref), t) for ref, t in zip(refs, types, strict=True)]


def _captured(step: Const) -> Any:
    values = _values(step.type, np.random.RandomState(step.seed))
    if values.ndim == 0:
        return values[()]
    with jax.ensure_compile_time_eval():
        return jnp.asarray(values)


def _debug(tag: Any, ordered: Any, x: Any) -> None:
    record(int(tag), bool(ordered), x, "debug")


def _input(tag: Any, ordered: Any, x: Any) -> np.ndarray:
    record(int(tag), bool(ordered), x, "io")
    return _thirds(x)


def _thirds(x: Any) -> np.ndarray:
    return np.full(3, np.asarray(x).size / 3, np.float32)
