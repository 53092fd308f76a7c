import textwrap

import pytest

from jaxprtool.errors import ArgumentsError
from jaxprtool.loading.load import find_function

EQX = """
    import equinox as eqx, jax

    class Net(eqx.Module):
        linear: eqx.nn.Linear

        def __init__(self, width, *, key):
            self.linear = eqx.nn.Linear(width, width, key=key)

        def __call__(self, x):
            return self.linear(x)

    @eqx.filter_jit
    def step(model, opt_state, x):
        slopes = eqx.filter_grad(lambda model: jax.vmap(model)(x).sum())(model)
        return eqx.apply_updates(model, slopes), opt_state + 1
"""
PLAIN = """
    def evaluate(f, tokens, table):
        return f(tokens) + table.at[0].get()

    def loss(policy):
        return 0
"""


@pytest.fixture
def hint_of(tmp_path, monkeypatch):
    """Return the hint for a function of a module, as lines."""
    monkeypatch.chdir(tmp_path)

    def hint(name, source, function):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        with pytest.raises(ArgumentsError) as caught:
            find_function(f"{name}.py:{function}")
        return caught.value.hint.splitlines()

    return hint


def test_objects_are_made_by_a_factory_to_paste(hint_of, tmp_path):
    first, *factory, last = hint_of("missing_eqx", EQX, "step")
    assert first == (
        "model and opt_state are Python objects; create them in a factory, and trace "
        "missing_eqx.py:case --factory"
    )
    assert last.endswith("calls the function: jaxprtool record SCRIPT.py")
    filled = textwrap.dedent("\n".join(factory))
    for place, value in (("width=...", "width=8"), ("...  #", "1.0  #"), ("8, 128", "4, 8")):
        assert place in filled
        filled = filled.replace(place, value)
    (tmp_path / "filled_eqx.py").write_text(f"{textwrap.dedent(EQX)}\n{filled}\n")
    assert find_function("filled_eqx.py:case", factory=True).trace().name == "step"


def test_called_parameters_are_objects_and_array_methods_are_not(hint_of):
    first, *lines = hint_of("missing_plain", PLAIN, "evaluate")
    assert first.startswith("f is a Python object; create it in a factory")
    array = 'jax.ShapeDtypeStruct((8, 128), "float32")'
    assert f"      return evaluate, (f, {array}, {array})" in lines


def test_names_of_objects_are_recognized(hint_of):
    assert "      return loss, (policy,)" in hint_of("missing_names", PLAIN, "loss")
