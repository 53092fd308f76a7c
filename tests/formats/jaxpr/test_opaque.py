"""Equations that a file describes but cannot rebuild: kernels, other packages' primitives."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive

import jaxprtool
from jaxprtool import jaxcompat, trace
from jaxprtool.commands.diff.diff import diff
from jaxprtool.errors import ProgramFileError, UnsupportedError
from jaxprtool.formats.jaxpr.read import parse_program, read
from jaxprtool.formats.jaxpr.write import (
    OpaqueEquations,
    program_file_text,
    rendered,
    write_program_files,
)
from jaxprtool.ir.equations import equations

X = jnp.ones((8, 128))


@dataclass(frozen=True)
class Options:
    """Parameters of a compiler that a reader does not have."""

    stages: int = 2


def scaled(factor, compiler_params=Options(), **options):
    """Return a function with one opaque kernel, which branches and has a loop."""
    options = {**options, "compiler_params": compiler_params}

    def kernel(x_ref, y_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            y_ref[...] = factor * x_ref[...]

        jax.lax.fori_loop(0, 2, lambda i, _: None, None)

    def function(x):
        y = pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=(2,), **options)(x)
        return jnp.tanh(y).sum()

    return function


def again(program, opaque=OpaqueEquations.unwritable):
    return parse_program(rendered(program, "", opaque=opaque)[0], "p.jaxpr")


def kernel_of(program):
    return next(eqn for eqn in program.jaxpr.eqns if eqn.primitive.name == "pallas_call")


def test_a_kernel_has_its_types_grid_and_body_in_a_file():
    program = trace(scaled(2.0, interpret=True), X)
    read = again(program)
    eqn = kernel_of(read)
    assert jaxcompat.is_opaque(eqn) and not eqn.effects
    assert read.out_avals == program.out_avals and eqn.outvars[0].aval.shape == X.shape
    assert eqn.params["grid_mapping"].grid == (2,)
    names = [inner.primitive.name for inner in equations(eqn.params["jaxpr"])]
    assert {"program_id", "cond", "get", "mul", "swap"} <= {*names}
    assert again(read).jaxpr.in_avals == read.jaxpr.in_avals


def test_what_only_looks_works_and_what_rebuilds_names_the_equation_and_its_line():
    read = again(trace(scaled(2.0), X))
    assert str(read) and "pallas_call" in str(read.apply("-O2"))
    place = r"^pallas_call at .*test_opaque\.py:\d+ is opaque in the file"
    uses = {
        "run": lambda: read(X),
        "differentiated": lambda: read.apply("grad"),
        "batched": lambda: read.apply("batch(axis_size=2)"),
    }
    for what, use in uses.items():
        with pytest.raises(UnsupportedError, match=f"{place}.* cannot be {what}") as caught:
            use()
        assert "the file only describes its compiler_params" in str(caught.value)


def test_kernels_are_compared_by_their_fields_and_bodies():
    same, other = (again(trace(scaled(2.0), X)) for _ in range(2))
    assert jaxprtool.equivalent(same, other)
    assert jaxprtool.equivalent(trace(scaled(2.0), X), trace(scaled(2.0), X))
    assert not jaxprtool.equivalent(same, again(trace(scaled(3.0), X)))


def test_a_file_that_should_be_run_is_refused_and_the_command_line_gives_the_reason(tmp_path):
    program = trace(scaled(2.0), X)
    with pytest.raises(UnsupportedError, match=r"pallas_call at .*test_opaque\.py:\d+ cannot be"):
        program_file_text(program)
    [reason] = write_program_files(
        [(program, tmp_path / "p.jaxpr")], opaque=OpaqueEquations.unwritable
    )
    assert "pallas_call at " in reason and "which cannot be run: its parameter" in reason


@custom_partitioning
def partitioned(x):
    return jnp.sin(x)


partitioned.def_partition(
    infer_sharding_from_operands=lambda *_: None,
    partition=lambda *_: None,
    sharding_rule="i j -> i j",
)


def with_policy(x):
    return jax.grad(jax.checkpoint(lambda y: jnp.sin(y).sum(), policy=lambda *_, **__: True))(x)


def without_backward(x):
    function = jax.custom_vjp(jnp.sin)
    function.defvjp(lambda x: (jnp.sin(x.value), x.value), lambda x, g: 1 // 0, symbolic_zeros=True)
    return function(x)


@pytest.mark.parametrize("function", [partitioned, with_policy, without_backward])
def test_any_equation_that_cannot_be_written_is_opaque_with_its_bodies(function):
    program = trace(lambda x: function(x) + 1, X)
    read = again(program)
    [eqn] = filter(jaxcompat.is_opaque, equations(read.jaxpr))
    assert any("lambda ;" in str(value) for value in eqn.params.values())
    assert read.out_avals == program.out_avals
    with pytest.raises(UnsupportedError, match=f"{eqn.primitive.name} at .*test_opaque"):
        read(X)


thrice_p = Primitive("thrice")
thrice_p.def_impl(lambda x: x * 3)
thrice_p.def_abstract_eval(lambda x: x)


def test_a_primitive_that_this_release_lacks_is_opaque_in_a_program_that_is_only_compared(tmp_path):
    written = tmp_path / "p.jaxpr"
    jaxprtool.write(trace(lambda x: jnp.sin(x) + 1, X), written)
    newer = tmp_path / "newer.jaxpr"
    newer.write_text(written.read_text().replace(" = sin ", " = sine_of_another_release "))
    with pytest.raises(ProgramFileError, match="unknown primitive 'sine_of_another_release'"):
        read(newer)
    program = read(newer, opaque=True)
    assert [eqn.primitive.name for eqn in program.jaxpr.eqns] == ["sine_of_another_release", "add"]
    assert not diff(program, read(written)).is_equivalent
    assert diff(program, read(newer, opaque=True)).is_equivalent
    with pytest.raises(UnsupportedError, match="sine_of_another_release at "):
        program(X)


def test_a_primitive_that_a_reader_lacks_is_opaque_in_a_recorded_program():
    program = trace(lambda x: thrice_p.bind(x).sum(), X)
    content = rendered(program, "", opaque=OpaqueEquations.foreign)[0]
    assert f"modules = {{'thrice': '{__name__}'}}" in content
    unknown = parse_program(content, "p.jaxpr")
    with pytest.raises(UnsupportedError, match="thrice at ") as caught:
        unknown(X)
    assert caught.value.hint == f"--plugin {__name__} imports the primitive"
    with pytest.raises(UnsupportedError, match="thrice at ") as caught:
        jaxprtool.to_python(program)
    assert "--plugin" in caught.value.hint
    with pytest.raises(jaxprtool.errors.ProgramFileError, match="unknown primitive") as caught:
        parse_program(program_file_text(program), "p.jaxpr")
    assert caught.value.hint == f"--plugin {__name__} imports the primitive"


class Settings:
    """A class of a package, which a record has as a field."""


def test_a_class_of_a_package_is_a_field_that_a_file_names_and_can_read():
    scaled_p = Primitive("scaled")
    scaled_p.def_abstract_eval(lambda x, options: x)
    program = trace(lambda x: scaled_p.bind(x, options=Options(Settings)), X)
    [eqn] = again(program, OpaqueEquations.foreign).jaxpr.eqns
    assert "Settings" in str(eqn.params["options"])


def test_opaque_equations_of_another_size_are_counterparts_and_differ_only_in_types():
    scaled_p = Primitive("scaled_by")
    scaled_p.def_abstract_eval(lambda x, by: x)

    @jax.jit
    def inner(x):
        return jax.nn.relu(jax.lax.stop_gradient(scaled_p.bind(jax.nn.relu(x), by=2)))

    files = [again(trace(lambda x: inner(x), jnp.ones(n)), OpaqueEquations.foreign) for n in (4, 3)]
    found = diff(*files)
    assert not (found.hunks or found.is_equivalent)
    assert len(found.retyped) == 8
