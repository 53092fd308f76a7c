import json

import pytest


def test_only_the_listing_goes_to_stdout(cli):
    result = cli("show", "functions.py:double")
    assert result.code == 0
    assert result.out == ("{ lambda ; a:f32[3]. let b:f32[3] = mul a 2.0:f32[] in (b,) }\n")
    assert result.lines == ["imported", "traced"]


def test_arguments_of_the_option_override_the_example(cli):
    result = cli("show", "functions.py:double", "--args", "bf16[2,2]")
    assert "a:bf16[2,2]" in result.out


def test_a_factory_returns_function_and_arguments(cli):
    assert "a:f32[3]" in cli("show", "functions.py:doubled", "--factory").out


def test_static_arguments_by_position_and_by_name(cli, folder):
    (folder / "static.py").write_text("def f(x, n, flag): return x * n if flag else x\n")
    options = ["--static-argnums", "1", "--static-argnames", "flag"]
    result = cli("show", "static.py:f", "--args", "f32[], 3, flag=True", *options)
    assert "mul a 3.0:f32[]" in result.out, result.err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--format", "tree"], "double (f32[3]) → f32[3]"),
        (["--format", "table"], "mul"),
        (["--source"], "functions.py:10"),
        (["--no-types"], "{ lambda ; a. let"),
        (["--only", "sin,co*"], "1 equation"),
        (["--stats"], "double: 1 equation"),
        (["-p", "dce"], "mul a 2.0"),
    ],
)
def test_each_format_is_shown(cli, options, expected):
    result = cli("show", "functions.py:double", *options)
    assert result.code == 0 and expected in result.out, result


def test_types_have_the_axes_of_the_requested_mesh(cli):
    command = ["show", "jax.numpy:sin", "--args", "f32[8@x]"]
    assert (
        cli(*command, "--mesh", "x=1").out
        == "{ lambda ; a:f32[8@x]. let b:f32[8@x] = sin a in (b,) }\n"
    )
    assert "f32[8@x]" in cli(*command, "--mesh", "x=4,y=2").out  # more than there are devices
    assert cli(*command).lines[-1] == "hint: set one with --mesh x=2, or jax.set_mesh"
    assert "'x' is not a list of axes" in cli(*command, "--mesh", "x").lines[0]


def test_a_program_runs_on_the_mesh_of_its_trace(cli, folder):
    (folder / "mesh.py").write_text(
        "import jax\ndef f(x):\n    return jax.sharding.reshard(x, jax.P('x')) * 2\n"
    )
    result = cli("run", "mesh.py:f", "--args", "ones(f32[2])", "--mesh", "x=1")
    assert result.out.splitlines()[0] == "result: f32[2@x] [2., 2.]"


@pytest.mark.parametrize("spelling", [["--json"], ["--format", "json"]])
def test_json_is_one_document(cli, spelling):
    (program,) = json.loads(cli("show", "functions.py:double", *spelling).out)["programs"]
    assert program["name"] == "double"
    assert [eqn["primitive"] for eqn in program["equations"]] == ["mul"]


def test_stats_as_json(cli):
    (stats,) = json.loads(cli("show", "functions.py:wasteful", "--stats", "--json").out)["stats"]
    assert stats["equations"] == 2
    assert {p["name"] for p in stats["primitives"]} == {"sin", "cos"}


def test_colors_when_forced_and_never_with_no_color(cli, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[" in cli("show", "functions.py:double").out
    assert "\x1b[" in cli("show", "functions.py:none").err
    monkeypatch.setenv("NO_COLOR", "1")
    for options in ([], ["--format", "tree"], ["--format", "table"], ["--stats"]):
        assert "\x1b[" not in cli("show", "functions.py:double", *options).out
    assert "\x1b[" not in cli("show", "functions.py:none").err


def test_an_untested_jax_is_one_warning(cli, monkeypatch):
    monkeypatch.setattr("jaxprtool.jaxcompat.untested_version", lambda: "9.9.9")
    result = cli("show", "functions.py:double")
    assert result.code == 0
    assert result.lines[0] == "warning: jaxprtool has not been tested with JAX 9.9.9"


def test_only_reports_what_it_does_not_find(cli):
    result = cli("show", "functions.py:wasteful", "--only", "sinn,co*,xyz,mul")
    assert result.code == 0 and "cos" in result.out
    assert [line for line in result.lines if line.startswith("warning")] == [
        "warning: --only: no equation has the primitive 'sinn'; did you mean 'sin'?",
        "warning: --only: no equation has the primitive 'xyz'; the program has cos, sin",
        "warning: --only: no equation has the primitive 'mul'; the program has cos, sin",
    ]


def test_a_page_is_written_to_the_given_place(cli, folder):
    assert cli("show", "functions.py:double", "-o", "double.html").out == ""
    written = (folder / "double.html").read_text()
    assert written.startswith("<!doctype html>") and "functions.py:10" in written
    assert cli("show", "functions.py:double", "--format", "html").out == written
    assert cli("show", "functions.py:double", "-f", "html", "-o", "-").out == written
    plain = cli("show", "functions.py:double", "-f", "html", "--no-source").out
    assert "functions.py" not in plain and str(folder) not in written


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-o", "x.py"), "show writes .html files, but -o names 'x.py'"),
        (("-o", "x.txt"), "show writes .html files, but -o names 'x.txt'"),
        (("-o", "x"), "-o writes an HTML page, but --format is text"),
        (("-o", "x.html", "--format", "tree"), "-o writes an HTML page, but --format is tree"),
        (("-o", "x.html", "--stats"), "--stats and --format html cannot be combined"),
        (("--format", "html", "--json"), "--json and --format html cannot be combined"),
        (("-o", "no/such/folder.html"), "cannot write 'no/such/folder.html': No such file"),
    ],
)
def test_an_unwritable_page_is_refused(cli, folder, options, message):
    result = cli("show", "functions.py:double", *options)
    assert result.code == 2 and message in result.err and not result.result
    assert not list(folder.glob("*.html"))


def test_a_command_without_pages_refuses_to_write_one(cli):
    result = cli("vmap", "functions.py:double", "--axis-size", "2", "-o", "x.html")
    assert result.code == 2 and "hint: `jaxprtool show TARGET -o x.html`" in result.err
    result = cli("emit", "functions.py:double", "-o", "x.html")
    assert result.code == 2 and "hint: use `jaxprtool show TARGET -o x.html`" in result.err


def test_a_narrow_table_has_parameters_below_its_equations(cli):
    arguments = ("show", "jax.numpy:dot", "--args", "f32[8,128],f32[128,8]", "--format", "table")
    heading, _, *lines = cli(*arguments).out.splitlines()
    assert heading.split() == ["#", "outputs", "primitive", "inputs"]
    assert lines[0].split() == ["0", "c:f32[8,8]", "dot_general", "a", "b"]
    assert lines[1].strip().startswith("dimension_numbers=(([1], [0]), ([], []))")


@pytest.fixture
def wide(folder):
    """Return a function of many arguments and results."""
    (folder / "wide.py").write_text(
        "import jax, jaxprtool\n"
        "PARAMS = {f'w{i}': f'f32[{i + 1},256]' for i in range(30)}\n"
        "@jaxprtool.example(PARAMS)\n"
        "def wide(params):\n"
        "    return jax.jit(lambda params: jax.tree.map(lambda w: w * 2, params))(params)\n"
    )
    return "wide.py:wide"


def test_large_signatures_are_folded_on_a_terminal(terminal, cli, wide):
    shown = terminal("show", wide, "--source").splitlines()
    assert "{ lambda ; 30 arguments, 465.0 KiB. let" in shown
    assert any(line.endswith(" more) }") for line in shown)
    table = shown[shown.index("the largest arguments") + 1 :]
    assert table[0].split()[1:] == ["params['w29']", "f32[30,256]", "30.0", "KiB"]
    assert len(table) == 9 and table[-1] == "… 22 more; --full shows them"
    full = terminal("show", wide, "--source", "--full")
    assert "arguments" not in full and full.count("more") == 0 and full.count(":f32[30,256]") > 1
    piped = cli("show", wide).out
    assert "30 arguments" not in piped and " more" not in piped


def test_the_tree_and_the_table_fold_them_too(terminal, wide):
    tree = terminal("show", wide, "--format", "tree").splitlines()
    assert tree[0] == "wide (30 arguments, 465.0 KiB) → 30 results, 465.0 KiB  31 equations"
    table = terminal("show", wide, "--format", "table", "--depth", "0")
    assert table.count("… 26 more") == 2
    assert "more" not in terminal("show", wide, "--format", "table", "--full")


@pytest.mark.parametrize("format", ["text", "tree", "table", "json", "html"])
def test_weak_types_are_marked_on_request(cli, format):
    arguments = ("show", "jax.nn:relu", "--args", "2.0", "--format", format)
    found = cli(*arguments, "--weak")
    assert "~f32[]" in found.out and "~ marks a weak type, as of a Python number" in found.err
    assert "~f32[]" not in cli(*arguments).out
    assert "~f32" not in cli("show", "jax.nn:relu", "--args", "f32[3]", "--weak").out


STACK = """
import jaxprtool

@jaxprtool.example([{"w": "f32[4,4]", "b": "f32[4]"}] * 15, "f32[4]")
def stack(layers, x):
    for layer in layers:
        x = x @ layer["w"] + layer["b"]
    return x
"""


def test_arguments_of_equal_layers_share_a_row_of_the_statistics(cli, folder):
    (folder / "stack.py").write_text(STACK)
    out = cli("show", "stack.py:stack", "--stats").out
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert "layers[0..14]['w'] 15 x f32[4,4] 960" in rows
    assert "layers[0..14]['b'] 15 x f32[4] 240" in rows
    whole = cli("show", "stack.py:stack", "--stats", "--all").out
    assert "layers[14]['w']" in whole and "15 x" not in whole
