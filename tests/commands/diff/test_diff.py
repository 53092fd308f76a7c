"""The difference of two programs: the verdict, and hunks with the user's lines."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxprtool

x = jnp.arange(6.0)
other = x + 1
rows = jnp.ones((5, 6))


def traced(fun, *args):
    jax.clear_caches()
    return jaxprtool.trace(fun, *(args or (x,)))


def lines(p, q):
    """Return the verdict, and the primitives of removed, added and changed equations."""
    found = jaxprtool.diff(p, q)
    kinds = found.removed, found.added, found.changed
    names = (" ".join(each.equation.primitive.name for each in kind) for kind in kinds)
    return found.verdict, *names


def compare(before, after, *args):
    return lines(traced(before, *args), traced(after, *args))


def loop(step):
    return lambda a: lax.scan(lambda c, row: (step(c, row), c), a, rows)


def chain(times, extra=()):
    def fun(a):
        for i in range(times):
            if i in extra:
                a = a + 1.0
            a = jnp.sin(a) * 2.0 + a
        return a

    return fun


@pytest.mark.parametrize(
    "fun",
    [
        chain(3),
        loop(lambda c, row: jax.nn.relu(c) + row),
        lambda a: jnp.where(a > 0, jax.nn.softmax(a), jax.nn.gelu(a)),
        lambda a: lax.cond(a[0] > 0, jnp.sin, jnp.cos, a),
        lambda a: jax.random.normal(jax.random.key(0), (3,)) + a[0],
        jax.grad(lambda a: loop(lambda c, row: jnp.tanh(c) * row)(a)[0].sum()),
    ],
)
def test_a_program_is_equivalent_to_itself_traced_again_and_read_from_a_file(fun, tmp_path):
    program, again = traced(fun), traced(lambda a: fun(a))
    jaxprtool.write(program, tmp_path / "a.jaxpr")
    for other in (program, again, jaxprtool.read(tmp_path / "a.jaxpr")):
        assert lines(program, other) == ("equivalent", "", "", "")


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        (lambda a: a * 2.0, lambda a: a * 3.0, ("same up to constants", "", "", "mul")),
        (lambda a: a + x, lambda a: a + other, ("same up to constants", "", "", "results")),
        (lambda a: jnp.cos(a + 1), jnp.cos, ("different", "add", "", "")),
        (jnp.cos, lambda a: jnp.cos(a + 1), ("different", "", "add", "")),
        (lambda a: a - a[::-1], lambda a: a[::-1] - a, ("different", "", "", "sub")),
        (
            lambda a: jnp.dot(a, a, precision="highest"),
            lambda a: jnp.dot(a, a),
            ("different", "", "", "dot_general"),
        ),
        (
            loop(lambda c, row: jnp.tanh(c) * row),
            loop(lambda c, row: jnp.tanh(c + 1) * row),
            ("different", "", "add", ""),
        ),
        (lambda a: (jnp.sin(a), jnp.cos(a)), lambda a: (jnp.cos(a), jnp.sin(a)), ("different",)),
    ],
)
def test_verdicts_of_pairs_of_programs(before, after, found):
    p, q = traced(before), traced(after)
    verdict = jaxprtool.diff(p, q).verdict
    assert verdict == found[0] == jaxprtool.diff(q, p).verdict
    if len(found) > 1 and found[3] != "results":
        assert lines(p, q) == found
        assert lines(q, p) == (found[0], found[2], found[1], found[3])


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        (jnp.cos, jnp.sin, "cos sin"),
        (jnp.sum, jnp.max, "reduce_sum reduce_max"),
        (lambda a: jnp.maximum(a, 0.0) * 2, lambda a: jnp.tanh(a) * 2, "max tanh"),
        (lambda a: jnp.sin(jnp.exp(a)), lambda a: jnp.cos(jnp.log(a)), "exp log, sin cos"),
        (lambda a: (jnp.sin(a), jnp.exp(a)), lambda a: (jnp.cos(a),), "sin cos"),
        (
            lambda a: lax.cond(a[0] > 0, jnp.sin, jnp.cos, a),
            lambda a: lax.cond(a[0] > 0, jnp.sin, jnp.tan, a),
            "cos tan",
        ),
        # The bodies of two calls are compared, whatever their kinds.
        (
            lambda a: jax.jit(chain(3))(a) * a,
            lambda a: jax.checkpoint(chain(3, (1,)))(a) * a,
            "jit remat2",
        ),
        (lambda a: jax.nn.relu(a) * 2, lambda a: jax.nn.silu(a) * 2, "custom_jvp_call jit"),
        # There is nothing between the same equations here.
        (lambda a: jnp.sin(a) * 2, lambda a: 2 * (a + a[0]), ""),
        (lambda a: jnp.exp(a[:3]) @ a[3:], lambda a: a[:3] @ jnp.sin(a[3:]), ""),
    ],
)
def test_another_primitive_between_the_same_equations_is_a_changed_equation(before, after, found):
    p, q = traced(before), traced(after)
    for first, second, step in ((p, q, 1), (q, p, -1)):
        changed = [
            " ".join(eqn.primitive.name for eqn in (line.before, line.after)[::step])
            for line in jaxprtool.diff(first, second).changed
            if line.equation is not None and line.differences[0].kind == "primitive"
        ]
        assert ", ".join(changed) == found


def test_changed_dtypes():
    half = x.astype(jnp.bfloat16)

    def fun(a, b):
        return jnp.where(a > 0, a * 0.1, jnp.finfo(a.dtype).min) @ b

    single = traced(fun, x, x)
    assert jaxprtool.diff(single, traced(fun, half, half)).verdict == "same up to dtypes"
    cast = traced(lambda a, b: fun(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)), x, x)
    found = jaxprtool.diff(single, cast)
    assert found.verdict == "same up to dtypes" and len(found.added) == 2
    # Consequences of the casts are not listed.
    assert not found.removed and not found.changed and len(found.retyped) > 2


def test_only_the_order_of_effects_makes_a_difference():
    def fun(a):
        b, c = jnp.sin(a), jnp.cos(a)
        return b * c

    def swapped(a):
        c, b = jnp.cos(a), jnp.sin(a)
        return b * c

    assert compare(fun, swapped) == ("equivalent", "", "", "")

    def printed(first, second):
        def fun(a):
            jax.debug.print(first, a)
            jax.debug.print(second, a * 2)
            return a

        return fun

    assert jaxprtool.diff(*[traced(printed("a {}", "b {}"))] * 2).is_equivalent
    assert not jaxprtool.diff(
        traced(printed("a {}", "b {}")), traced(printed("b {}", "a {}"))
    ).is_equivalent


@pytest.mark.parametrize("extra", [(0,), (7,), (19,), (3, 9), (2, 9, 16)])
def test_an_insertion_in_a_chain_is_the_only_difference(extra):
    found = jaxprtool.diff(traced(chain(20)), traced(chain(20, extra)))
    assert [[line.kind for line in hunk.lines] for hunk in found.hunks] == [["added"]] * len(extra)
    assert {line.equation.primitive.name for line in found.added} == {"add"}


def test_arguments_are_matched_by_name_if_their_number_differs():
    def fun(params):
        return jnp.tanh(params["b"]) @ params["c"]

    def more(params):
        return jnp.tanh(params["b"] + params["a"]) @ params["c"]

    p = traced(fun, {"b": x, "c": x})
    found = jaxprtool.diff(p, traced(more, {"a": x, "b": x, "c": x}))
    assert [(each.what, each.name, each.before) for each in found.border] == [
        ("argument", "params['a']", "")
    ]
    assert [line.equation.primitive.name for line in found.lines] == ["add"]
    assert jaxprtool.diff(p, traced(fun, {"b": x[:3], "c": x[:3]})).verdict == "different"


def test_lines_have_a_location_and_hunks_a_path():
    def inner(c, row):
        return jnp.tanh(c * 3.0) + row

    found = jaxprtool.diff(
        traced(loop(lambda c, row: jnp.tanh(c * 2.0) + row)), traced(loop(inner))
    )
    (hunk,) = found.hunks
    (line,) = hunk.lines
    assert hunk.path[0].startswith("scan at ") and "test_diff.py:" in line.source
    assert [(d.kind, d.part, d.place) for d in line.differences] == [("constant", "operand", 1)]
    assert found.before.equations == found.after.equations and found.after.work.flops > 0


def test_equations_moved_out_of_or_into_a_call_are_not_removed_and_added():
    def plain(a):
        b = jnp.sin(a) * 2.0
        return jnp.where(b > 0, b, -jnp.inf).sum()

    program = traced(lambda a: jax.nn.softmax(jax.checkpoint(plain)(a) + a))
    inlined = program.apply("inline")
    for p, q, how in ((program, inlined, "inlined"), (inlined, program, "outlined")):
        found = jaxprtool.diff(p, q)
        assert not found.removed and not found.added and found.verdict == "different"
        assert {d.name for line in found.changed for d in line.differences} == {how}
    # Other changes in a call that moved are still found.
    other = traced(lambda a: jax.nn.softmax(plain(a) + jnp.cos(a)))
    found = jaxprtool.diff(program, other)
    assert [line.equation.primitive.name for line in found.added] == ["cos"] and not found.removed


def test_equations_in_a_jitted_library_function_have_the_line_of_its_call():
    for order in (1, 3):
        jnp.linalg.norm(x, order)  # JAX's cached trace of this has no line of ours
    p, q = (jaxprtool.trace(lambda a, n=n: jnp.linalg.norm(a, n), x) for n in (1, 3))
    found = jaxprtool.diff(p, q)
    assert {line.equation.primitive.name for line in found.added} == {"pow"}
    for line in found.lines:
        assert "test_diff.py:" in line.source, line
        assert line.kind != "changed" or "test_diff.py:" in line.source_before


def test_a_single_call_is_compared_with_its_inlined_form():
    table = jnp.asarray(range(6), "float32")

    @jax.jit
    def inner(a, n, b):
        return n, a * table, jnp.where(b > 0.5, b * n, 0.0)

    @jax.jit
    def outer(a):
        n, b, c = inner(jnp.sin(a), 2.0, a)  # with literals, and with one as its result
        return jnp.exp(b) * n + jnp.cos(c)

    def fun(a):
        return outer(a).sum()

    p = traced(fun)
    q = p.apply("inline")
    for first, second, how in ((p, q, "inlined"), (q, p, "outlined")):
        found = jaxprtool.diff(first, second)
        assert not found.removed and not found.added
        assert {d.name for line in found.changed for d in line.differences} == {how}
    found = jaxprtool.diff(p, traced(lambda a: fun(a) + table.sum() * 0).apply("-O2"))
    assert "inlined" in {d.name for line in found.changed for d in line.differences}
    assert not {"sin", "exp", "cos"} & {line.equation.primitive.name for line in found.lines[:]}


def test_a_constant_with_another_value_in_a_moved_call_is_found():
    p = traced(lambda a: jax.jit(lambda a: jnp.sin(jnp.cos(a)) * x)(a))
    found = jaxprtool.diff(p, traced(lambda a: jnp.sin(jnp.cos(a)) * other))
    assert "outlined" not in str(found.lines) and not found.is_equivalent
    assert any(d.part == "constant" for line in found.changed for d in line.differences)


def test_producers_of_operands_of_moved_equations_are_matched():
    p = traced(lambda a: jax.nn.silu(a) + 0.5 * jnp.cos(a))
    q = traced(lambda a: a * (0.5 * (1 + jnp.tanh(a))) + jnp.cos(a))
    for before, after in ((p, q), (q, p)):
        _, removed, added, changed = lines(before, after)
        assert "jit" in changed.split()
        assert {"logistic"} in (set(removed.split()), set(added.split()))


def test_operands_of_a_call_differ_only_if_their_values_do():
    def with_arguments(count):
        jitted = jax.jit(lambda *args: jnp.sin(args[-1]) * len(args))
        return traced(lambda a: jitted(*[a] * count))

    parts = [
        (d.part, d.name)
        for d in jaxprtool.diff(with_arguments(2), with_arguments(3)).changed[0].differences
    ]
    assert parts == [("operand", "")]


def counted(a, k=0.0):
    def step(carry, row):
        first, unused, number = carry
        return (first * (jnp.sin(k) + 2.0), unused + 1, number + jnp.cos(k)), row.sum()

    return lax.scan(step, (a, 0, 0.0), rows)


def test_a_loop_with_fewer_results_is_the_same_loop():
    def fun(a):
        (_, _, number), sums = counted(a)
        return number, sums

    p = traced(fun)
    q = p.apply("dce")
    removed = "sin add convert_element_type mul add"
    assert lines(p, q) == ("different", removed, "", "scan")
    assert lines(q, p) == ("different", "", removed, "scan")
    (line,) = jaxprtool.diff(p, q).changed
    differing = [(d.part, d.place) for d in line.differences if d.part != "parameter"]
    assert differing == [("operand", 0), ("operand", 1), ("result", 0), ("result", 1)]
    assert {d.after for d in line.differences if d.part != "parameter"} == {None}


def test_a_loop_with_more_operands_reads_the_others_as_before():
    p = traced(lambda a, k: counted(a, k), x, 1.0)
    found = jaxprtool.diff(p, p.apply("hoist"))
    (line,) = found.changed
    operands = [d for d in line.differences if d.part == "operand"]
    assert line.equation.primitive.name == "scan" and operands
    assert all(d.before is None or d.after is None for d in operands)


def test_the_bodies_of_a_while_have_their_own_operands():
    def fun(most, a):
        def step(carry):
            return carry * jnp.sin(a) + jnp.cos(a) * a

        return lax.while_loop(lambda carry: carry < most, step, 0.0)

    p = traced(fun, 1.0, 2.0)
    moved = "sin cos mul"
    assert lines(p, p.apply("hoist")) == ("different", moved, moved, "while")
    assert lines(p.apply("hoist"), p) == ("different", moved, moved, "while")


def test_a_weak_type_is_marked_if_it_is_the_difference():
    fun = lambda x, s: x * s  # noqa: E731
    weak, strong = (traced(fun, jnp.ones(3), s) for s in (1.0, jnp.float32(1)))
    (change,) = jaxprtool.diff(weak, strong).border
    assert (change.before, change.after) == ("~f32[]", "f32[]")
    other = traced(fun, jnp.ones(3), jnp.float16(1))
    assert jaxprtool.diff(strong, other).border[0].before == "f32[]"
    doubled, plain = (traced(lambda s: s * 2, s) for s in (1.0, jnp.float32(1)))
    assert {(c.before, c.after) for c in jaxprtool.diff(doubled, plain).border} == {
        ("~f32[]", "f32[]")
    }


def test_calls_of_another_size_are_counterparts():
    @jax.jit
    def inner(x, w):
        return jax.nn.relu(jax.lax.stop_gradient(x) @ w)

    def other(x, w):
        return inner(x, w)

    sizes = [jaxprtool.trace(other, jnp.ones((n, n)), jnp.ones(n)) for n in (4, 3)]
    assert jaxprtool.diff(*sizes).hunks == ()


def with_rule(rule):
    """Return a function whose derivative is a rule of the operand and its tangent."""

    @jax.custom_jvp
    def function(x):
        return jnp.sin(x)

    function.defjvp(lambda x, t: (jnp.sin(x[0]), rule(x[0], t[0])))
    return lambda x: function(x)


@pytest.mark.parametrize(
    "before, after, same",
    [
        (lambda x, t: x**3 * t, lambda x, t: x**3 * t, True),
        (lambda x, t: jnp.where(x > 0, t, 0), lambda x, t: jnp.where(x > 0, t, 0), True),
        (lambda x, t: x**3 * t, lambda x, t: x**4 * t, False),
        (lambda x, t: (x - jnp.sin(x)) * t, lambda x, t: (jnp.sin(x) - x) * t, False),
        (lambda x, t: 2 * x * t, lambda x, t: 3 * x * t, False),
    ],
)
def test_rules_for_another_size_differ_if_they_compute_something_else(before, after, same):
    programs = [
        jaxprtool.trace(with_rule(rule), jnp.ones(n)) for rule, n in ((before, 4), (after, 3))
    ]
    parts = [d.part for line in jaxprtool.diff(*programs).lines for d in line.differences]
    assert parts == [] if same else "rules" in parts
