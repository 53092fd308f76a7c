"""`jaxprtool outline`: repeated code, and its cost as traced and outlined."""

import json
import os
import re
import textwrap

import jax
import pytest

MODEL = """
    import jax, jax.numpy as jnp, jaxprtool

    def layer(w, x):
        x = jnp.tanh(x @ w) + jnp.sin(x)
        x = x / (1 + jnp.abs(x).max())
        return jnp.log1p(jnp.exp(x)) * jnp.cumsum(x, axis=0)

    @jaxprtool.example("f32[3,4,4]", "f32[2,4]")
    def loss(ws, x):
        for w in ws:
            x = layer(w, x)
        return x.sum()

    @jaxprtool.example("f32[4,4]", "f32[20,4]")
    def recurrence(w, xs):
        h = jnp.zeros(w.shape[0])
        for t in range(xs.shape[0]):
            h = jnp.tanh(w @ h + xs[t])
        return (h ** 2).sum()

    def wave(w, x):
        for f in (jnp.sin, jnp.cos, jnp.tanh, jnp.sin, jnp.cos, jnp.tanh):
            x = f(x) * w
        return x

    def waves(ws, x):
        for w in ws:
            x = wave(w, x)
        return x.sum()

    @jaxprtool.example("f32[4]")
    def small(x):
        return jnp.sin(x).sum()

    @jaxprtool.example("f32[16]")
    def stepped(x):
        v = jnp.zeros_like(x)
        for _ in range(6):
            v = v - 0.1 * jnp.sin(x - jnp.roll(x, 1))
            x = x + 0.1 * v
        return (x**2).sum()

    @jaxprtool.example("f32[4]", "f32[20,4]")
    def scanned(x, xs):
        return jax.lax.scan(lambda x, y: (jnp.sin(x) * y, None), x, xs, unroll=8)[0]

    @jaxprtool.example("f32[4]")
    def looped(x):
        return jax.lax.fori_loop(0, 12, lambda i, x: jnp.sin(x), x, unroll=True)

    @jaxprtool.example("f32[n]")
    def symbolic(x):
        return jnp.sin(x).sum()

    @jaxprtool.example("f32[4]")
    def prints(x):
        jax.debug.print("the sum is {}", x.sum())
        return x
"""
LOSS = "model.py:loss"


@pytest.fixture
def cli(folder, cli):
    (folder / "model.py").write_text(textwrap.dedent(MODEL))
    return cli


def test_bodies_have_copies_equations_share_and_lines(cli):
    result = cli("outline", LOSS, "--equations", "8")
    assert result.code == 0 and result.err == ""
    lines = result.out.splitlines()
    heading = re.fullmatch(r"loss: \d+ equations, (\d+) with calls inlined", lines[0])
    assert lines[1].split() == ["repeated", "body", "copies", "equations", "share", "source"]
    assert re.fullmatch(r"layer +3 +\d+ +\d\d\.\d% +model\.py:5-7", lines[3])
    assert lines[-4].startswith("the rest ")
    total = r"(\d+) equations inlined, (\d+) after outlining: \d\.\d times fewer equations"
    before, after = map(int, re.fullmatch(total, lines[-2]).groups())
    assert int(heading[1]) == before and after < before
    memory = r"temporary memory: about \d+ bytes, \d+\.\d times as much as traced"
    assert re.fullmatch(memory, lines[-1])


def test_the_command_has_the_options_of_the_pass(cli):
    assert "no repetition" in cli("outline", LOSS, "--copies", "4", "--equations", "8").out
    assert "no repetition" in cli("outline", LOSS, "--equations", "1000").out
    plain = cli("outline", LOSS, "--equations", "8", "--mark", "plain").out
    count = re.search(r"(\d+) equations inlined, (\d+) after outlining\n", plain)
    assert count[1] == count[2] and "1.0 times as much as traced" in plain


def test_passes_run_first_and_each_program_is_reported(cli):
    six = "f32[6,4,4], f32[2,4]"
    gradient = cli("outline", LOSS, "-p", "value_and_grad", "--args", six, "--equations", "8").out
    assert re.search(r"^ *layer +[56] ", gradient, re.MULTILINE)
    assert re.search(r"^ *layer_transpose +[56] ", gradient, re.MULTILINE)
    halves = cli("outline", LOSS, "-p", "vjp", "--equations", "8").out
    names = re.findall(r"^(\w+): \d+ equations", halves, re.MULTILINE)
    assert names == ["loss_forward", "loss_backward"]


def test_repetition_below_the_threshold_is_reported(cli):
    lines = cli("outline", LOSS).out.splitlines()
    assert re.fullmatch(r"loss: \d+ equations, too little repetition to outline", lines[0])
    assert re.fullmatch(r"layer +3 +\d+ +\d\d\.\d% +model\.py:5-7", lines[3])
    assert lines[5] == "--equations N outlines bodies of at least N equations anyway"
    (program,) = json.loads(cli("outline", LOSS, "--json").out)["programs"]
    assert program["bodies"] == [] and [body["name"] for body in program["small"]] == ["layer"]


def test_no_repetition_is_one_line(cli):
    result = cli("outline", "model.py:small")
    assert (result.code, result.out, result.err) == (0, "small: 2 equations, no repetition\n", "")


def test_the_bodies_of_an_outlined_file_are_reported(cli):
    first = json.loads(cli("outline", LOSS, "--equations", "8", "--json").out)["programs"]
    assert cli("opt", LOSS, "-p", "outline(equations=8)", "-o", "outlined.jaxpr").code == 0
    assert json.loads(cli("outline", "outlined.jaxpr", "--json").out)["programs"] == first


def test_opt_reports_what_outline_found(cli):
    said = cli("opt", LOSS, "-p", "outline(equations=8)").lines
    assert len(said) == 2
    pattern = r"note: outline: loss has layer 3 times: (\d+) of (\d+) equations to compile"
    compiled, equations = map(int, re.fullmatch(pattern, said[0]).groups())
    document = json.loads(cli("outline", LOSS, "--equations", "8", "--json").out)
    (program,) = document["programs"]
    assert (program["compiled"], program["equations"]) == (compiled, equations)
    memory = program["memory"]["outlined"]
    assert said[1].startswith(f"note: outline: temporary memory is about {memory:,} bytes, ")
    assert cli("opt", "model.py:small", "-O3").lines == [
        "note: outline: small has nothing to outline"
    ]


def test_opt_warns_about_memory(cli):
    passes = "value_and_grad(argnums=1), outline(equations=8)"
    said = cli("opt", "model.py:waves", "-p", passes, "--args", "f32[12], f32[512,512]").lines
    pattern = (
        r"warning: outline: temporary memory is about .* MiB, \d\.\d times .* \(a large increase\)"
    )
    assert re.fullmatch(pattern, said[1])


def test_the_json_document(cli):
    document = json.loads(cli("outline", LOSS, "--equations", "8", "--json").out)
    assert list(document) == ["schema", "programs", "ways", "unrolled"]
    (program,) = document["programs"]
    (layer,) = program["bodies"]
    assert layer["name"] == "layer" and layer["copies"] == 3 and layer["bodies"] == []
    assert (layer["lines"]["place"]["line"], layer["lines"]["last_line"]) == (5, 7)
    assert 3 * layer["equations"] + program["rest"] == program["equations"]
    assert program["compiled"] == layer["equations"] + program["rest"] + 3
    assert layer["share"] == 3 * layer["equations"] / program["equations"]


def test_both_programs_are_compiled_and_run(cli):
    result = cli("outline", LOSS, "--equations", "8", "--compile")
    assert result.lines == ["note: ws, x filled with random values (--seed 0)"]
    table = result.out.splitlines()[-11:]
    steps = [
        *("trace", "outline", "lower", "compile", "compile, CPU time", "first call", "later calls"),
        *("temporary memory", "", "arguments", "results"),
    ]
    assert [re.split("  +", line)[0] for line in table] == steps


@pytest.mark.proof
def test_estimates_are_close_to_measurements(cli):
    result = cli("outline", LOSS, "--equations", "8", "--compile", "--json")
    assert result.code == 0
    document = json.loads(result.out)
    (program,) = document["programs"]
    assert list(program["memory"]) == ["as_traced", "outlined"]
    for which, size in program["memory"].items():
        assert size == pytest.approx(document["measured"][which]["memory"]["temporary"], abs=200)


@pytest.mark.proof
def test_measurements_are_in_the_json_document(cli):
    result = cli("outline", LOSS, "--equations", "8", "--compile", "--json", "--seed", "3")
    measured = json.loads(result.out)["measured"]
    assert measured["random"] == ["ws", "x"] and measured["devices"] == [str(jax.devices()[0])]
    assert measured["outline"] > 0 and measured["trace"] > 0
    for each in (measured["as_traced"], measured["outlined"]):
        assert each["compile"] > 0 and each["compile_cpu"] > 0 and each["repeats"] == 10
        assert each["memory"]["arguments"] == 4 * (3 * 4 * 4 + 2 * 4)
        assert each["memory"]["outputs"] == 4


def test_without_repetition_one_program_is_compiled(cli):
    text = cli("outline", "model.py:small", "--compile").out
    assert "no repetition" in text and "as traced" in text and "outlined" not in text
    prints = cli("outline", "model.py:prints", "--compile", "--json")
    assert json.loads(prints.out)["measured"]["outlined"] is None
    assert prints.err.count("the sum is") == 1


def test_programs_are_compiled_anew_despite_the_persistent_cache(cli, folder):
    settings = {
        "jax_compilation_cache_dir": str(folder / "cache"),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": 0,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        assert cli("outline", "model.py:small", "--compile").code == 0
        assert not (folder / "cache").exists() or os.listdir(folder / "cache") == []
        assert cli("run", "model.py:small").code == 0
        assert os.listdir(folder / "cache")
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        jax.experimental.compilation_cache.compilation_cache.reset_cache()


# --- faster compilation ---------------------------------------------------------------------------

RECURRENCE = "model.py:recurrence"


@pytest.mark.proof
def test_an_unrolled_recurrence_is_reported_with_the_passes_that_roll_it(cli):
    out = cli("outline", RECURRENCE, "-p", "grad").out
    assert "no repetition" not in out
    assert re.search(r"^recurrence +19 +5 +\d\d\.\d% +model\.py:19$", out, re.MULTILINE)
    rows = [re.split("  +", line)[0] for line in out.splitlines()]
    assert rows.index("grad") < min(rows.index("roll, grad"), rows.index("grad, roll"))
    pattern = r'-p "(roll, grad|grad, roll)" compiles about \d\.\d times faster, as estimated'
    assert re.fullmatch(pattern, out.splitlines()[-1])


def test_ways_are_in_the_document(cli):
    document = json.loads(cli("outline", RECURRENCE, "--json").out)
    given, *others = document["ways"]
    assert given["pipeline"] == "" and "cpu_seconds" not in given
    assert [way["pipeline"] for way in others] == ["roll"]
    assert others[0]["different"] < given["different"] / 2
    assert others[0]["seconds"] < given["seconds"] / 2
    assert json.loads(cli("outline", "model.py:symbolic", "--json").out)["ways"] == []
    assert json.loads(cli("outline", LOSS, "-p", "vjp", "--json").out)["ways"] == []


@pytest.mark.proof
def test_equal_kernels_are_no_reason_to_outline(cli):
    many = f"[{', '.join(['f32[4,4]'] * 20)}], f32[2,4]"
    out = cli("outline", LOSS, "-p", "grad", "--args", many, "--equations", "8").out
    pattern = (
        r"neither outline nor roll shortens compilation by a fifth, as estimated: \d+ of \d+ "
        r"kernels are different, and XLA compiles equal ones once"
    )
    assert re.search(pattern, " ".join(out.split())), out


def test_a_time_is_not_estimated_where_the_estimate_was_never_compared_with_xla(cli):
    out = cli("outline", "model.py:stepped", "-p", "grad").out
    assert re.search(r"^passes +kernels +different +memory$", out, re.MULTILINE)
    pattern = (
        r'-p "roll, grad" leaves \d+ of \d+ kernels; how long XLA takes is not known for a program '
        r"like this: measure with --compile-profile"
    )
    assert re.search(pattern, " ".join(out.split())), out


def test_a_loop_with_unroll_is_reported_with_the_copies_of_its_body(cli):
    out = " ".join(cli("outline", "model.py:scanned").out.split())
    wanted = (
        "XLA compiles the body of the loop at model.py:46 12 times because of unroll=8: 24 "
        "equations, 2 without unroll what that costs: --compile-profile"
    )
    assert out == f"scanned: 3 equations, no repetition {wanted}"
    (loop,) = json.loads(cli("outline", "model.py:looped", "--json").out)["unrolled"]
    assert (loop["unroll"], loop["copies"]) == (12, 12)
    assert json.loads(cli("outline", LOSS, "--json").out)["unrolled"] == []


def test_a_profile_measures_a_loop_without_unroll(cli):
    out = cli("outline", "model.py:looped", "--compile-profile").out
    pattern = r"without unroll, XLA takes [\d.]+ m?s instead of [\d.]+ m?s"
    assert re.search(pattern, out), out


def test_a_profile_of_compilation_has_stages_passes_and_bodies(cli):
    result = cli("outline", RECURRENCE, "-p", "grad", "--compile-profile")
    assert result.code == 0, result.err
    rows = [re.split("  +", line.strip())[0] for line in result.out.splitlines()]
    wanted = "trace", "lower", "XLA", "passes on the whole program", "kernels compiled"
    assert set(wanted) <= set(rows)
    assert re.search(r"^recurrence +\d+ .*\d% +model\.py:19$", result.out, re.MULTILINE)
    assert re.search(r'-p ".*" compiles \d+\.\d times faster, as measured', result.out)


@pytest.mark.proof
def test_a_profile_of_compilation_as_json(cli):
    result = cli("outline", RECURRENCE, "--compile-profile", "--json")
    document = json.loads(result.out)
    profile = document["profile"]
    assert profile["compile"] > 0 and profile["compile_cpu"] > 0 and profile["lower"] > 0
    stages = sum(stage["seconds"] for stage in profile["stages"])
    assert stages == pytest.approx(profile["compile"], rel=0.01)
    (body, *_) = profile["bodies"]
    assert body["name"] == "recurrence"
    assert (body["lines"]["place"]["line"], body["lines"]["last_line"]) == (19, 20)
    assert all(way["cpu_seconds"] > 0 for way in document["ways"])


MISTAKES = {
    "an unknown option": ((LOSS, "--fast"), "no such option: --fast"),
    "one copy": ((LOSS, "--copies", "1"), "'--copies'"),
    "no equations": ((LOSS, "--equations", "0"), "'--equations'"),
    "an unknown mark": ((LOSS, "--mark", "units"), "'--mark'"),
    "a backend for nothing": ((LOSS, "--backend", "cpu"), "--backend needs --compile"),
    "several programs to profile": (
        (LOSS, "-p", "vjp", "--compile-profile"),
        "--compile-profile takes one program, but the passes returned forward, backward",
    ),
    "an unknown backend": ((LOSS, "--compile", "--backend", "abacus"), "abacus"),
    "several programs to compile": (
        (LOSS, "-p", "vjp", "--compile"),
        "--compile takes one program, but the passes returned forward, backward",
    ),
    "a symbolic size to run": (("model.py:symbolic", "--compile"), "n needs a number"),
    "no such file": (("modle.py:loss",), "modle.py"),
    "no such function": (("model.py:lost",), "lost"),
    "an unknown pass": ((LOSS, "-p", "outlin"), "unknown pass 'outlin'"),
}


@pytest.mark.parametrize("arguments, message", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_one_line_errors(cli, arguments, message):
    result = cli("outline", *arguments)
    assert (result.code, result.out) == (2, "")
    assert result.lines[0].startswith("error: ") and message in result.lines[0]
    assert all(line.startswith("hint: ") for line in result.lines[1:])


def test_symbolic_sizes_are_allowed_unless_the_program_runs(cli):
    assert cli("outline", "model.py:symbolic").out == "symbolic: 2 equations, no repetition\n"


def test_the_equations_are_counted_as_in_a_report(cli):
    # `outline` inlines the calls of cumsum, which are equations of the program as traced.
    stats = json.loads(cli("show", LOSS, "--stats", "--json").out)["stats"][0]
    heading, *_ = cli("outline", LOSS, "--equations", "8").out.splitlines()
    inlined = stats["equations"] - 3
    assert heading == f"loss: {stats['equations']} equations, {inlined} with calls inlined"
