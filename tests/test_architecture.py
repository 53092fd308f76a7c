"""Layering of the package: imports go downward, and only jaxcompat imports jax._src."""

import ast
import functools
import gc
import importlib
import re
import statistics
import subprocess
import sys
from collections import Counter
from importlib.metadata import entry_points
from pathlib import Path

import networkx
import pytest

import jaxprtool
from jaxprtool import jaxcompat
from jaxprtool import passes as framework
from jaxprtool.ir.rules import _KNOWN
from jaxprtool.ir.traits import primitives_with
from tests.external import needs
from tests.share import on_one_release

PACKAGE = Path(jaxprtool.__file__).parent

#: A package may import from itself, and from packages of lower layers. The parts of a package that
#: are named here stand above it: they are built on what the layers between have.
FLOORS = [
    {"__main__"},
    {"commands/check"},
    {"testing"},
    {"extend/commands"},
    {"commands"},
    {"cli"},
    {"api"},
    {"sizes"},
    {"extend", "recording"},
    {"loading", "passes", "analysis", "render", "formats", "execute"},
    {"primitives"},
    {"ir"},
    {"jaxcompat"},
    {"processes"},
    {"files", "registry"},
    {"errors", "__init__"},
]
LEVEL = {room: i for i, floor in enumerate(FLOORS) for room in floor}


@functools.cache
def parsed(path):
    """Return the nodes of a file's syntax tree, from the root."""
    return list(ast.walk(ast.parse(path.read_text())))


@pytest.fixture(scope="module", autouse=True)
def trees():
    """Keep the syntax trees, a million objects, away from garbage collections."""
    gc.disable()
    yield
    parsed.cache_clear()
    gc.enable()


#: The groups of entry points that have the name of a module.
GROUPS = {"jaxprtool.commands", "jaxprtool.passes", "jaxprtool.primitives"}


@functools.cache
def modules():
    """Return the file of each module of the package, by its dotted name."""
    paths = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        paths[".".join(parts).removesuffix(".__init__")] = path
    return paths


@functools.cache
def imports(path):
    """Return the modules that a file imports, except those under TYPE_CHECKING.

    A string that names a module, begins the name of one, or is "module:name", is imported by name.
    The module of the package itself is a table of such names, for everyone.
    """
    nodes = parsed(path)
    typing_only = {
        inner
        for node in nodes
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found = []
    for node in nodes:
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.removesuffix(".")
            name = name.partition(":")[0] if re.fullmatch(r"[\w.]+:\w+", name) else name
            if name.startswith("jaxprtool.") and name in modules().keys() - GROUPS:
                found.append(name)
    return found


#: The page that declares all commands: it names the module of each, of all chapters.
DECLARATIONS = PACKAGE / "commands" / "__init__.py"


def room_of(name):
    """Return the layer's entry for a module: its package, or a part of one that has a layer."""
    parts = name.split(".")[1:] or ["__init__"]
    part = "/".join(parts[:2])
    return part if part in LEVEL else parts[0]


def room(path):
    return room_of(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))


def test_every_file_belongs_to_a_layer():
    assert {room(p) for p in PACKAGE.rglob("*.py")} <= set(LEVEL)


@pytest.mark.parametrize("part", sorted(path.name for path in PACKAGE.iterdir()))
def test_imports_go_downward(part):
    upward = []
    for path in modules().values():
        here = room(path)
        if path.relative_to(PACKAGE).parts[0] != part or path == DECLARATIONS:
            continue
        for name in imports(path):
            parts = name.split(".")
            if parts[0] != "jaxprtool" or here == "__init__":
                continue
            there = room_of(name) if room_of(name) in LEVEL else "__init__"
            if there != here and LEVEL[there] <= LEVEL[here]:
                upward.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert upward == []


#: The layers of the modules in a package. Modules of the same layer do not import each other.
INNER_FLOORS = {
    "ir": "differences|body_matching repetition"
    "|conversions donation equivalence meshes specialization|substitution|program|ragged"
    "|arguments expansions symbols|custom_rules notation|dataflow rewrite|kernel_calls"
    "|array_files equations evaluation hlo"
    "|regions scopes traits|frames keys rules|source_text"
    "|backends documents dtypes process trees",
    "passes": "loops patterns precision reduction unzip|transforms|mapping|cleanup|retrace",
    "render": "page|reports|terminal|documents views",
    "execute": "profile stepping|calls running",
    "analysis": "grids kernels points|devices stats",
    "api": "program|jit targets vmap",
    "commands": "backends outline precision report upgrade vmap|opt reduce unzip|check explain show"
    "|record|lint source|why|run|determinism|diff|bench kernels profile residuals|compare cost"
    "|browse emit memory nans serve shapecheck shardings skill watch",
    "cli": "main|app|session|launch|options|completion pipeline_steps|output",
}


@pytest.mark.parametrize("here", INNER_FLOORS)
def test_imports_inside_a_package_go_downward(here):
    floors = [floor.split() for floor in INNER_FLOORS[here].split("|")]
    level = {name: i for i, floor in enumerate(floors) for name in floor}
    level["__init__"] = len(floors)  # what the room itself has is for all of its modules
    found, upward = set(), []
    for path in {*(PACKAGE / here).rglob("*.py")} - {DECLARATIONS}:
        own = path.relative_to(PACKAGE / here).parts[0].removesuffix(".py")
        found.add(own)
        for name in imports(path):
            parts = name.split(".")
            inside = parts[:2] == ["jaxprtool", here]
            there = parts[2] if parts[2:] and parts[2] in level else "__init__"
            if inside and own != there and level[there] <= level[own]:
                upward.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert found | {"__init__"} == level.keys() and upward == []


#: The layers in a chapter of `commands`; all other files are computations, which stand below.
CHAPTER = {
    **dict.fromkeys(("command", "config", "notebook", "record", "steps"), 2),
    **dict.fromkeys(("page", "table"), 1),
}


def test_a_computation_imports_no_table_and_a_table_no_command():
    upward = []
    for path in (PACKAGE / "commands").glob("*/**/*.py"):
        chapter = path.relative_to(PACKAGE / "commands").parts[0]
        level = CHAPTER.get(path.stem, 0)
        for name in imports(path):
            parts = name.split(".")
            inside = parts[:3] == ["jaxprtool", "commands", chapter]
            if inside and CHAPTER.get("".join(parts[3:4]), 0) > level:
                upward.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert upward == []


def test_types_are_imported_from_lower_layers_too():
    upward = []
    for path in PACKAGE.rglob("*.py"):
        here = room(path)
        for name in re.findall(r"^ +from (jaxprtool\.\w[\w.]*)", path.read_text(), re.MULTILINE):
            there = room_of(name)
            if here != "__init__" and there in LEVEL and LEVEL[there] < LEVEL[here]:
                upward.append(f"{path.relative_to(PACKAGE)}: {name}")
    assert upward == []


def test_only_the_browser_imports_textual():
    users = {
        (room(path), name.split(".")[0])
        for path in PACKAGE.rglob("*.py")
        for name in imports(path)
        if name.split(".")[0] == "textual"
    }
    assert users == {("commands", "textual")}
    # The command imports it only when it runs.
    top = ast.parse((PACKAGE / "commands" / "browse" / "command.py").read_text()).body
    modules = [node.module for node in top if isinstance(node, ast.ImportFrom)]
    assert modules and not any("browse." in module for module in modules)


def test_nothing_that_reads_files_of_users_unpickles():
    users = {room(path) for path in PACKAGE.rglob("*.py") if "pickle" in imports(path)}
    assert users and not users & {"formats", "ir", "loading", "passes", "recording", "testing"}


@on_one_release
def test_a_program_has_its_methods_wherever_it_comes_from(tmp_path):
    path = tmp_path / "cat.jaxpr"
    jaxprtool.write(jaxprtool.trace(lambda x: x + 1, 1.0), path)
    code = f"import jaxprtool; jaxprtool.read({str(path)!r}).apply('dce')"
    subprocess.run([sys.executable, "-c", code], check=True)
    code = "import jaxprtool; program = jaxprtool.trace(lambda x: x + 1, 1.0);"
    code += "assert 'add' in str(program) and '1' in repr(program) and program._repr_html_();"
    code += "assert 'jaxprtool.api.program' not in __import__('sys').modules;"
    subprocess.run([sys.executable, "-c", code + "program.apply('dce')"], check=True)


def test_there_are_no_circular_imports():
    graph = networkx.DiGraph()
    for module, path in modules().items():
        for name in imports(path) if module != "jaxprtool" else ():
            found = name if name in modules() else name.rpartition(".")[0]
            if found in modules() and found != module:
                graph.add_edge(module, found)
    assert len(graph) > 200 and list(networkx.simple_cycles(graph)) == []


#: Files with lists of primitive names, and their purpose.
NAME_LISTS = {
    "commands/cost/modules.py": "XLA's instructions",
    "commands/shardings/reasons.py": "primitives that state a sharding, and operations of XLA",
    "commands/shardings/partitions.py": "operations of XLA",
    "ir/rules.py": "whose primitives they are, for the hint to install it",
    "ir/traits.py": "the table",
    "ir/hlo/buffers.py": "XLA's instructions, which are not primitives",
    "ir/hlo/module.py": "XLA's instructions",
    "ir/hlo/origins.py": "XLA's instructions, and primitives that are copies in it",
    "jaxcompat/checking.py": "what rules of JAX's own look at; stands below the table",
    "formats/jaxpr/params.py": "parameters of primitives, by name",
    "formats/python/rules_of_arrays.py": "a rule for each operator, registered in a loop",
    "passes/cleanup/inline.py": "an option: the kinds of calls, which have names of primitives",
    "passes/patterns/definition.py": "the same option",
    "passes/cleanup/simplify/engine.py": "words of the language of patterns",
    "passes/cleanup/simplify/__init__.py": "rules, as text",
}


def name_lists(path, primitives):
    """Return the lines of a file with a list, or a text of words, that names primitives.

    Dicts by primitive are rules, as are the arguments of a decorator that registers several.
    """
    nodes = parsed(path)
    decorators = {
        inner
        for node in nodes
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
        for inner in ast.walk(decorator)
    }
    for node in nodes:
        words, share = [], 0.5
        if isinstance(node, ast.Set | ast.List | ast.Tuple) and node not in decorators:
            words = [e.value for e in node.elts if isinstance(e, ast.Constant)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words, share = node.value.split(), 0.9  # more than prose has
        named = [word for word in words if word in primitives]
        if len(named) >= 2 and len(named) >= share * len(words):
            yield node.lineno


def test_properties_of_primitives_are_in_one_table():
    # Names only: a pass may test whether an equation has a particular primitive.
    importlib.import_module("jax.experimental.pallas.tpu")  # registers its own primitives
    known = primitives_with(lambda found: True)
    primitives = {*jaxcompat.registered_primitives(), *known, *sum(_KNOWN.values(), ())}
    lists = {}
    for path in PACKAGE.rglob("*.py"):
        if found := list(name_lists(path, primitives)):
            lists[str(path.relative_to(PACKAGE))] = found
    assert lists.keys() == NAME_LISTS.keys(), lists


def test_only_jaxcompat_imports_jax_src():
    root = PACKAGE.parent
    files = [
        path
        for folder in ("jaxprtool", "tests", "samples", "plugins")
        for path in (root / folder).rglob("*.py")
    ]
    named = [path for path in files if re.search(r"\b_src\b", path.read_text())]
    guilty = [str(p) for p in named if any(n.startswith("jax._src") for n in imports(p))]
    assert guilty and all(PACKAGE / "jaxcompat" in Path(path).parents for path in guilty)


#: Packages of the distribution that only use the public API, as plug-ins do.
ON_THE_DOOR = ("commands/browse", "sizes")

#: The modules that a command of a plug-in uses: they are public, as `jaxprtool.extend` says.
FOR_COMMANDS = {"registry", "cli.session", "cli.options", "cli.output"}

#: Packages that should use only the public API, but import the engine of their rules.
NOT_YET = ("passes/mapping/batch", "passes/mapping/mask", "passes/mapping/ragged")


def deep_imports(folder, own=()):
    """Return the non-public imports of jaxprtool's modules in a folder, each as `file:line name`.

    The names of `jaxprtool`, `jaxprtool.errors`, `jaxprtool.extend` and its contents, and of the
    modules for commands are public, and so are the entry modules of packages that only use these.
    `own` is the path of the package.
    """
    for path in sorted(folder.rglob("*.py")):
        for node in parsed(path):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Constant) and re.fullmatch(
                r"jaxprtool(\.\w+)+", str(node.value)
            ):
                names = [node.value]  # of a module that is imported by name
            else:
                continue
            for name in names:
                root, *parts = name.split(".")
                if root == "jaxprtool" and not is_public(parts, own):
                    yield f"{path.relative_to(folder.parent)}:{node.lineno} imports {name}"


def is_public(parts, own=()):
    if parts[:1] in (["extend"], ["errors"], []) or tuple(parts[: len(own)]) == own != ():
        return True
    if any(f"{'.'.join(parts)}.".startswith(f"{module}.") for module in FOR_COMMANDS):
        return True
    return len(parts) == 1 and parts[0] in (*jaxprtool.__all__, *ON_THE_DOOR)


def test_plugins_use_only_the_public_api():
    packages = list((PACKAGE.parent / "plugins").glob("*/jaxprtool_*"))
    assert packages and [deep for package in packages for deep in deep_imports(package)] == []


def test_plugins_import_nothing_by_its_place_in_the_repository():
    # Installed, a plug-in stands beside jaxprtool, and there are no such packages.
    folders = {"docs", "plugins", "samples", "tests"}
    files = list((PACKAGE.parent / "plugins").glob("*/jaxprtool_*/**/*.py"))
    named = [name for path in files for name in imports(path) if name.split(".")[0] in folders]
    assert files and named == []


@pytest.mark.parametrize("package", ON_THE_DOOR)
def test_our_packages_use_only_the_public_api(package):
    assert (PACKAGE / package).is_dir()
    assert list(deep_imports(PACKAGE / package, own=tuple(package.split("/")))) == []


@pytest.mark.parametrize("package", NOT_YET)
def test_packages_that_use_only_the_public_api_are_listed(package):
    assert any(deep_imports(PACKAGE / package, own=tuple(package.split("/"))))


def test_a_non_public_import_is_detected(tmp_path):
    folder = tmp_path / "package"
    folder.mkdir()
    lines = [
        "from jaxprtool import trace, jaxcompat",
        "from jaxprtool.extend import rule, rules",
        "import jaxprtool.ir.program",
        "from jaxprtool.package.own import thing",
        "def late():",
        "    from jaxprtool.passes.cleanup import dce",
        "    return import_module('jaxprtool.api.jit')",
    ]
    (folder / "module.py").write_text("\n".join(lines))
    assert [text.partition(":")[2] for text in deep_imports(folder, own=("package",))] == [
        "1 imports jaxprtool.jaxcompat",
        "3 imports jaxprtool.ir.program",
        "6 imports jaxprtool.passes.cleanup.dce",
        "7 imports jaxprtool.api.jit",
    ]


def test_importing_jaxprtool_does_not_import_jax():
    code = "import sys; from jaxprtool import Pass, Pipeline, example, register, static; "
    code += "sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


TOP = {
    *(".ci", ".github", ".gitignore", ".pre-commit-config.yaml", "CHANGELOG.md", "CONTRIBUTING.md"),
    *("LICENSE", "README.md", "action.yml", "docs", "jaxprtool", "noxfile.py", "plugins"),
    *("pyproject.toml", "samples", "tests"),
}


@needs("git")
def test_the_root_of_the_repository_has_no_other_files():
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no git checkout")
    assert {path.partition("/")[0] for path in listed.stdout.splitlines()} <= TOP


def test_every_public_name_exists():
    for name in jaxprtool.__all__:
        assert getattr(jaxprtool, name) is not None


#: Names of several classes, or of several public functions, and why. The list may only shrink.
SHARED_NAMES = {
    # Two public results, or documents of --json, have these names.
    "Cause": "of a gradient that stops; of runs that begin to differ",
    "Finding": "of lint; of a check of values",
    "Line": "of a cost; of a diff",
    "Operand": "of the equation that makes a NaN; of an equation in a document",
    "Program": "the program; its document",
    "Reader": "of a residual; of the names and texts of a program",
    "Reason": "of a compilation; of a collective",
    "Repetition": "of a run; of bodies",
    "Variable": "that is sown; its document",
    # Two modules of the public API have these names, for the same thing of two kinds.
    "call": "an equation; a Python expression",
    "rewrite": "a jaxpr by rules of equations; a program by a pattern",
    "rule": "the decorator of rules; the same for the tables of `extend`",
    "write": "a program to a file; an equation to a body",
    # By design the same in all rooms that have it.
    "heading": "the first line of a report",
    "main": "the entry point of a process",
}


def is_overload(node):
    return any(ast.unparse(d).split(".")[-1] == "overload" for d in node.decorator_list)


def definitions(path):
    """Yield the classes and public functions of a file, without the underscore of a class."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            yield node.name.lstrip("_")
        elif isinstance(node, ast.FunctionDef) and not (node.name[0] == "_" or is_overload(node)):
            yield node.name


def test_a_name_means_one_thing():
    count = Counter(name for path in modules().values() for name in definitions(path))
    assert {name for name, times in count.items() if times > 1} == SHARED_NAMES.keys()


def test_files_are_chapters():
    lines = [path.read_text().count("\n") for path in modules().values()]
    assert max(lines) <= 1200 and statistics.median(lines) >= 250
    imported = sum(
        node.end_lineno - node.lineno + 1
        for path in modules().values()
        for node in parsed(path)
        if isinstance(node, ast.Import | ast.ImportFrom)
    )
    assert imported <= 0.06 * sum(lines)


#: Modules of commands that import a pass, because the command runs that pass or shows its rules.
OF_A_PASS = {
    "explain": {"simplify"},
    "outline": {"outline"},
    "unzip": {"unzip"},
    "vmap": {"batch"},
}

#: Strings in modules of commands that are also names of passes, and their meaning there.
OTHER_MEANINGS = {
    "explain": {"fold": "how Rich breaks lines"},
    "output": {"fold": "how Rich breaks lines"},
    "why": {"forward": "a way"},
}


def test_commands_know_no_pass_by_name():
    # A pass reports its work itself (`Pass.notes`), like a plug-in's pass.
    points = entry_points(group=framework.GROUP)
    ours = {p.name: p.value for p in points if p.value.startswith("jaxprtool.")}
    modules = {".".join(v.partition(":")[0].split(".")[:4]) for v in ours.values()}
    found, imported = {}, {}
    chapters = PACKAGE / "commands"
    for path in [
        *(PACKAGE / "cli").glob("*.py"),
        *chapters.glob("*/command.py"),
        *chapters.glob("*.py"),
    ]:
        name = path.parent.name if path.stem == "command" else path.stem
        texts = {node.value for node in parsed(path) if type(node) is ast.Constant}
        if named := texts & ours.keys():
            found[name] = named
        names = list(imports(path))
        if known := {m for m in modules if any(f"{name}.".startswith(f"{m}.") for name in names)}:
            imported[name] = {module.rpartition(".")[2] for module in known}
    assert found == {name: texts.keys() for name, texts in OTHER_MEANINGS.items()}
    assert imported == OF_A_PASS


#: The most lines of our modules that a command imports. A budget may only shrink.
BUDGETS = {
    "backends": 12_000,
    "show samples/layers.py:loss": 29_300,
    "cost samples/layers.py:loss": 31_200,
    "nans samples/layers.py:loss": 30_600,
}

#: Runs a command, and prints the lines of the modules that are then imported.
COUNTS = """
import contextlib, io, sys
from pathlib import Path
from jaxprtool.cli.main import main

with contextlib.redirect_stdout(io.StringIO()):
    main(sys.argv[1].split(" "))
files = [m.__file__ for name, m in sys.modules.items() if name.partition(".")[0] == "jaxprtool"]
print(sum(Path(file).read_text().count("\\n") for file in files if file))
"""


@on_one_release
@pytest.mark.parametrize("command", BUDGETS)
def test_a_command_imports_no_more_than_its_budget(command):
    run = [sys.executable, "-c", COUNTS, command]
    ended = subprocess.run(run, cwd=PACKAGE.parent, capture_output=True, text=True, check=True)
    assert int(ended.stdout) <= BUDGETS[command]
