"""`jaxprtool why` shows what values affect and depend on; `show --uses` shows it in a listing."""

import json
import textwrap

import jax.numpy as jnp
import pytest

import jaxprtool
from jaxprtool.commands.why.table import slices_by_line
from jaxprtool.ir.source_text import Place

FUNCTIONS = """
    import jax
    import jax.numpy as jnp

    def loss(params, x):
        hidden = jnp.tanh(x @ params["w"])
        def step(carry, row):
            return (carry[0] + row, carry[1] * 2), carry[1]
        (total, _), rows = jax.lax.scan(step, (hidden[0], params["b"]), hidden)
        return {"loss": total.sum(), "rows": rows}

    def twice(a, b):
        c = a * 2
        return jnp.sin(b) + c
"""

LOSS = "kept.py:loss", "--args", "{'w': f32[4,4], 'b': f32[4]}, f32[3,4]"
TWICE = "kept.py:twice", "--args", "f32[3], f32[3]"


@pytest.fixture(autouse=True)
def kept(folder):
    (folder / "kept.py").write_text(textwrap.dedent(FUNCTIONS).lstrip())


def test_an_argument_has_the_affected_lines_and_results(cli):
    found = cli("why", *LOSS, "params['w']")
    expected = "params['w'] affects 7 of 8 equations and 1 of 2 results: result['loss']; not"
    assert " ".join(found.out.splitlines()[:2]) == f"{expected} result['rows']"
    lines = found.out.splitlines()[2:]
    assert lines[0].split()[:2] == ["2", "kept.py:5"]
    assert 'hidden = jnp.tanh(x @ params["w"])' in lines[0]
    assert "(dot_general, 1 more)" in lines[0]
    assert lines[-1] == "… 1 equation that it does not affect"


def test_a_result_has_its_dependencies(cli):
    found = cli("why", *LOSS, "rows")
    assert found.out.startswith("result['rows'] depends on 2 of 8 equations and 1 of 3 arguments")
    assert "params['b']" in found.out
    several = cli("why", *LOSS, "params").out
    assert several.startswith("params (2 arguments) affect all 8 equations and all 2 results")


def test_a_line_and_a_variable_have_both(cli):
    ahead, behind = cli("why", *LOSS, "kept.py:5").out.split("\n\n")
    assert ahead.startswith("kept.py:5 affects 7 of 8") and "depends on 2 of 8" in behind
    only = cli("why", *LOSS, "kept.py:5", "--back").out
    assert only.startswith("kept.py:5 depends on 2 of 8 equations")
    assert cli("why", *LOSS, "hidden").out.startswith("hidden affects 5 of 8 equations")


def test_equations_are_shown_as_listing_tree_and_picture(cli):
    text = cli("why", *LOSS, "params['b']", "--full").out
    assert text.startswith("# params['b'] affects 2 of 8") and "mul" in text
    assert "dot_general" not in text and "… 4 equations that it does not affect" in text
    assert text == cli("why", *LOSS, "params['b']", "--format", "text").out
    tree = cli("why", *LOSS, "params['b']", "--format", "tree").out
    assert "mul" in tree and "tanh" not in tree
    dot = cli("why", *LOSS, "params['b']", "--format", "dot").out
    assert "<b>mul</b>" in dot and "<b>dot_general</b>" not in dot and "tanh" not in dot


def test_a_path_has_each_step(cli):
    found = cli("why", *LOSS, "--path", "x", "loss").out.splitlines()
    assert found[0] == "x reaches result['loss'] through 5 equations"
    assert [line.split()[0] for line in found[1:]] == [
        *("dot_general", "tanh", "scan", "add", "reduce_sum")
    ]
    assert cli("why", *LOSS, "--path", "x", "rows").out == "x does not reach result['rows']\n"


def test_json_has_the_same_contents(cli):
    found = json.loads(cli("why", *LOSS, "params['w']", "--json").out)
    assert found["kind"] == "argument" and found["forward"]["results"] == ["result['loss']"]
    assert found["forward"]["equations"] == 7 and found["forward"]["of"] == 8
    assert sum(line["equations"] for line in found["forward"]["lines"]) == 7
    path = json.loads(cli("why", *LOSS, "--path", "x", "rows", "--json").out)
    assert path["steps"] is None


def test_show_uses_omits_unaffected_equations(cli):
    found = cli("show", *LOSS, "--uses", "params['b']")
    assert "equations that params['b'] does not affect" in found.out
    assert "scan" in found.out and "dot_general" not in found.out
    for format in ("tree", "table"):
        out = cli("show", *LOSS, "--uses", "params['b']", "--format", format).out
        assert "dot_general" not in out
    listed = json.loads(cli("show", *LOSS, "--uses", "params['b']", "--json").out)
    assert {"skipped": 4} in listed["programs"][0]["equations"]


@pytest.mark.parametrize(
    "what, fault, hint",
    [
        ("params['v']", "no argument, result, line or variable 'params['v']'", "'params['w']'?"),
        ("kept.py:1", "no equation of loss comes from kept.py:1", "near it: kept.py:5"),
        ("other.py:5", "no equation of loss comes from a file 'other.py'", "kept.py"),
        ("nothing", "no argument, result, line or variable 'nothing'", "arguments: params, x"),
        ("variable:nothing", "no variable 'nothing'", None),
        ("", "variable is empty", None),
    ],
)
def test_unknown_names_are_a_one_line_error_with_the_nearest_name(cli, what, fault, hint):
    found = cli("why", *LOSS, what)
    assert (found.code, found.result) == (2, "") and fault in found.err.splitlines()[0]
    assert found.err.count("\n") <= 2 and (hint is None or hint in found.err)


def test_an_argument_takes_precedence_over_a_variable_of_the_same_name():
    program = jaxprtool.trace(lambda b, a: (a * 2, b), 1.0, 2.0)
    assert jaxprtool.why(program, "b").forward.results == ("result[1]",)
    assert jaxprtool.why(program, "variable:b").forward.results == ("result[0]",)


def test_a_name_of_both_an_argument_and_a_result_needs_a_keyword():
    program = jaxprtool.trace(lambda result, x: {"loss": x * 2, "aux": result}, 1.0, 2.0)
    with pytest.raises(jaxprtool.errors.PointError, match="an argument and a result") as error:
        jaxprtool.why(program, "result")
    assert "'argument:result' or 'result:result'" in error.value.hint
    assert jaxprtool.why(program, "argument:result").forward.results == ("result['aux']",)
    assert jaxprtool.why(program, "loss").back.arguments == ("x",)


def stepped(params, x):
    hidden = jnp.tanh(x @ params["block"]["qkv"]["kernel"])
    return {"out": hidden @ params["block"]["out"]["kernel"], "metrics": {"total": hidden.sum()}}


@pytest.fixture(scope="module")
def step():
    square = jnp.ones((3, 3))
    params = {"block": {"qkv": {"kernel": square}, "out": {"kernel": square}}}
    return jaxprtool.trace(stepped, params, square)


def test_a_path_suffix_is_a_name_if_it_is_unique(step):
    assert jaxprtool.why(step, "qkv.kernel").what == "params['block']['qkv']['kernel']"
    assert jaxprtool.why(step, "block").what == "params['block']"
    assert jaxprtool.why(step, "metrics.total").what == "result['metrics']['total']"
    assert jaxprtool.why(step, "total").what == "result['metrics']['total']"
    assert jaxprtool.why_gradient(step, "out.kernel", to="total").what.endswith("['out']['kernel']")
    assert jaxprtool.why(step, "hidden").what == "hidden"  # a variable has the whole name


def test_an_ambiguous_path_suffix_is_refused_with_all_matches(step):
    with pytest.raises(jaxprtool.errors.PointError) as error:
        jaxprtool.why(step, "kernel")
    assert error.value.message == (
        "'kernel' is the end of 2 names of stepped: params['block']['out']['kernel'], "
        "params['block']['qkv']['kernel']"
    )
    with pytest.raises(jaxprtool.errors.PointError, match="is the end of 2 names"):
        jaxprtool.why(step, "argument:kernel")


def test_files_of_the_same_name_are_distinguished_by_their_folders(cli, folder):
    (folder / "other").mkdir()
    for path in ("alike.py", "other/alike.py"):
        (folder / path).write_text((folder / "kept.py").read_text())
    call = "alike.twice(x, x) + other.alike.twice(x, x)"
    (folder / "both.py").write_text(f"import alike, other.alike\ndef both(x):\n    return {call}\n")
    both = "both.py:both", "--args", "f32[3]"
    assert cli("why", *both, "other/alike.py:13").out.startswith("other/alike.py:13 affects")
    assert cli("why", *both, "alike.py:13").out.startswith("alike.py:13 affects")
    assert cli("why", *both, "both.py:3").code == 0


@pytest.mark.parametrize(
    "function, what, expected",
    [
        (lambda x: (1.0, x), "[0]", "result[0] depends on no equation and not the argument x"),
        (lambda x: (x, x), "x", "x affects no equation and all 2 results"),
        (lambda: jnp.arange(3.0).sum(), "result", "result depends on all 2 equations and no"),
        (lambda x, y: jnp.sin(jnp.cos(x)), "y", "y affects none of 2 equations and not the result"),
    ],
)
def test_no_and_all_dependencies_are_described_in_words(function, what, expected):
    arguments = [jnp.ones(3)] * function.__code__.co_argcount
    found = jaxprtool.why(jaxprtool.trace(function, *arguments), what)
    assert slices_by_line(found, 100, None).plain().startswith(expected)


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("x", "--path", "x", "loss"),
        ("x", "--json", "--full"),
        ("--path", "x", "loss", "--back"),
        ("x", "-p", "unzip"),
    ],
)
def test_incompatible_options_are_a_one_line_error(cli, options):
    found = cli("why", *LOSS, *options)
    assert (found.code, found.result) == (2, "") and found.err.startswith("error: ")
    assert cli("show", *LOSS, "--uses", "x", "--stats").code == 2


def test_a_constant_has_the_same_name_as_in_tables(cli, folder):
    code = """
    import jax, jax.numpy as jnp

    big = jnp.ones(3)

    def captured(x, y):
        return jax.lax.fori_loop(0, 3, lambda i, c: c * big, x), y + 1
    """
    (folder / "held.py").write_text(textwrap.dedent(code))
    case = "held.py:captured", "--args", "f32[3], f32[3]"
    assert "constant[0]" in cli("show", *case, "--stats").out
    found = cli("why", *case, "constant[0]")
    assert found.out.startswith("constant[0] affects ")
    assert "not result[1]" in " ".join(found.out.split()) and "held.py:7" in found.out
    missing = cli("why", *case, "constant[1]")
    assert missing.code == 2 and "'constant[1]'" in missing.err


def test_a_zero_gradient_is_explained_before_and_after_grad(cli, folder):
    code = """
    import jax.numpy as jnp

    def quantized(params, x):
        return (x @ (jnp.round(params["w"] * 8) / 8) + params["b"]).sum()
    """
    (folder / "quantized.py").write_text(textwrap.dedent(code).lstrip())
    case = "quantized.py:quantized", "--args", "{'w': f32[5,4], 'b': f32[4]}, f32[3,5]"
    message = "with respect to params['w'] is zero: round (quantized.py:4) stops every path."
    found = cli("why", *case, "params['w']")
    assert message in " ".join(found.out.split())
    document = json.loads(cli("why", *case, "params['w']", "--json").out)
    assert document["gradient"]["zero"] == ["result"]
    (stop,) = document["gradient"]["stops"]
    assert (stop["primitive"], Place.from_json(stop["place"])) == ("round", "quantized.py:4")
    assert "gradient" not in cli("why", *case, "params['b']").out
    assert message in cli("why", *case, "result['w']", "-p", "grad").out
    assert "zero" not in cli("why", *case, "result['b']", "-p", "grad").out
    assert message in cli("why", *case, "result[1]['w']", "-p", "value_and_grad").out


def test_a_gradient_is_explained_with_the_line_that_stops_it(cli, folder):
    (folder / "stopped.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "def loss(params, x):\n"
        "    steps = jnp.round(params['a'])\n"
        "    dead = jax.nn.relu(params['b'] - 1e9)\n"
        "    far = jnp.sqrt((params['c'] * 0).sum())\n"
        "    return (x * steps).sum() + dead.sum() + far + params['d'].sum()\n"
    )
    types = "{'a': f32[3], 'b': f32[3], 'c': f32[3], 'd': f32[3], 'e': f32[3]}, f32[3]"
    asked = "stopped.py:loss", "--args", types
    found = cli("why", *asked, "--gradient", "params")
    message = " ".join(found.out.split())
    assert "respect to params['a'] is zero for all inputs: 1 operation stops every path." in message
    assert "round stopped.py:3" in message and "x + stop_gradient(round(x) - x)" in message
    assert "params['b'] is zero on these inputs" in message and "relu stopped.py:4" in message
    assert "params['c'] is NaN" in message and "sqrt stopped.py:5" in message
    assert "params['d'] is not zero: its norm is 1.732." in message
    assert "params['e'] is not used: the gradient is zero." in message
    assert "filled with random values (--seed 0)" in found.err
    expected = json.loads(cli("why", *asked, "--gradient", "params['a']", "--json").out)
    assert expected["groups"][0]["kind"] == "zero" and "value" not in expected
    assert expected["groups"][0]["causes"][0]["place"]["line"] == 3


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (("x", "--gradient", "x"), "WHAT and --gradient cannot be combined"),
        (("x", "--to", "loss"), "--to needs --gradient ARG"),
        (("x", "--seed", "1"), "--seed needs --gradient ARG"),
        (("--gradient", "x", "--full"), "--gradient cannot be combined with --forward"),
        (("--gradient", "v", "--to", "loss"), "loss has no argument 'v'"),
        (("--gradient", "x", "--to", "rows"), "a gradient is that of one real number"),
    ],
)
def test_incompatible_gradient_options_are_refused(cli, options, fault):
    refused = cli("why", *LOSS, *options)
    assert refused.code == 2 and fault in refused.err and not refused.out


UPDATE = """
    import jax, jax.numpy as jnp, jaxprtool

    def loss(params, target, x):
        return jnp.mean(jnp.square(x @ params - 0.9 * jnp.tanh(x @ target)))

    @jaxprtool.example("f32[3]", "f32[4,3]")
    def update(params, x):
        value, grads = jax.value_and_grad(lambda params: loss(params, params, x))(params)
        return params - grads, value
"""


@pytest.mark.proof
def test_a_function_inside_a_program_is_a_target_of_all_commands(cli, folder):
    (folder / "kept.py").write_text(textwrap.dedent(UPDATE))
    assert cli("opt", "kept.py:update", "-o", "update.jaxpr").code == 0
    found = cli("why", "update.jaxpr:loss", "--gradient", "params")
    assert found.code == 0 and "with respect to params is not zero" in found.out
    assert found.err.startswith("note: this is the forward part of loss in a gradient")
    assert cli("residuals", "update.jaxpr:loss").out.startswith("loss keeps ")
    wrong = cli("show", "update.jaxpr:los")
    assert wrong.code == 2 and wrong.err.endswith("hint: did you mean 'loss'?\n")
