"""Source locations: the user's line and the library's behind it, in all outputs."""

import json
import os
import re
import subprocess
import sys

import pytest

import jaxprtool
from jaxprtool import load
from jaxprtool.errors import ArgumentsError
from jaxprtool.ir.source_text import Place
from tests.share import on_one_release

LIBRARY = """\
import jax
import jax.numpy as jnp
import jaxprtool

class Dense:
    def __call__(self, x, w):
        return self.product(x, w)

    def product(self, x, w):
        return x @ w

def weight(key):
    return jaxprtool.variable(jax.random.normal(key, (3, 3)), name="w")

def logged(x):
    return jax.pure_callback(lambda x: x, x, x)

@jax.jit
def wave(x):
    return jnp.sin(x)

def square(x):
    return (x * x).sum()

def fails(x):
    return refuses(x)

def refuses(x):
    raise ValueError("not this")
"""

MODEL = """\
import jax
import jax.numpy as jnp
import jaxprtool
from tinylib.layers import Dense, fails, logged, wave, weight

@jaxprtool.example("f32[2,3]", "f32[3,3]")
def net(x, w):
    hidden = Dense()(x, w)
    return jnp.tanh(hidden) * hidden

@jaxprtool.example("key<fry>[]", "f32[2,3]")
def declares(key, x):
    return x @ weight(key)

@jaxprtool.example("f32[3]")
def calls_back(x):
    return logged(x) * 2

@jaxprtool.example("f32[3]")
def waves(x):
    return wave(wave(x)) + sum(part(x * i) for i in range(3))

def part(x):
    return jnp.exp(wave(x) * 2) + x * x

@jaxprtool.example("f32[3]")
def breaks(x):
    return fails(x)

@jaxprtool.example("f32[2,3]", "f32[3,3]")
def loss(x, w):
    return net(x, w).sum()
"""


@pytest.fixture
def project(folder, monkeypatch):
    """The user's folder with `model.py`, and a site-packages folder with a library."""
    packages = folder / ".venv" / "lib" / "python3" / "site-packages"
    (packages / "tinylib").mkdir(parents=True)
    (packages / "tinylib" / "__init__.py").write_text("")
    (packages / "tinylib" / "layers.py").write_text(LIBRARY)
    (folder / "model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(packages)
    yield packages
    for name in ("model", "tinylib", "tinylib.layers"):
        sys.modules.pop(name, None)


@pytest.fixture
def out(cli, project):
    def run(*arguments):
        result = cli(*arguments)
        assert result.code == 0, result.err
        return result.out

    return run


def comments(text):
    return [line.split("# ")[1] for line in text.splitlines() if "# " in line]


BOTH = "model.py:8 ← tinylib/layers.py:10"


@pytest.mark.parametrize(
    "options, first",
    [
        (["--source"], BOTH),
        (["--source", "--frames", "mine"], BOTH),
        (["--frames", "library"], "tinylib/layers.py:10"),
        (["--frames", "all"], "model.py:8 ← tinylib/layers.py:7 ← tinylib/layers.py:10"),
        (["--source", "--scopes", "-p", "grad(reduce='sum')"], f"{BOTH}, scope: jvp()"),
    ],
)
def test_show_has_the_requested_frames(out, options, first):
    if "-p" in options:
        options = [o if "grad" not in o else "jvp" for o in options]
    shown = comments(out("show", "model.py:net", *options))
    assert shown[0] == first and shown[-1].startswith("model.py:9")


def test_the_tree_the_table_and_a_notebook_have_frames(out):
    tree = out("show", "model.py:waves", "--source", "--format", "tree")
    assert "jit wave (f32[3]) → f32[3]  1 equation  # model.py:21\n" in tree
    assert re.search(r"= sin \w+  # tinylib/layers\.py:20\n", tree)  # of any of its callers
    cell = load("model.py:net")._repr_html_()
    assert (
        "<cite><bdi>model.py:8</bdi><span> ← <bdi>tinylib/layers.py:10</bdi></span></cite>" in cell
    )
    table = out("show", "model.py:net", "--source", "--format", "table")
    assert re.search(r"dot_general .* model\.py:8 ← tinylib/layers\.py:10", table)
    assert re.search(r"tanh .* model\.py:9$", table, re.MULTILINE)


def test_a_page_shows_the_files_of_the_requested_frames(out):
    shown = out("show", "model.py:net", "--format", "html")
    assert re.findall(r'<section aria-label="([^"]*)"', shown) == ["model.py"]
    shown = out("show", "model.py:net", "--format", "html", "--frames", "library")
    files = re.findall(r'<section aria-label="([^"]*)"', shown)
    assert files == ["tinylib/layers.py", "model.py"]
    assert ">tinylib/layers.py:10</a></cite>" in shown


def test_the_users_line_is_highlighted(out, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = out("show", "model.py:net", "--source")
    assert "\x1b[2;39m# \x1b[0mmodel.py:8\x1b[2;39m ← tinylib/layers.py:10\x1b[0m" in shown
    assert "\x1b[2;39m# \x1b[0mmodel.py:9\n" in shown


def test_json_has_both_lines(out, folder):
    document = json.loads(out("show", "model.py:net", "--json"))
    dot, tanh, _ = document["programs"][0]["equations"]
    place, (library,) = dot["place"], dot["place"]["library"]
    assert (place["display"], place["line"], place["function"]) == ("model.py", 8, "net")
    assert place["path"] == str(folder / "model.py")
    assert (library["display"], library["line"]) == ("tinylib/layers.py", 10)
    assert tanh["place"]["line"] == 9 and "library" not in tanh["place"]


def test_a_variable_is_declared_where_the_user_calls_the_library(out):
    shown = out("unzip", "model.py:declares")
    assert "model.py:13 ← tinylib/layers.py:13" in shown.splitlines()[3]
    (variable,) = json.loads(out("unzip", "model.py:declares", "--json"))["variables"]
    assert Place.from_json(variable["place"]) == "model.py:13 ← tinylib/layers.py:13"
    listed = out("unzip", "model.py:declares", "--source")
    assert "# model.py:13 ← tinylib/layers.py:13" in listed


def test_a_residual_has_the_users_line(out):
    document = json.loads(out("opt", "model.py:net", "-p", "linearize", "--json"))
    names = {argument["name"] for argument in document["programs"][1]["arguments"]}
    assert {"residuals['model.py:9 tanh']", "residuals['model.py:8 dot_general']"} <= names


def test_an_error_names_both(cli, project):
    result = cli("opt", "model.py:calls_back", "-o", "out.jaxpr")
    assert result.code == 2
    assert "pure_callback at model.py:17 ← tinylib/layers.py:16" in result.lines[0]


def test_repeated_bodies_have_the_users_line(out):
    shown = out("outline", "model.py:waves", "--equations", "2")
    assert re.search(r"part +3 .* model\.py:21$", shown, re.MULTILINE)
    (repeated,) = json.loads(out("outline", "model.py:waves", "--json"))["programs"]
    assert repeated["small"][0]["lines"]["place"]["display"] == "model.py"


def test_the_equations_of_a_librarys_call_have_both_lines(out):
    inlined = out("opt", "model.py:waves", "-p", "inline", "--source")
    assert re.search(r"= sin a +# model\.py:21 ← tinylib/layers\.py:20\n", inlined)


def test_emitted_python_names_the_users_function(out):
    assert "# net, model.py ← product, layers.py" in out("emit", "model.py:net", "--to", "python")
    silent = out("emit", "model.py:net", "--to", "python", "--no-source")
    assert "tanh" in silent
    assert "model.py" not in silent and "layers.py" not in silent


def test_a_file_has_both_lines_and_they_survive_reading(out, folder, project):
    out("opt", "model.py:net", "-o", "net.jaxpr")
    written = (folder / "net.jaxpr").read_text()
    place = "# model.py:8:14 (net) ← tinylib/layers.py:10:16 (Dense.product)"
    assert place in written and str(folder) not in written
    assert "'tinylib/layers.py': 'site-packages/tinylib/layers.py'" in written
    for options in ("--source",), ("--json",), ("--frames", "library"):
        shown = out("show", "model.py:net", *options).replace(f"{project.parent}/", "")
        assert out("show", "net.jaxpr", *options).replace(f"{project.parent}/", "") == shown
    os.chdir("/")
    out("opt", str(folder / "net.jaxpr"), "-o", str(folder / "again.jaxpr"))
    assert (folder / "again.jaxpr").read_text() == written


@pytest.mark.parametrize(
    "command, written",
    [
        (("opt", "model.py:net", "-o", "to.jaxpr"), "to.jaxpr"),
        (("emit", "model.py:net", "-o", "to.jaxpr"), "to.jaxpr"),
        (("vmap", "model.py:net", "--axis-size", "2", "-o", "to.jaxpr"), "to.jaxpr"),
        (("vmap", "model.py:net", "--axis-size", "2", "-o", "to.py"), "to.py"),
        (("unzip", "model.py:declares", "-o", "to/"), "to/apply.jaxpr"),
    ],
)
def test_no_source_omits_locations_from_files(out, folder, command, written):
    out(*command)
    named = (folder / written).read_text()
    assert "model.py" in named and str(folder) not in named
    out(*command, "--no-source")
    silent = (folder / written).read_text()
    assert ".py" not in silent


@pytest.mark.parametrize(
    "to",
    ["stablehlo --source", "stablehlo --binary", "hlo", "hlo-proto", "hlo-optimized", "exported"],
)
def test_compiler_input_has_no_absolute_path(out, folder, to):
    out("emit", "model.py:net", "--to", *to.split(), "-o", "program.bin")
    written = (folder / "program.bin").read_bytes()
    assert b"model.py" in written and b"tinylib/layers.py" in written
    assert str(folder).encode() not in written


def test_scopes_remain_without_locations(out, folder):
    out("opt", "model.py:net", "-p", "jvp", "-o", "to.jaxpr", "--no-source")
    assert "# in jvp()" in (folder / "to.jaxpr").read_text()


def test_a_format_without_locations_refuses_the_option(cli, project):
    result = cli("emit", "model.py:net", "--to", "dot", "--no-source")
    assert result.code == 2 and "--no-source applies to" in result.lines[0]


def test_opt_lists_locations_on_request(out):
    assert "#" not in out("opt", "model.py:net", "-p", "dce")
    assert comments(out("opt", "model.py:net", "-p", "dce", "--source"))[0] == BOTH
    assert comments(out("opt", "model.py:net", "--frames", "library"))[0] == "tinylib/layers.py:10"


def test_a_target_in_another_folder_or_a_library_counts_as_the_users(out, folder, project):
    (folder / "elsewhere").mkdir()
    os.chdir(folder / "elsewhere")
    assert comments(out("show", "../model.py:net", "--source"))[0] == BOTH
    shown = out("show", "tinylib.layers:wave", "--args", "f32[3]", "--frames", "library")
    assert comments(shown) == ["tinylib/layers.py:20"]


@on_one_release
def test_the_command_line_itself_is_not_a_location(folder, project):
    """Neither is the script that starts a package's command, in the user's folder."""
    (folder / "bin").mkdir()
    script = folder / "bin" / "jaxprtool"
    script.write_text("import sys\nfrom jaxprtool.cli.main import main\nsys.exit(main())\n")
    command = [sys.executable, str(script), "show", "-f", "tree", "jax.numpy:sinc"]
    environment = {**os.environ, "PYTHONPATH": str(project)}
    run = subprocess.run(
        [*command, "--args", "f32[3]", "--frames", "all"], env=environment, capture_output=True
    )
    assert run.returncode == 0, run.stderr
    assert "sin" in run.stdout.decode() and "#" not in run.stdout.decode()


def test_an_error_shows_only_the_innermost_of_a_librarys_frames(cli, project):
    result = cli("show", "model.py:breaks")
    assert result.code == 3
    *_, place, line, library, error = result.lines
    assert re.fullmatch(r"  model\.py:\d+, in breaks", place) and line == "    return fails(x)"
    assert re.fullmatch(r"  ← tinylib/layers\.py:\d+, in refuses", library)
    assert error == "error: breaks raised ValueError: not this"
    assert "in fails" in cli("show", "model.py:breaks", "--traceback").err


# --- packages that are the user's, in whatever counts lines ------------------------------------


@pytest.mark.parametrize("options", [["--mine", "tinylib"], ["--frames", "library"]])
def test_lines_of_the_library_are_counted_on_request(out, options):
    (program,) = json.loads(out("source", "model.py:loss", "--json"))["programs"]
    assert {file["display"] for file in program["files"]} == {"model.py"}
    costs = json.loads(out("cost", "model.py:loss", "--by", "line", "--json", *options))
    assert "tinylib/layers.py:10" in json.dumps(costs)
    (program,) = json.loads(out("source", "model.py:loss", "--json", *options))["programs"]
    assert {file["display"] for file in program["files"]} == {"model.py", "tinylib/layers.py"}
    kept = json.loads(out("residuals", "model.py:loss", "--json", *options))
    places = [Place.from_json(residual["place"]) for residual in kept["residuals"]]
    assert "tinylib/layers.py:10" in places


def test_all_frames_follow_the_users_line(out):
    kept = out("residuals", "model.py:loss", "--frames", "all", "--json")
    places = [Place.from_json(residual["place"]) for residual in json.loads(kept)["residuals"]]
    assert "model.py:8 ← tinylib/layers.py:7 ← tinylib/layers.py:10" in places


def test_with_all_frames_lines_are_distinguished_by_their_callees(out, folder):
    (folder / "twice.py").write_text(
        "from tinylib.layers import Dense, square, wave\n"
        "def f(x, w): return square(Dense()(wave(x), w))\n"
    )
    arguments = "twice.py:f", "--args", "f32[3,3], f32[3,3]"
    called = {
        "tinylib/layers.py:20",  # in the body of a jit
        "tinylib/layers.py:7 ← tinylib/layers.py:10",
        "tinylib/layers.py:23",
    }
    plain = json.loads(out("cost", *arguments, "--json"))["programs"][0]
    assert [group["name"] for group in plain["groups"]] == ["twice.py:2"]
    costs = json.loads(out("cost", *arguments, "--json", "--frames", "all"))["programs"][0]
    assert {Place.from_json(group["place"]).behind for group in costs["groups"]} == called
    assert {group["name"] for group in costs["groups"]} == {"twice.py:2"}
    for work in "flops", "transcendentals":
        assert sum(group[work] for group in costs["groups"]) == plain["total"][work]
    shown = " ".join(out("cost", *arguments, "--frames", "all").split())
    assert "return x @ w" in shown  # the innermost line
    assert "twice.py:2 ← tinylib/layers.py:7 ← tinylib/layers.py:10" in shown
    why = "why", arguments[0], "result", *arguments[1:]
    back = json.loads(out(*why, "--json", "--frames", "all"))["back"]
    assert {Place.from_json(line["place"]).behind for line in back["lines"]} >= called
    assert sum(line["equations"] for line in back["lines"]) == back["equations"]
    assert "← tinylib/layers.py:7 ← tinylib/layers.py:10" in out(*why, "--frames", "all")
    assert "library" not in out(*why, "--json")


def test_names_and_files_do_not_depend_on_the_frames_option(out, folder):
    plain = out("show", "model.py:net", "--names")
    for options in ["--mine", "tinylib"], ["--frames", "library"]:
        shown = out("show", "model.py:net", "--names", "--no-source", *options)
        assert re.sub(" +# .*", "", shown) == plain
        out("opt", "model.py:net", "-o", "net.jaxpr", *options)
        written = (folder / "net.jaxpr").read_text()
        assert "# model.py:8:14 (net) ← tinylib/layers.py:10:16 (Dense.product)" in written
    assert comments(out("show", "net.jaxpr", "--source", "--mine", "tinylib"))[0] == (
        "tinylib/layers.py:10"
    )


def test_source_of_a_library_function_behind_a_wrapper_is_shown(out, folder):
    (folder / "wrapper.py").write_text(
        "from tinylib.layers import Dense\ndef case():\n    return Dense().product, ()\n"
    )
    found = ("source", "wrapper.py:case", "--factory", "--args", "f32[2,3], f32[3,3]")
    (program,) = json.loads(out(*found, "--json"))["programs"]
    assert [file["display"] for file in program["files"]] == ["tinylib/layers.py"]
    assert "no lines are in your own files; these are from tinylib" in out(*found)
    (program,) = json.loads(out(*found, "--measure", "--json"))["programs"]
    times = [line["measured"] for line in program["files"][0]["lines"] if "measured" in line]
    assert times and all(each["place"]["display"] == "tinylib/layers.py" for each in times)


@pytest.mark.parametrize(
    "name, message",
    [
        ("tinylab", "--mine: no package 'tinylab' is installed"),
        ("a b", "'a b' is not the name of a package"),
        ("jax", "the lines of jax cannot be your own: JAX hides its own frames"),
        ("jax.numpy", "the lines of jax.numpy cannot be your own"),
    ],
)
def test_the_mine_option_names_a_package(cli, project, name, message):
    result = cli("cost", "model.py:net", "--mine", name)
    assert result.code == 2 and message in result.lines[0]


def test_a_distribution_name_gets_the_name_of_its_package_as_a_hint(cli, project):
    info = project / "tiny_dist-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-dist\nVersion: 1.0\n")
    (info / "RECORD").write_text("tinylib/__init__.py,,\ntinylib/layers.py,,\n")
    result = cli("cost", "model.py:net", "--mine", "tiny-dist")
    assert result.code == 2 and result.lines[-1] == "hint: write --mine tinylib"


def test_frames_can_be_chosen_for_a_block_in_python(project):
    program = load("model.py:net")

    def lines():
        return {line for file in jaxprtool.source(program).files for line in [file.path]}

    assert lines() == {"model.py"}
    with jaxprtool.frames(mine="tinylib"):
        assert lines() == {"model.py", "tinylib/layers.py"}
        with jaxprtool.frames("library"):
            assert lines() == {"model.py", "tinylib/layers.py"}
    assert lines() == {"model.py"}
    with pytest.raises(ArgumentsError, match="frames must be mine, library or all"):
        jaxprtool.frames("ours").__enter__()
    with pytest.raises(ArgumentsError, match="JAX hides its own frames"):
        jaxprtool.frames(mine="jax").__enter__()


# --- the user's files are an attribute of the program ---------------------------------------------


def lines_told(program):
    shown = [str(jaxprtool.cost(program)), str(jaxprtool.source(program)), str(program)]
    return [*shown, str(jaxprtool.memory(program)), str(jaxprtool.why(program, "result"))]


def test_another_target_does_not_change_the_users_files_of_a_program(project):
    first = load("model.py:loss")
    told = lines_told(first)
    assert "model.py:8" in told[0] and "own=False" not in told[1]
    second = load("tinylib.layers:wave", "f32[3]")
    found = jaxprtool.source(second)
    assert [file.path for file in found.files] == ["tinylib/layers.py"]
    assert not found.package  # these lines are its own, not a library's
    assert lines_told(first) == told


@pytest.mark.parametrize(
    "passes",
    ["dce", "-O3", "grad", "batch(axis_size=2)", "vjp", "jvp", "open_constants", "outline"],
)
def test_results_of_passes_keep_the_users_files(project, passes):
    program = load("tinylib.layers:square", "f32[3]")
    made = program.apply(passes)
    for each in [made] if isinstance(made, jaxprtool.Program) else made.values():
        assert each.roots == program.roots != ()


# --- files of the same name -------------------------------------------------------------------


@pytest.fixture
def alike(folder):
    """A program whose two modules have files of the same name."""
    for package, function in ("encoder", "tanh"), ("decoder", "sin"):
        (folder / package).mkdir()
        (folder / package / "__init__.py").touch()
        (folder / package / "layers.py").write_text(
            "import jax, jaxprtool\nimport jax.numpy as jnp\n"
            f"def layer(x): return jnp.{function}(x * x)\n"
            "def weight(key, x):\n"
            f"    return x * jaxprtool.variable(jax.random.normal(key), name='{package}')\n"
        )
    (folder / "both.py").write_text(
        "from decoder import layers as decoder\nfrom encoder import layers as encoder\n"
        "def f(x): return decoder.layer(encoder.layer(x)).sum()\n"
        "def declares(key, x): return decoder.weight(key, encoder.weight(key, x))\n"
    )
    yield
    for name in ("both", "decoder", "encoder", "decoder.layers", "encoder.layers"):
        sys.modules.pop(name, None)


def test_residuals_of_files_with_the_same_name_are_distinguished(alike):
    names = {*load("both.py:f", "f32[3]").apply("vjp")["forward"].out_names}
    assert "result[1]['encoder/layers.py:3 tanh']" in names
    assert "result[1]['decoder/layers.py:3 cos']" in names


def test_a_narrow_table_distinguishes_files_with_the_same_name(alike, cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    result = cli("unzip", "both.py:declares", "--args", "key<fry>[], f32[3]")
    shown = "".join(result.out.split())
    assert "encoder/layers.py:5" in shown and "decoder/layers.py:5" in shown
