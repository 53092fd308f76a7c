"""A Program is called like the traced function, and is checked as a whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprtool
from jaxprtool.errors import CheckError
from jaxprtool.formats.jaxpr.read import parse_program
from jaxprtool.formats.jaxpr.write import program_file_text
from jaxprtool.ir.program import type_check
from jaxprtool.loading.trace import trace

x = np.arange(3.0, dtype=np.float32)


@pytest.fixture
def program():
    return jaxprtool.trace(lambda p, *, scale: {"y": p["w"] * scale}, {"w": x}, scale=2.0)


def test_a_program_is_called_like_its_function(program):
    np.testing.assert_array_equal(program({"w": x}, scale=3.0)["y"], x * 3)


def test_a_program_works_under_jaxs_transformations(program):
    total = lambda w: program({"w": w}, scale=2.0)["y"].sum()  # noqa: E731
    np.testing.assert_array_equal(jax.jit(jax.grad(total))(x), np.full(3, 2.0))
    np.testing.assert_array_equal(jax.vmap(total)(jnp.stack([x, x])), [6.0, 6.0])


def test_jax_jit_of_a_program_has_its_name(program):
    program = program.replace(name="model")
    assert "module @jit_model " in jax.jit(program).lower({"w": x}, scale=2.0).as_text()


@pytest.mark.parametrize("from_file", [False, True])
def test_results_are_jax_arrays(from_file):
    constant, key = jnp.arange(3.0), jax.random.key(1)

    def fun(x):
        zero = jax.grad(lambda i: 1.0, allow_int=True)(3)
        return (x, x + x, constant, np.ones(3, np.float32), 2.0, jnp.bfloat16(2), key), zero

    program = trace(fun, constant)
    program = parse_program(program_file_text(program), "f.jaxpr") if from_file else program
    with jax.transfer_guard("disallow"):
        results, zero = program(constant)
    expected = jax.jit(fun)(constant)[0]
    assert all(isinstance(result, jax.Array) for result in results)
    assert [jax.typeof(r) for r in results] == [jax.typeof(e) for e in expected]
    assert zero.dtype == jax.dtypes.float0
    np.testing.assert_array_equal(results[2].at[0].set(5.0), [5.0, 1.0, 2.0])


def lost(x):
    unused = jnp.log(x - 10.0)
    y = jax.lax.fori_loop(0, 2, lambda i, c: jnp.log(c - 5.0), jnp.sin(x))
    return {"fine": x, "bad": jax.jit(lambda v: v * 2)(y), "unused": unused > 0}


@pytest.mark.proof
def test_a_nan_in_a_ref_is_reported_at_the_equation_that_makes_it():
    def function(r, x):
        mine = jax.new_ref(x)
        mine[...] = jnp.log(mine[...])
        r[...] += mine[...]
        return r[...]

    ref, x = jax.new_ref(jnp.ones(2)), jnp.array([-1.0, 1.0])
    program = jaxprtool.trace(function, ref, x)
    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError, match="result of function has a NaN, from log at"):
            program(ref, x)
        with pytest.raises(FloatingPointError, match="from the argument 'r'"):
            program(ref, jnp.ones(2))
    assert jnp.array_equal(ref[...], jnp.array([jnp.nan, 1.0]), equal_nan=True)


@pytest.mark.parametrize("switch", ["jax_debug_nans", "jax_debug_infs"])
def test_jax_config_for_nans_and_infinities_applies_to_a_program(switch):
    program = jaxprtool.trace(lost, x)
    divided = jaxprtool.trace(lambda x: 1 / (x - x), x)
    assert jnp.isnan(program(x)["bad"]).all() and jnp.isinf(divided(x)).all()
    wrong, fine = (program, divided) if switch == "jax_debug_nans" else (divided, program)
    what = "a NaN, from log at" if switch == "jax_debug_nans" else "an infinity, from div at"
    with getattr(jax, switch.removeprefix("jax_"))(True):
        with pytest.raises(FloatingPointError, match=rf"{what} .*test_program.py:\d+$"):
            wrong(x)
        fine(x)
        jax.make_jaxpr(wrong)(x)


def test_a_nan_in_an_argument_is_reported_with_its_name(program):
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="from the argument 'p"):
        program({"w": np.full_like(x, np.nan)}, scale=2.0)
    scaled = jaxprtool.trace(lambda x: x * 1, 1.0)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="from the argument 'x'"):
        scaled(float("nan"))


@pytest.mark.parametrize(
    ("function", "origin"),
    [
        (lambda x: x * jnp.nan, "a NaN, from mul at"),
        (lambda x: x + jnp.inf, "an infinity, from a constant"),
        (lambda x: x * 2.0, "an infinity, from the argument 'x'"),
        (lambda x: jax.lax.scan(lambda c, r: (jnp.log(c - 5.0), c), x, length=400)[0], "log at"),
    ],
    ids=["NaN", "infinity", "argument", "loop"],
)
def test_non_finite_values_are_traced_to_constants_arguments_and_loops(function, origin):
    given = np.full_like(x, np.inf) if "argument" in origin else x
    both = jax.debug_nans(True), jax.debug_infs(True)
    with both[0], both[1], pytest.raises(FloatingPointError, match=origin):
        jaxprtool.trace(function, given)(given)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (({"v": x},), {"scale": 3.0}, r"p\['w'\] is missing$"),
        (({"w": x, "v": x},), {"scale": 3.0}, r"p\['v'\] is not an entry of the argument$"),
        (({"w": (x, x)},), {"scale": 3.0}, r"p\['w'\] must be an array, not a tuple$"),
        (({"w": None},), {"scale": 3.0}, r"p\['w'\] must be an array, not None$"),
        (([x],), {"scale": 3.0}, "p must be a dict, not a list$"),
        ((x, x), {"scale": 3.0}, "the program takes 1 positional argument, not 2$"),
        ((), {"scale": 3.0}, "the program takes 1 positional argument, not 0: p is missing$"),
        (({"w": x},), {"scale": 3.0, "p": {"w": x}}, "takes no keyword argument 'p'$"),
        (({"w": x},), {}, "the keyword argument 'scale' is missing$"),
        (({"w": x},), {"scale": 3.0, "shift": 1.0}, "takes no keyword argument 'shift'$"),
    ],
)
def test_arguments_of_another_structure_are_refused_by_the_first_path(
    program, args, kwargs, message
):
    with pytest.raises(TypeError, match=message):
        program(*args, **kwargs)


def test_a_positional_argument_may_be_passed_by_name(program):
    np.testing.assert_array_equal(program(scale=3.0, p={"w": x})["y"], x * 3)


def test_str_is_the_jaxpr_and_notebooks_show_a_program(program):
    assert str(program) == str(program.jaxpr)
    assert "mul" in program._repr_html_()


def test_programs_are_an_ordered_mapping(program):
    programs = jaxprtool.Programs({"b": program, "a": program})
    assert list(programs) == ["b", "a"] and len(programs) == 2 and programs["a"] is program
    assert repr(programs) == "Programs(b, a)"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"arg_names": ()}, "arguments"),
        ({"out_names": ("a", "b")}, "results"),
        ({"out_tree": jax.tree.structure((0, 0))}, "results"),
    ],
)
def test_trees_and_names_must_fit_the_jaxpr(program, change, what):
    with pytest.raises(CheckError, match=rf"the numbers of {what} differ"):
        type_check(program.replace(**change))


def test_an_ill_typed_equation_is_found(program):
    eqn = program.jaxpr.eqns[-1]
    wrong = eqn.replace(invars=[eqn.invars[0], jax.make_jaxpr(jnp.sin)(1.0).invars[0]])
    program.jaxpr.eqns[-1] = wrong
    with pytest.raises(CheckError, match=r"is not well typed: Variable .* not defined") as caught:
        type_check(program)
    assert "\n" not in caught.value.message


def test_a_result_that_is_a_number_is_an_array():
    program = jaxprtool.trace(lambda x: (x, 2.0, True), 1.0)
    results = program(1.0)
    assert [(r.shape, str(r.dtype), r.weak_type) for r in map(jnp.asarray, results)] == [
        ((), "float32", True),
        ((), "float32", True),
        ((), "bool", False),
    ]
    assert all(isinstance(r, jax.Array) for r in results[1:])


def doubled(depth):
    """Return a function of nested calls, each made twice: 2**depth when all are inlined."""
    function = jnp.sin
    for level in range(depth):
        inner = jax.jit(function)

        def function(x, inner=inner):
            return inner(x) + inner(2 * x)

        function.__name__ = f"level{level % 12}"
    return function


@pytest.mark.parametrize(
    "pipeline", ["batch(axis_size=2)", "jvp", "dce, cse, fold, simplify, hoist"]
)
def test_a_body_is_checked_once_however_often_it_is_called(pipeline):
    program = trace(doubled(40), jnp.arange(3.0))
    assert program.apply(pipeline).jaxpr.eqns  # checking each call would not terminate
