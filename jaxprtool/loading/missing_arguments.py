"""Suggest `--args`, a factory or `record` if the arguments of a function are missing.

Arrays can be written on the command line. Models and optimizers are Python objects: a factory
creates them by abstract evaluation, so that no values are computed.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

import jax

from jaxprtool.errors import ArgumentsError
from jaxprtool.loading.trace import shown_signature, signature

#: The suggestion for --args by a parameter's name; any other parameter is suggested an array.
_SUGGESTIONS = {
    "key": "key(0)",
    "rng": "key(0)",
    "params": "{'w': f32[3,4]}",
    "training": "static(False)",
    "train": "static(False)",
    "deterministic": "static(True)",
}
_ARRAY = "f32[8,128]"

#: Names that libraries' examples give to parameters that are objects.
_OBJECTS = {
    *("model", "module", "net", "network", "agent", "policy", "solver", "metrics"),
    *("optimizer", "optim", "opt", "opt_state", "state", "train_state"),
}

#: Names of parameters that are the model.
_MODELS = {"model", "module", "net", "network"}

#: How each library makes a model without values, by the library's usual name in a file.
_ABSTRACT = {
    "nnx": "nnx.eval_shape(lambda: {model}({sizes}rngs=nnx.Rngs(0)))",
    "eqx": "eqx.filter_eval_shape({model}, {sizes}key=jax.random.key(0))",
}


def require_no_arguments(fun: Callable, target: str, hint: str | None) -> None:
    """Raise ArgumentsError, with a suggestion, if a function needs arguments.

    Args:
        fun: The function.
        target: The target that names it, without a call.
        hint: A suggestion to use instead, if one is known.
    """
    known = signature(fun)
    if known is not None and not (needed := required(known)):
        return
    objects = _objects(fun, [each.name for each in needed]) if known else []
    if objects and not hint:
        hint = _factory_hint(fun, target, [each.name for each in needed], objects)
    raise ArgumentsError(
        f"{shown_signature(fun)} needs arguments",
        hint
        or f'pass them, e.g. --args "{suggestion(fun)}", or attach @jaxprtool.example(...) to the '
        "function",
    )


def suggestion(fun: Callable) -> str:
    """Return a text for --args that fits the number and names of a function's parameters."""
    parts: list[str] = []
    by_name, known = False, signature(fun)
    for parameter in required(known) if known else ():
        value = _SUGGESTIONS.get(parameter.name, _ARRAY)
        if parameter.annotation in (jax.Ref, "jax.Ref", "Ref"):
            value = f"new_ref({_ARRAY})"
        by_name = by_name or parameter.kind is parameter.KEYWORD_ONLY
        parts.append(f"{parameter.name}={value}" if by_name else value)
    return ", ".join(parts) or _ARRAY


def required(known: inspect.Signature) -> list[inspect.Parameter]:
    """Return the parameters without a default value."""
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        p
        for p in known.parameters.values()
        if p.default is inspect.Parameter.empty and p.kind not in optional
    ]


# --- objects ----------------------------------------------------------------------------------


def _objects(fun: Callable, names: Sequence[str]) -> list[str]:
    """Return the parameters that are not arrays, judged by their names and use in the function."""
    used = set(_used_as_objects(fun))
    return [name for name in names if name in used or name.lower() in _OBJECTS]


def _used_as_objects(fun: Callable) -> Iterator[str]:
    """Yield names that a function calls, or whose attributes it reads that arrays do not have."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(fun))))
    except (OSError, TypeError, SyntaxError, ValueError):
        return  # its source is unavailable
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name)):
                yield name
            case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                if not hasattr(jax.Array, attribute):
                    yield name


def _factory_hint(fun: Callable, target: str, names: Sequence[str], objects: list[str]) -> str:
    """Return a factory to paste into the module, and the command that uses it."""
    place, _, name = target.rpartition(":")
    module = inspect.getmodule(inspect.unwrap(fun))
    array = 'jax.ShapeDtypeStruct((8, 128), "float32")'
    given = ", ".join(each if each in objects else array for each in names)
    listed = " and ".join([", ".join(objects[:-1]), objects[-1]] if objects[1:] else objects)
    lines = (
        f"{listed} {'are Python objects' if objects[1:] else 'is a Python object'}; create "
        f"{'them' if objects[1:] else 'it'} in a factory, and trace {place}:case --factory",
        "  def case():",
        *(f"      {each} = {_made(module, each)}" for each in objects),
        f"      return {name}, ({given}{'' if names[1:] else ','})",
        "or record a script that calls the function: jaxprtool record SCRIPT.py",
    )
    return "\n".join(lines)


def _made(module: ModuleType | None, name: str) -> str:
    """Return an expression that makes an object, without values if it is a model of a library."""
    known = vars(module) if module else {}
    library = next((each for each in _ABSTRACT if each in known), None)
    models = [each for each in known.values() if _is_model(each, module)]
    if library is None or not models or name.lower() not in _MODELS:
        return "...  # as your script makes it"
    model = models[-1]  # what is defined last usually is the whole model
    needed = [each.name for each in required(inspect.signature(model.__init__))]
    sizes = "".join(f"{each}=..., " for each in needed[1:] if each not in ("rngs", "key"))
    return _ABSTRACT[library].format(model=model.__name__, sizes=sizes)


def _is_model(value: object, module: ModuleType | None) -> bool:
    """Return True for a class of modules that is defined in a file."""
    return (
        isinstance(value, type)
        and module is not None
        and value.__module__ == module.__name__
        and any(base.__name__ == "Module" for base in value.__mro__[1:])
    )
