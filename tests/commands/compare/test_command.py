"""`jaxprtool compare` reports how far the results of variants differ."""

import json
import textwrap

import jax.numpy as jnp
import pytest

import jaxprtool
from jaxprtool.commands.compare.table import how_to_bisect

FUNCTIONS = """
    import jax.numpy as jnp, jaxprtool

    @jaxprtool.example("f32[64]")
    def exact(x):
        return {"double": 2 * x, "kept": x}

    @jaxprtool.example("f32[64]")
    def rounded(x):
        return {"double": x + x, "kept": x.astype(jnp.bfloat16).astype(jnp.float32)}

    @jaxprtool.example("f32[3]")
    def other(x):
        return x
"""


@pytest.fixture(autouse=True)
def parts(folder):
    (folder / "parts.py").write_text(textwrap.dedent(FUNCTIONS))
    return folder


def test_different_effects_are_reported_with_exit_code_1(cli, folder):
    source = """
        import jax, jaxprtool

        @jaxprtool.example("f32[3]")
        def loss(x):
            jax.debug.print("loss {}", x)
            return x

        @jaxprtool.example("f32[3]")
        def error(x):
            jax.debug.print("error {}", x)
            return x
    """
    (folder / "printing.py").write_text(textwrap.dedent(source))
    found = cli("compare", "printing.py:loss", "printing.py:error")
    text = " ".join(found.out.split())
    assert found.code == 1 and "1 result, bitwise equal; different effects: effect 1 " in text
    assert "parameter fmt: loss {} against error {}" in text
    assert cli("compare", "printing.py:loss", "-p", "", "-p", "-O2").code == 0
    assert cli("compare", "printing.py:loss", "-p", "", "-p", "drop_checks").code == 0


def test_results_beyond_tolerance_are_reported_with_exit_code_1(cli):
    found = cli("compare", "parts.py:exact", "parts.py:rounded")
    assert found.code == 1
    assert found.err == "note: --bisect finds the first equation that differs\n"
    heading, _, verdict, _, _, kept, same = found.out.splitlines()
    assert heading == "exact on random values, seed 0; reference: parts.py:exact"
    assert verdict == "parts.py:rounded: 2 results, 1 bitwise equal, 1 beyond tolerance"
    assert same.split() == ["result['double']", "same", "bits"]
    assert kept.startswith("result['kept']") and kept.endswith("of 64")
    assert max(map(len, found.out.splitlines())) <= 80


LAYERS = """
    import jax.numpy as jnp, jaxprtool

    def layers(x, dtype="float32"):
        ws = [(x * n).astype(dtype).astype("float32") for n in range(1, 31)]
        return {"a_rather_long_name_of_the_model": [{"kernel": w, "bias": -w} for w in ws]}

    @jaxprtool.example("f32[8]")
    def exact(x):
        return layers(x)

    @jaxprtool.example("f32[8]")
    def rounded(x):
        return layers(x, jnp.bfloat16)
"""


@pytest.mark.proof
def test_many_equal_results_are_one_row_with_the_errors_of_the_worst(cli, folder):
    (folder / "layers.py").write_text(textwrap.dedent(LAYERS))
    lines = cli("compare", "layers.py:exact", "layers.py:rounded").out.splitlines()
    (row,) = (i for i, line in enumerate(lines) if "[0..29]['kernel']" in line)
    assert lines[row] == "30 x result['a_rather_long_name_of_the_model'][0..29]['kernel']"
    assert lines[row + 1].endswith(" of 8") and "more" not in lines[-1]
    assert max(map(len, lines)) <= 80


BROKEN = """
    import jax.numpy as jnp, jaxprtool

    @jaxprtool.example("f32[8]")
    def exact(x):
        return [x * n for n in range(30)]

    @jaxprtool.example("f32[8]")
    def broken(x):
        return [x * n + (9.0 if n == 3 else 0.1 + jnp.where(n == 4, jnp.nan, 0)) for n in range(30)]
"""


@pytest.mark.proof
def test_a_result_with_a_new_nan_has_a_row_of_its_own(cli, folder):
    (folder / "broken.py").write_text(textwrap.dedent(BROKEN))
    out = cli("compare", "broken.py:exact", "broken.py:broken").out
    assert "8 NaN, not 0" in " ".join(out.split()) and "29 x result" in out


def test_a_wider_tolerance_exits_with_0(cli):
    found = cli("compare", "parts.py:exact", "parts.py:rounded", "--rtol", "0.01")
    assert found.code == 0 and "all within tolerance" in found.out


def test_json_has_every_number(cli):
    found = cli("compare", "parts.py:exact", "parts.py:rounded", "--json")
    document = json.loads(found.out)
    double, kept = document["variants"][0]["results"]
    assert found.code == 1 and document["within"] is False
    assert double["equal"] and not kept["within"]
    assert 0 < kept["absolute"] < 0.01 and kept["ulps"] > 1000 and kept["rtol"] is None
    assert 0 < kept["tolerated"] < 1e-5 and kept["error"] > 100


def test_pipelines_are_variants(cli):
    found = cli("compare", "parts.py:exact", "-p", "", "-p", "-O1")
    assert found.code == 0
    assert "-O1: 2 results, bitwise equal" in found.out


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((), "at least two variants"),
        (
            ("parts.py:other",),
            "parts.py:other cannot be compared, because it takes different arguments",
        ),
        (("--backends", "cpu,abacus"), "no backend 'abacus'"),
        (("--precision", "default,hihgest"), "unknown precision 'hihgest'"),
        (("--rtol", "-1"), "--rtol"),
    ],
)
def test_bad_input_is_a_one_line_error_with_exit_code_2(cli, arguments, message):
    found = cli("compare", "parts.py:exact", *arguments)
    assert found.code == 2 and message in found.err.splitlines()[0]


WRONG = """
    import jax, jaxprtool

    @jaxprtool.rewrite(x="f32[n]")
    def twice(x):
        return jax.numpy.sin(x) * 2.0

    @twice.to
    def _(x):
        return jax.numpy.sin(x) * 2.5

    @jaxprtool.example("f32[8]")
    def f(x):
        for _ in range(3):
            x = jax.numpy.sin(x) * 2.0 + x
        return x
"""


def test_bisect_names_the_pass_and_the_equation(cli, folder):
    (folder / "wrong.py").write_text(textwrap.dedent(WRONG))
    found = cli(
        *("compare", "wrong.py:f", "-p", "dce", "-p", "dce, cse, twice, dce, -O1"),
        *("--rewrite", "wrong.py", "--bisect"),
    )
    lines = found.out.splitlines()
    where = next(i for i, line in enumerate(lines) if " differs from " in line)
    assert found.code == 1
    assert " after twice (pass 1 of " in lines[where] and lines[where].endswith("at mul")
    assert lines[where + 1].startswith("wrong.py:15  x = jax.numpy.sin(x) * 2.0 + x")
    assert max(map(len, lines)) <= 80


def test_a_rewrite_alone_is_a_variant(cli, folder):
    (folder / "wrong.py").write_text(textwrap.dedent(WRONG))
    found = cli("compare", "wrong.py:f", "--rewrite", "wrong.py", "--bisect", "--json")
    (where,) = json.loads(found.out)["partings"]
    assert (where["pass"], where["primitive"]) == ("twice", "mul")
    given, literal = where["operands"]
    assert given["equal"] and literal["absolute"] == 0.5


def test_bisect_of_two_functions_or_a_mode_names_no_pass(cli):
    found = cli("compare", "parts.py:exact", "parts.py:rounded", "--bisect", "--json")
    (where,) = json.loads(found.out)["partings"]
    assert where["pass"] == "" and where["found"] and where["passes"] == 0


NEARLY_EQUAL = """
import jax, jaxprtool

def normalized(x, eps):
    return jax.numpy.tanh(x * jax.lax.rsqrt((x * x).mean() + eps))

@jaxprtool.example("f32[64]")
def usual(x):
    return normalized(1000 * x, 0.0)

@jaxprtool.example("f32[64]")
def other(x):
    return normalized(1000 * x, 1.0)
"""


def test_bisect_names_a_different_literal_of_programs_that_are_within_tolerance(cli, folder):
    (folder / "nearly.py").write_text(NEARLY_EQUAL)
    command = "compare", "nearly.py:usual", "nearly.py:other", "--bisect"
    found = cli(*command, "--json")
    (where,) = json.loads(found.out)["partings"]
    assert found.code == 0 and where["within"] and where["primitive"] == "add"
    assert where["operands"][-1]["absolute"] == 1.0
    assert "within tolerance; this is the first equation whose bits" in cli(*command).out


def test_html_is_a_page_with_every_result_and_the_first_difference(cli, folder):
    found = cli("compare", "parts.py:exact", "parts.py:rounded", "--bisect", "-o", "page.html")
    page = (folder / "page.html").read_text()
    assert found.code == 1 and found.out.startswith("exact on ")
    assert "result[&#39;kept&#39;]" in page and "differs from parts.py:exact" in page
    assert "<script" not in page and page.count("<section>") == 2
    assert cli("compare", "parts.py:exact", "parts.py:rounded", "-o", "-").code == 2


NEVER_FINITE = """
import jax.numpy as jnp, jaxprtool

@jaxprtool.example("f32[8]", "f32[8]")
def right(m, v):
    return m / jnp.sqrt(-jnp.abs(v) - 1)

@jaxprtool.example("f32[8]", "f32[8]")
def wrong(m, v):
    return 2 * m / jnp.sqrt(-jnp.abs(v) - 1) + 7
"""


def test_non_finite_results_prove_nothing(cli, folder):
    (folder / "never.py").write_text(NEVER_FINITE)
    command = ["compare", "never.py:right", "never.py:wrong"]
    found = cli(*command)
    assert found.code == 0
    assert "within tolerance" not in found.out and "which proves nothing" in found.out
    assert "8 NaN" in found.out
    assert "warning: result is not finite in 8 of 8 elements" in found.err
    assert "pass other values in --args" in found.err
    assert cli(*command, "--strict").code == 1


def test_non_finite_elements_are_counted_where_bits_are_equal(cli, folder):
    (folder / "few.py").write_text("def kept(x): return x\ndef inverse(x): return 1 / x")
    more = "-p", "", "-p", "dce", "--args", "arange(f32[3])"
    assert "1 result, bitwise equal\n" in cli("compare", "few.py:kept", *more).out
    found = cli("compare", "few.py:inverse", *more)
    assert found.code == 0 and "bitwise equal, 1 of 3 elements not finite" in found.out


def test_verify_reports_nothing_verified_if_results_are_not_finite(cli, folder):
    (folder / "never.py").write_text(NEVER_FINITE.replace("return 2", "m + v; return 2"))
    command = ["opt", "never.py:wrong", "-p", "dce", "--verify"]
    found = cli(*command)
    assert found.code == 0
    assert "warning: result is not finite in 8 of 8 elements" in found.err
    assert "not verified: 1 pass compared" in found.err
    assert cli(*command, "--strict").code == 1


def test_how_to_find_the_first_difference_is_said_if_it_was_not_searched_for(cli):
    program = jaxprtool.trace(lambda x: x * 0.1, jnp.ones(8))
    other = jaxprtool.trace(lambda x: x * 0.1001, jnp.ones(8))
    report = jaxprtool.compare([program, other], rtol=1.0)
    assert not report.variants[0].results[0].equal and not report.partings
    assert how_to_bisect(report, False) == ""
    assert "--rtol 0 --bisect finds the first difference in bits" in how_to_bisect(report, True)
