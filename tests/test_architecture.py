"""The house keeps its order: imports run downwards, and jax._src is behind one door."""

import ast
import subprocess
import sys
from pathlib import Path

import networkx

import jaxprtool

PACKAGE = Path(jaxprtool.__file__).parent

#: A room may import from its own floor only within itself, and from every floor below.
FLOORS = [
    {"__main__"},
    {"cli"},
    {"api", "compiling", "mapping", "staging"},
    {"targets"},
    {"loading", "passes", "analysis", "render", "formats", "execute"},
    {"primitives"},
    {"ir"},
    {"jaxcompat"},
    {"expressions", "files"},
    {"errors", "__init__"},
]
LEVEL = {room: i for i, floor in enumerate(FLOORS) for room in floor}


def imports(path):
    """The modules that a file imports, those under TYPE_CHECKING left out."""
    tree = ast.parse(path.read_text())
    typing_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_every_file_stands_on_a_floor():
    assert {room(p) for p in PACKAGE.rglob("*.py")} <= set(LEVEL)


def test_imports_run_downwards():
    upward = []
    for path in PACKAGE.rglob("*.py"):
        here = room(path)
        for name in imports(path):
            parts = name.split(".")
            if parts[0] != "jaxprtool":
                continue
            there = parts[1] if len(parts) > 1 and parts[1] in LEVEL else "__init__"
            if there != here and LEVEL[there] <= LEVEL[here]:
                upward.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert upward == []


def test_no_file_imports_itself_by_way_of_others():
    modules = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        modules[".".join(parts).removesuffix(".__init__")] = path
    graph = networkx.DiGraph()
    for module, path in modules.items():
        for name in imports(path):
            found = name if name in modules else name.rpartition(".")[0]
            if found in modules and found != module:
                graph.add_edge(module, found)
    assert len(graph) > 200 and list(networkx.simple_cycles(graph)) == []


def test_only_jaxcompat_imports_jax_src():
    root = PACKAGE.parent
    files = [
        path
        for folder in ("jaxprtool", "tests", "samples", "plugins")
        for path in (root / folder).rglob("*.py")
    ]
    guilty = [str(p) for p in files if any(n.startswith("jax._src") for n in imports(p))]
    assert guilty and all(PACKAGE / "jaxcompat" in Path(path).parents for path in guilty)


def test_importing_jaxprtool_does_not_import_jax():
    code = "import sys; from jaxprtool import Pass, Pipeline, example, register, static; "
    code += "sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_every_public_name_is_there():
    for name in jaxprtool.__all__:
        assert getattr(jaxprtool, name) is not None
