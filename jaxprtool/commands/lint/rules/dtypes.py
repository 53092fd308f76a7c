"""Types that are wider than intended, conversions there and back, and closed-over arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from jax import numpy as jnp

from jaxprtool.commands.lint.graph import LintedProgram, Node, Value, origin
from jaxprtool.commands.lint.lint import Found, lint_rule
from jaxprtool.ir.documents import in_bytes
from jaxprtool.ir.dtypes import itemsize
from jaxprtool.ir.equations import is_inexact, type_of

# --- dtypes ---------------------------------------------------------------------------------------
# Types that are wider than intended, and conversions there and back.

_BAD_F64 = """
    import jax, jax.numpy as jnp
    import numpy as np
    import jaxprtool

    jax.config.update("jax_enable_x64", True)
    SCALE = np.linspace(0.0, 1.0, 64)


    @jaxprtool.example("f32[512,64]")
    def f(x):
        return jnp.tanh(x * SCALE)  # JT201
"""

_GOOD_F64 = """
    import jax, jax.numpy as jnp
    import numpy as np
    import jaxprtool

    jax.config.update("jax_enable_x64", True)
    SCALE = np.linspace(0.0, 1.0, 64).astype(np.float32)


    @jaxprtool.example("f32[512,64]")
    def f(x):
        return jnp.tanh(x * SCALE)
"""

_BAD_WIDENED = """
    import jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("f32[64]", "bf16[512,64]")
    def f(scale, x):
        return jnp.tanh(x * scale)  # JT202
"""

_GOOD_WIDENED = """
    import jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("f32[64]", "bf16[512,64]")
    def f(scale, x):
        return jnp.tanh(x * scale.astype(x.dtype))
"""

_BAD_ROUND_TRIP = """
    import jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("f32[512,64]")
    def f(x):
        y = jnp.tanh(x).astype(jnp.bfloat16)
        z = y.astype(jnp.float32)  # JT203
        return z @ z.T
"""

_GOOD_ROUND_TRIP = """
    import jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("f32[512,64]")
    def f(x):
        y = jnp.tanh(x)
        return y @ y.T
"""


@lint_rule("JT201", "unwanted-f64", bad=_BAD_F64, good=_GOOD_F64)
def unwanted_f64(program: LintedProgram) -> Iterator[Found]:
    """A function without 64-bit float arguments computes arrays of 64-bit floats.

    With `jax_enable_x64`, NumPy's arrays and scalars and JAX's default type have 64 bits, and
    promote the values that they are combined with. A line that contains `float64` is not reported.
    """
    seen = set[Value]()
    floats = [value for value in program.top.arguments if is_inexact(value)]
    if not floats or any(_is_64_bits(value) for value in floats):
        return
    for node in program.where(lambda node: True):
        if not any(_is_64_bits(out) and out.elements > 1 for out in node.outs) or node.inner:
            continue
        if node.is_backward or node.traits.gives in ("same", "layout"):
            continue
        if any(_is_64_bits(v) and origin(v).node is not None for v in node.ins):
            continue
        frame = program.frame(node)
        if frame is not None and any(w in program.sources.code(frame) for w in ("64", "double")):
            continue
        out = next(out for out in node.outs if _is_64_bits(out))
        reached = set(_reached(out, _is_64_bits)) - seen
        seen |= reached
        yield Found(
            node,
            f"{_name(node)} computes {type_of(out.aval)}, but no argument has 64-bit floats",
            "convert the 64-bit values there, such as NumPy arrays, to the type of the arguments",
            "{bytes} more than in 32 bits on a GPU or TPU, in all values computed from it (on a "
            "CPU, in those that XLA does not fuse)",
            bytes=sum(value.bytes for value in reached) // 2 * node.scope.runs,
        )


def _is_64_bits(value: Value) -> bool:
    return value.dtype is not None and is_inexact(value) and _width(value) == 64


def _width(value: Value) -> int:
    """Return the bits of a real number, or of each part of a complex one."""
    return int(jnp.finfo(value.dtype).bits)


@lint_rule("JT202", "widened", bad=_BAD_WIDENED, good=_GOOD_WIDENED)
def widened(program: LintedProgram) -> Iterator[Found]:
    """A small f32 value, or a NumPy scalar, widens a larger bf16 or f16 array.

    JAX promotes both operands to the wider type. The result takes twice the memory, and a product
    runs at the rate of the wider type. Explicit conversions are not reported.
    """
    for node in program.where(lambda node: node.traits.broadcasts or node.traits.bilinear):
        if len(node.ins) != 2 or node.is_backward or node.has_rule or not program.is_own(node):
            continue
        for value, other in (node.ins, node.ins[::-1]):
            narrow = _promoted(program, node, value)
            if narrow is None or not (_is_given(other) and _is_wider(other, narrow)):
                continue
            if other.elements >= value.elements and not node.traits.bilinear:
                continue
            out = node.outs[0]
            if not _is_wider(out, narrow) or _goes_back(out, narrow):
                continue
            yield _widening(node, narrow, other)


def _widening(node: Node, narrow: Value, other: Value) -> Found:
    wide = _reached(node.outs[0], lambda value: _is_wider(value, narrow))
    bits, more = 8 * itemsize(narrow.dtype), node.outs[0]
    saved = sum(v.bytes - v.elements * itemsize(narrow.dtype) for v in wide) * node.scope.runs
    readers = {reader for value in wide for reader in value.live_readers}
    products = [reader for reader in readers if reader.traits.bilinear]
    products += [node] if node.traits.bilinear else []
    with_products = ", and {flops} of products run in the wider type" if products else ""
    return Found(
        node,
        f"{type_of(other.aval)} widens {type_of(narrow.aval)} to {more.dtype.name}",
        f"convert the smaller operand to {narrow.dtype.name} first",
        f"{{bytes}} more than in {bits} bits on a GPU or TPU, in all values computed from it"
        f"{with_products} (little on a CPU, which computes in f32)",
        bytes=saved,
        flops=sum(product.operations for product in products),
    )


def _promoted(program: LintedProgram, node: Node, value: Value) -> Value | None:
    """Return the narrow float that JAX converts to an operand, as part of the same expression."""
    if node.traits.bilinear and _is_wider(node.outs[0], value):
        return value  # a product widens its operands itself
    cast = value.node
    if cast is None or cast.traits.gives != "cast" or not _is_wider(value, cast.ins[0]):
        return None
    own, theirs = program.frames.of(node.eqn), program.frames.of(cast.eqn)
    return cast.ins[0] if own and theirs and own[0] == theirs[0] else None


def _is_given(value: Value) -> bool:
    """Return True for a literal, a constant, or an argument of the program."""
    root = origin(value)
    return root.scope is None or (root.node is None and root.outer is None)


def _is_wider(value: Value, narrow: Value) -> bool:
    floats = is_inexact(value) and is_inexact(narrow)
    return floats and itemsize(narrow.dtype) < itemsize(value.dtype) <= 4


def _goes_back(value: Value, narrow: Value) -> bool:
    """Return True if all values computed from a value are narrow again before they are written."""
    for wide in _reached(value, lambda other: _is_wider(other, narrow)):
        if wide.is_result:
            return False
        for node in wide.live_readers:
            if not (node.traits.elementwise or node.traits.moves or node.traits.gives == "cast"):
                return False
    return True


def _reached(value: Value, condition: Callable[[Value], bool], most: int = 1000) -> list[Value]:
    """Return the values of the scope that are computed from a value, and meet a condition."""
    reached = {value: None}
    todo = [value]
    for current in todo:
        for node in current.live_readers:
            for out in node.outs:
                if out not in reached and len(reached) < most and condition(out):
                    reached[out] = None
                    todo.append(out)
    return todo


def _name(node: Node) -> str:
    return "a loop" if node.inner else node.name


@lint_rule("JT203", "round-trip", bad=_BAD_ROUND_TRIP, good=_GOOD_ROUND_TRIP)
def round_trips(program: LintedProgram) -> Iterator[Found]:
    """A float is converted to a narrower type and back, and nothing else reads the narrow value.

    This loses digits and saves nothing. Rounding on purpose, with both conversions on one line, is
    not reported.
    """
    for node in program.where(lambda node: node.traits.gives == "cast"):
        middle = origin(node.ins[0]) if node.ins else None
        first = None if middle is None else middle.node
        if middle is None or first is None or first.traits.gives != "cast":
            continue
        start, back = first.ins[0], node.outs[0]
        if first.name != node.name or start.dtype != back.dtype or not _is_wider(start, middle):
            continue
        if len(middle.live_readers) > 1 or middle.is_result or middle.elements < 2:
            continue
        if node.is_backward or first.is_backward or node.has_rule or not program.is_own(node):
            continue
        if program.frame(first) == program.frame(node) or _same_line(program, first, node):
            continue
        if _is_accumulation(node, middle):
            continue
        yield Found(
            node,
            f"{start.dtype.name} is converted to {middle.dtype.name} and back for nothing",
            "remove both conversions, or keep the narrow type until a product reads it",
            f"{{bytes}} that are rounded to {jnp.finfo(middle.dtype).nmant + 1} bits",
            bytes=start.bytes * node.scope.runs,
        )


def _is_accumulation(node: Node, narrow: Value) -> bool:
    """Return True if a conversion is for a sum alone whose result is narrow again, as in JAX's."""
    sums = node.outs[0].live_readers
    readers = [reader for reduction in sums for reader in reduction.outs[0].live_readers]
    is_sum = all(reduction.traits.reduces for reduction in sums)
    return is_sum and any(reader.outs[0].dtype == narrow.dtype for reader in readers)


def _same_line(program: LintedProgram, first: Node, second: Node) -> bool:
    one, two = program.frame(first), program.frame(second)
    return one is None or two is None or (one.file, one.line) == (two.file, two.line)


# --- constants ------------------------------------------------------------------------------------
# Arrays that a function closes over.

#: Smaller constants are not reported.
LEAST_BYTES = 1 << 20

_CONSTANT_BAD = """
    import jax.numpy as jnp
    import numpy as np
    import jaxprtool

    TABLE = np.ones((1024, 512), np.float32)


    @jaxprtool.example("f32[8,1024]")
    def f(x):
        return jnp.tanh(x @ TABLE)  # JT101
"""

_CONSTANT_GOOD = """
    import jax.numpy as jnp
    import jaxprtool


    @jaxprtool.example("f32[8,1024]", "f32[1024,512]")
    def f(x, table):
        return jnp.tanh(x @ table)
"""


@lint_rule("JT101", "large-constant", bad=_CONSTANT_BAD, good=_CONSTANT_GOOD)
def large_constants(program: LintedProgram) -> Iterator[Found]:
    """A function closes over an array of 1 MiB or more.

    The array becomes a constant of the program. Every executable has a copy of it, each compilation
    hashes and keeps it, it cannot be donated or sharded, and a new array means a new compilation.
    """
    seen = dict[int, Value]()
    for scope in program.top.inside():
        for value in scope.constants:
            if value.constant is None or value.bytes < LEAST_BYTES or not value.live_readers:
                continue
            if id(value.constant) in seen:
                continue
            seen[id(value.constant)] = value
            yield _found(program, value)


def _found(program: LintedProgram, value: Value) -> Found:
    node = value.live_readers[0]
    frame = program.frame(node)
    name = "" if frame is None else program.sources.captured_name(frame, value.constant)
    what = f"'{name}'" if name else "an array"
    return Found(
        node,
        f"{what} is a constant of the program, {type_of(value.aval)} of {in_bytes(value.bytes)}",
        "pass it as an argument, or compute it inside the function",
        "{bytes} in every executable that is compiled from it",
        bytes=value.bytes,
    )
