"""Arguments of a Program that are lengths of examples are checked whenever it is run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprtool
from jaxprtool import Ragged
from jaxprtool.errors import ArgumentsError, ProgramFileError
from jaxprtool.execute.running.arrays import random_argument
from jaxprtool.formats.jaxpr.read import parse_program
from jaxprtool.formats.jaxpr.write import program_file_text
from jaxprtool.ir.program import program_signature
from jaxprtool.ir.symbols import LengthsBound
from jaxprtool.loading.argspec import read_args
from jaxprtool.render.reports import program_document

ROWS = np.arange(18.0, dtype=np.float32).reshape(6, 3)
PASS = "ragged(axis='n', lanes=3, longest=4)"


def centred(x):
    return x - x.mean(0)


def expected(lengths):
    parts = np.split(ROWS, np.cumsum(lengths)[:-1])
    return np.concatenate([part - part.mean(0) for part in parts if len(part)])


@pytest.fixture
def program():
    args, _ = read_args("f32[n,3]")
    return jaxprtool.trace(centred, *args).apply(PASS)


@pytest.mark.parametrize("integer", [np.int32, np.int64, np.uint8])
def test_lengths_are_of_any_integer_dtype(program, integer):
    lengths = np.array([4, 0, 2], integer)
    np.testing.assert_allclose(program(ROWS, lengths), expected([4, 0, 2]), atol=1e-5)
    np.testing.assert_allclose(program(ROWS, lengths=lengths), expected([4, 0, 2]), atol=1e-5)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([3, -1, 4], r"'lengths' of centred is -1 at \[1\], but must be a length from 0 to 4$"),
        ([0, 1, 5], r"'lengths' of centred is 5 at \[2\], but must be a length from 0 to 4$"),
        ([1, 2, 2], "'lengths' of centred adds up to 5, but there are 6 rows$"),
        ([4, 2, 1], "'lengths' of centred adds up to 7, but there are 6 rows$"),
        (
            [4.0, 1, 1],
            "is of dtype float64, but must be an array of lengths that add up to 6, each at",
        ),
    ],
)
@pytest.mark.parametrize("passes", ["dce", "jit, -O1", "specialize(N=6)", "specialize(N='2*k')"])
def test_other_lengths_are_refused(program, passes, lengths, message):
    with pytest.raises(ArgumentsError, match=message):
        program.apply(passes)(ROWS, np.array(lengths))


def test_traced_lengths_are_not_checked(program):
    found = jax.jit(program)(ROWS, np.array([1, 2, 3]))
    np.testing.assert_allclose(found, expected([1, 2, 3]), atol=1e-5)


@pytest.mark.proof
def test_batched_lengths_are_checked_individually(program):
    lanes = program.apply("batch(axis_size=2)")
    both = np.stack([ROWS, ROWS])
    found = lanes(both, np.array([[1, 2, 3], [4, 0, 2]]))
    np.testing.assert_allclose(found[1], expected([4, 0, 2]), atol=1e-5)
    with pytest.raises(ArgumentsError, match=r"'lengths' of .* adds up to 5, but there are 6"):
        lanes(both, np.array([[1, 2, 3], [4, 0, 1]]))


def test_each_axis_has_its_own_rows_and_lengths():
    args, _ = read_args("f32[n], f32[m]")
    program = jaxprtool.trace(lambda x, y: x.sum() + y.sum(), *args)
    both = program.apply("ragged(axis=('n', 'm'), lanes=2)")
    pair = ROWS[:, 0], np.ones(2, np.float32)
    assert both(*pair, np.array([6, 0]), np.array([1, 1])).tolist() == [46.0, 1.0]
    message = r"'m_lengths' of .* adds up to 6, but there are 2 rows"
    with pytest.raises(ArgumentsError, match=message):
        both(*pair, np.array([6, 0]), np.array([6, 0]))


def test_lengths_must_agree_with_a_number_of_rows_that_is_an_argument(program):
    masked = program.apply("mask(N=8)")
    padded = np.concatenate([ROWS, np.full((2, 3), np.nan, np.float32)])
    found, _ = jax.jit(masked)(padded, np.array([4, 0, 2]), 6)
    np.testing.assert_allclose(found[:6], expected([4, 0, 2]), atol=1e-5)
    with pytest.raises(ArgumentsError, match="'lengths' of centred adds up to 6, but there are 5"):
        masked(padded, np.array([4, 0, 2]), 5)


def test_lengths_are_bound_to_values_if_the_number_of_rows_is_known(program):
    with pytest.raises(
        ArgumentsError, match="lengths is an array of lengths that add up to N"
    ) as e:
        program.apply("closed({'lengths': [4, 0, 2]})")
    assert e.value.hint == "give it with specialize(N=…)"
    bound = program.apply("specialize(N=6), closed({'lengths': [4, 0, 2]})")
    np.testing.assert_allclose(bound(ROWS), expected([4, 0, 2]), atol=1e-5)
    with pytest.raises(ArgumentsError, match="'lengths' of centred adds up to 7"):
        program.apply("specialize(N=6), closed({'lengths': [4, 1, 2]})")


def test_random_lengths_add_up_to_the_rows(program):
    known = program.apply("specialize(N=7)")
    found = [random_argument(known, 1, seed).tolist() for seed in range(20)]
    assert {sum(each) for each in found} == {7} and max(map(max, found)) <= 4
    assert len(set(map(tuple, found))) > 3
    with pytest.raises(ArgumentsError, match="'lengths' of centred: no 3 lengths of at most 4 add"):
        random_argument(program.apply("specialize(N=13)"), 1, 0)
    masked = program.apply("mask(N=8)")
    _, lengths, rows = (random_argument(masked, i, seed=3) for i in range(3))
    assert lengths.sum() == rows


def test_the_minimum_length_is_shown_kept_checked_and_used_for_random_lengths():
    (x,), _ = read_args("f32[n>=2,3]")
    program = jaxprtool.trace(centred, x).apply(PASS)
    described = program_signature(program).arguments[1].described
    assert described == "i32[3] of N rows, each from 2 to 4"
    assert program_document(program)["arguments"][1]["at_least"] == 2
    again = parse_program(program_file_text(program), "centred.jaxpr").apply("specialize(N=7)")
    assert again.bounds == (("lengths", LengthsBound(7, 4, shortest=2)),)
    drawn = [random_argument(again, 1, seed).tolist() for seed in range(9)]
    assert all(sum(each) == 7 and min(each) >= 2 for each in drawn)
    with pytest.raises(ArgumentsError, match="no 3 lengths of at least 2 add up to 5"):
        random_argument(program.apply("specialize(N=5)"), 1, 0)
    unbounded = LengthsBound("N", shortest=2)
    assert str(unbounded) == "an array of lengths that add up to N, each at least 2"


def test_a_file_keeps_the_properties_of_lengths(program):
    written = program_file_text(program)
    assert "bounds = {'lengths': {'rows': 'N', 'longest': 4}}\n" in written
    again = parse_program(written, "centred.jaxpr")
    np.testing.assert_allclose(again(ROWS, np.array([4, 0, 2])), expected([4, 0, 2]), atol=1e-5)
    with pytest.raises(ArgumentsError, match="'lengths' of centred adds up to 7"):
        again(ROWS, np.array([4, 1, 2]))
    fixed = program.apply("specialize(N=6)")
    assert parse_program(program_file_text(fixed), "fixed.jaxpr").bounds == (
        ("lengths", LengthsBound(6, 4)),
    )


@pytest.mark.parametrize(
    ("bound", "message"),
    [
        ("{'longest': 4}", "write bounds as"),
        ("{'rows': 7}", "write bounds as"),
        ("{'rows': 'N', 'more': 1}", "write bounds as"),
        ("{'rows': 'N ('}", ""),
        ("-1", "write bounds as"),
    ],
)
def test_a_file_marks_a_missing_bound(program, bound, message):
    written = program_file_text(program).replace("{'rows': 'N', 'longest': 4}", bound)
    with pytest.raises(ProgramFileError, match=rf"centred.jaxpr:6:\d+: .*{message}"):
        parse_program(written, "centred.jaxpr")


def test_lengths_are_shown_with_their_sum(program):
    described = [value.described for value in program_signature(program).arguments]
    assert described == ["f32[N,3]", "i32[3] of N rows, each at most 4"]
    document = program_document(program)["arguments"][1]
    assert (document["rows"], document["at_most"]) == ("N", 4)
    said = "`lengths` is an array of lengths that add up to N, each at most 4."
    assert said in jaxprtool.to_python(program)


@pytest.mark.parametrize(("rows", "bound"), [(None, (6, 4)), (8, (8, 4, True))])
def test_lengths_of_a_ragged_argument_are_recognized(rows, bound):
    batch = Ragged.of([ROWS[:4], ROWS[4:]], rows=rows, longest=4)
    mean = jaxprtool.vmap(lambda x: x.sum(0))
    program = jaxprtool.trace(lambda w, each: mean(each["batch"]) * w, 2.0, {"batch": batch})
    assert program.bounds == (("each['batch'].lengths", LengthsBound(*bound)),)
    np.testing.assert_allclose(program(2.0, {"batch": batch})[1], 2 * ROWS[4:].sum(0))
    again = parse_program(program_file_text(program), "mean.jaxpr")
    assert again.bounds == program.bounds
    for wrong in ([5, 1], [4, 5], [-1, 4]):
        tampered = jax.tree.map(lambda x: x, batch)
        tampered.lengths = jnp.array(wrong)
        with pytest.raises(ArgumentsError, match=r"argument 'each\['batch'\].lengths' of"):
            program(2.0, {"batch": tampered})
