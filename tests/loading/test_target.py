"""A TARGET finds the object that a user would import, or is a one-line error."""

import os
import pickle
import sys

import pytest

from jaxprtool.errors import TargetError, UserFunctionError, user_traceback
from jaxprtool.loading.target import resolve

FUNCTION = "def f(x):\n    return x\n"


def fault(target, kind=TargetError):
    with pytest.raises(kind) as caught:
        resolve(target)
    assert "\n" not in caught.value.message
    assert caught.value.exit_code == (2 if kind is TargetError else 3)
    return f"{caught.value.message} | {caught.value.hint}"


# --- --- found ------------------------------------------------------------------------------------


def test_a_module_of_the_current_folder(project):
    project("models_here.py", FUNCTION)
    project("mypkg_here/__init__.py")
    project("mypkg_here/model.py", "class Net:\n    @staticmethod\n    def apply(x): return x\n")
    assert resolve("models_here:f").value(3) == 3
    found = resolve("mypkg_here.model:Net.apply")
    assert (found.value(3), found.name) == (3, "Net.apply")
    assert found.module is sys.modules["mypkg_here.model"]


def test_an_installed_module(project):
    assert resolve("jax.numpy:sin").module.__name__ == "jax.numpy"


def test_a_lone_file_with_its_neighbors(project):
    project("code/neighbour_of_f.py", "def f(x): return x + 1\n")
    path = project("code/lone_file.py", "import neighbour_of_f\nf = neighbour_of_f.f\n")
    assert resolve("code/lone_file.py:f").value(1) == 2
    assert resolve(f"{path}:f").value is resolve("code/lone_file.py:f").value
    assert resolve("./code/../code/lone_file.py:f").value(1) == 2


def test_a_file_in_a_package_with_relative_imports(project):
    project("src/rel_pkg/__init__.py")
    project("src/rel_pkg/sub/__init__.py", "from .model import f\n")
    project("src/rel_pkg/util.py", "def g(x): return x * 2\n")
    project("src/rel_pkg/sub/model.py", "from ..util import g\ndef f(x): return g(x)\n")
    found = resolve("src/rel_pkg/sub/model.py:f")
    assert found.module.__name__ == "rel_pkg.sub.model"
    assert found.value(3) == 6
    assert resolve("src/rel_pkg/sub/__init__.py:f").value is found.value


@pytest.mark.parametrize("name", ["json.py", "jax.py", "pytest.py", "numbers.py", "os.py"])
def test_a_file_with_the_name_of_an_installed_module(project, name):
    stem = name.removesuffix(".py")
    project(f"code/{name}", f"import jax, json\n{FUNCTION}there = jax.__version__, json.dumps\n")
    before = sys.modules.get(stem)
    found = resolve(f"code/{name}:f")
    assert found.value(3) == 3
    assert sys.modules.get(stem) is before
    assert sys.modules[found.module.__name__] is found.module


def test_two_files_of_one_name(project):
    project("a/twin_file.py", "def f(x): return 1\n")
    project("b/twin_file.py", "def f(x): return 2\n")
    assert resolve("a/twin_file.py:f").value(0) == 1
    assert resolve("b/twin_file.py:f").value(0) == 2
    assert resolve("a/twin_file.py:f").value(0) == 1


@pytest.mark.parametrize("name", ["01-train.py", "a.b.py", "über uns.py"])
def test_a_file_whose_name_is_not_an_identifier(project, name):
    project(name, FUNCTION)
    assert resolve(f"{name}:f").value(3) == 3


def test_classes_of_a_file_can_be_pickled_and_be_dataclasses(project):
    project(
        "shapes_file.py",
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass P:\n    x: int = 3\n\ndef f(): return P()\n",
    )
    value = resolve("shapes_file.py:f").value()
    assert pickle.loads(pickle.dumps(value)) == value


# --- --- not found --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("no_such_module:f", "no module named 'no_such_module'"),
        ("jax.nunpy:sin", "no module named 'jax.nunpy' | did you mean 'jax.numpy'?"),
        ("some_model.x:f", "no module named 'some_model.x'"),
        ("some_modle:f", "no module named 'some_modle' | did you mean 'some_model'?"),
        ("some_modle.py:f", "no file 'some_modle.py' | did you mean 'some_model.py'?"),
        ("code/modle.py:f", "no file 'code/modle.py' | did you mean 'code/model.py'?"),
        ("code/model:f", "no file 'code/model' | did you mean 'code/model.py'?"),
        ("code.model.py:f", "no file 'code.model.py'"),
        ("nowhere/x.py:f", "no file 'nowhere/x.py' | folder 'nowhere' does not exist"),
        ("code:f", "'code' has no attribute 'f'"),
        ("code/:f", "no file 'code/'"),
        ("data.txt:f", "'data.txt' is not a Python file"),
        ("not-a-name:f", "'not-a-name' is not the name of a module"),
        ("a..b:f", "'a..b' is not the name of a module"),
        ("some_model:", "has no function"),
        (":f", "has no module or file"),
        ("", "does not name a function"),
        ("a\0b:f", "NUL character"),
        ("some_model:los", "'some_model' has no attribute 'los' | did you mean 'loss'?"),
        ("some_model:zzzz", "'some_model' has no attribute 'zzzz' | it has loss"),
        ("some_model:loss.grad", "'some_model.loss' has no attribute 'grad'"),
        ("some_model:..", "'some_model' has no attribute ''"),
        ("some_model:params", "'params' in some_model is not callable; its type is dict"),
        ("some_model", "does not name a function | write some_model:loss"),
        ("some_model.py", "does not name a function | write some_model.py:loss"),
        ("some_model.loss", "does not name a function | did you mean 'some_model:loss'?"),
        ("empty_one", "does not name a function | write empty_one:NAME"),
    ],
)
def test_missing_targets_are_errors(project, target, expected):
    project("some_model.py", "params = {}\ndef loss(x): return x\nfrom os.path import join\n")
    project("empty_one.py")
    project("code/model.py", FUNCTION)
    project("data.txt")
    if target.startswith("code:"):
        project("code/__init__.py")
    assert expected in fault(target)


def test_a_package_hidden_by_another_of_its_name(project):
    project("one/hidden_pkg/__init__.py")
    project("one/hidden_pkg/m.py", FUNCTION)
    project("two/hidden_pkg/__init__.py")
    project("two/hidden_pkg/m.py", FUNCTION)
    resolve("one/hidden_pkg/m.py:f")
    assert "has the module name hidden_pkg.m, but hidden_pkg.m is imported from" in fault(
        "two/hidden_pkg/m.py:f"
    )


# --- --- errors during the import -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 / 0", "importing {} raised ZeroDivisionError: division by zero"),
        (
            "import no_such_dep",
            "importing {} raised ModuleNotFoundError: No module named 'no_such_d",
        ),
        ("from os import nothing_like_it", "importing {} raised ImportError: cannot import name"),
        ("def f(:\n", "raised_by.py:2: SyntaxError: invalid syntax"),
        ("if 1:\nx", "raised_by.py:3: IndentationError: expected an indented block"),
        ("import sys; sys.exit(4)", "{} called sys.exit(4) while it was imported | move the"),
        ("open('/no/such/file')", "importing {} raised FileNotFoundError"),
        ("from . import x", "importing {} raised ImportError: attempted relative import"),
    ],
)
@pytest.mark.parametrize("place", ["raised_by", "raised_by.py"])
def test_modules_that_raise(project, text, expected, place):
    project("raised_by.py", f"x = 1\n{text}\n")
    assert expected.format(place) in fault(f"{place}:x", UserFunctionError)
    assert "raised_by" not in sys.modules


def test_the_frames_of_a_module_that_raises_are_the_users(project):
    project("raiser_dep.py", "def go():\n    raise ValueError('a\\nb')\n")
    project("raiser_file.py", "import raiser_dep\nraiser_dep.go()\n")
    with pytest.raises(UserFunctionError) as caught:
        resolve("raiser_file.py:f")
    assert caught.value.message == "importing raiser_file.py raised ValueError: a b"
    frames = [(os.path.basename(f.filename), f.lineno) for f in user_traceback(caught.value)]
    assert frames == [("raiser_file.py", 2), ("raiser_dep.py", 2)]


def test_a_property_that_raises(project):
    project("lazy_file.py", "def __getattr__(name):\n    raise RuntimeError(name)\n")
    assert "reading lazy_file.py:f raised RuntimeError: f" in fault(
        "lazy_file.py:f", UserFunctionError
    )


def test_a_missing_parent_is_distinguished_from_a_missing_dependency(project):
    project("pkg_with_dep/__init__.py", "import no_such_dep\n")
    project("pkg_with_dep/m.py", FUNCTION)
    assert "No module named 'no_such_dep'" in fault("pkg_with_dep.m:f", UserFunctionError)
