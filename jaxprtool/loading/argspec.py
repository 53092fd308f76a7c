"""The arguments of a function, read from text such as `{'w': f32[3,4]}` and from files.

The text is parsed as the argument list of a call and walked node by node; nothing is evaluated,
and syntax outside of the grammar is rejected with its column:

    f32[8,128]  bf16[]  key<fry>[2]     an abstract array, by the type that a jaxpr prints
    f32[n,2*n]                          with symbolic dimensions, the same in all arguments
    f32[_,3]                            with an anonymous one, distinct from all others
    f32[n<=64]  f32[2<=n<=64,2*n]       with bounds on one
    f32[8@x]                            sharded over an explicit axis of the current mesh
    5  2.5  True  1j                    a scalar, weakly typed as in Python
    {'w': ...}  [...]  (...)  None      pytrees
    zeros(f32[3])  ones(f32[3])  normal(f32[3,4], seed=1)  arange(10)  key(0)
    arange(f32[2,3])                    0 to 5, in row-major order
    full(f32[3], 2.5)                   one number everywhere
    array([[1, 2.5], [inf, 4]])         numbers in nested lists; array([1, 2], i8) of a dtype
    load('x.npz')['w']                  from a .npy, .npz or .safetensors file
    load('DIR')['w']                    from a checkpoint of Orbax
    load('out.npz')['result'][1]        one part of the results saved by `--save`
    new_ref(f32[3])                     a Ref that holds an array; of values, new_ref(zeros(f32[3]))
    ref('params')                       an attribute of the target's module
    static(...)                         a Python value, as an argument or in one
"""

from __future__ import annotations

import ast
import json
import math
import mmap
import os
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, BinaryIO, ClassVar, NoReturn, TypeGuard

import jax
import ml_dtypes
import numpy as np
from jax import numpy as jnp
from jax.sharding import AbstractMesh

from jaxprtool.errors import ArgumentsError, JaxprToolError, did_you_mean
from jaxprtool.files import opened_plain
from jaxprtool.ir import dtypes
from jaxprtool.ir.backends import start_backends
from jaxprtool.ir.conversions import is_ref
from jaxprtool.ir.notation import expressions, types
from jaxprtool.ir.symbols import Symbols
from jaxprtool.ir.trees import path_steps
from jaxprtool.loading import Static

# --- argspec --------------------------------------------------------------------------------------
# The arguments of a function, read from text such as `{'w': f32[3,4]}, bf16[8], n=static(3)`.

#: The limit in bytes of an array created by zeros, ones, normal or arange; use a type for larger
#: ones.
MAX_BYTES = 2**34

#: The largest number of items that a hint writes out.
_MOST_REPEATED = 8

#: Types of values that a Ref may hold.
_ARRAYS = (jax.ShapeDtypeStruct, jax.Array, np.ndarray, np.generic, bool, int, float, complex)

_TYPES_HINT = "write types as a jaxpr prints them: f32[8,128], bf16[], i32[3], key<fry>[]"
_VALUES_HINT = (
    "write values as zeros(f32[8]), ones(f32[8]), full(f32[8], 2.0), array([1.0, 2.0]), "
    "normal(f32[8]), arange(8) or load('x.npy')"
)
#: The modules whose functions users write in `--args`.
_ARRAY_MODULES = ("np", "jnp", "numpy", "jax")
_ONE_STRING_HINT = "give one string per argument"
#: The hints that give way to a more precise one.
_REPLACEABLE_HINTS = (None, _TYPES_HINT, _ONE_STRING_HINT)


def read_args(
    text: str, module: ModuleType | None = None, what: str = "--args"
) -> tuple[tuple, dict[str, Any]]:
    """Return the positional and keyword arguments written in a text, such as that of `--args`.

    Leaves are `jax.ShapeDtypeStruct`, arrays, and Python scalars; whole arguments may be `Static`.

    Args:
        text: The text, in the notation of `--args`.
        module: Where `ref('name')` is looked up.
        what: The name of the text in messages.

    Raises:
        ArgumentsError: If the text cannot be read, with the place.
    """
    with _dtypes_hinted(text):
        return _ArgumentReader(text, what, module, Symbols()).arguments()


def read_values(text: str, module: ModuleType, what: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of a call that is run and not traced.

    In addition to the grammar of `--args`, strings and numbers of any size are values, and dicts
    have any keys.

    Args:
        text: The text between the brackets of the call.
        module: Where `ref('name')` is looked up.
        what: The name of the text in messages.

    Raises:
        ArgumentsError: If the text cannot be read, with the place.
    """
    return _ValueReader(text, what, module, Symbols()).arguments()


def read_results(claim: Any, argument_symbols: Mapping[str, Any]) -> Any:
    """Return the types of results from a text or a pytree of texts; several are a tuple.

    Args:
        claim: The text or the pytree. A size written as `_` is a new symbol.
        argument_symbols: The symbols of the arguments, by name.

    Raises:
        ArgumentsError: If a text cannot be read, or uses an unknown symbol.
    """
    symbols = _KnownSymbols(argument_symbols)
    if not _is_string(claim):
        return read_strings(claim, symbols=symbols)
    with _dtypes_hinted(claim):
        reader = _ArgumentReader(claim, "the claimed results", None, symbols)
        if reader.source.keywords:
            raise ArgumentsError("the claimed results must be types without names")
        results = tuple(map(reader.argument, reader.source.args))
    return results[0] if len(results) == 1 else results


class _KnownSymbols(Symbols):
    """A fixed set of symbols by name; no other name is valid."""

    def __getitem__(self, name: str) -> Any:
        if name not in self._found:
            raise ValueError(f"no argument has the symbol '{name}'")
        return self._found[name]

    def unnamed(self) -> Any:
        return Symbols(self).unnamed()


def read_strings(
    tree: Any, module: ModuleType | None = None, symbols: Symbols | None = None
) -> Any:
    """Return a pytree of arguments in which each string is read in the notation of --args.

    Inside an object of a class, a string is read only if it has a bracket (`f32[3]`); otherwise it
    is the user's own value, such as the name of an activation in a module. `symbols` are symbolic
    dimensions by name; by default a new scope.
    """
    symbols = Symbols() if symbols is None else symbols

    def read(leaf: object) -> object:
        if not _is_string(leaf):
            return leaf
        with _dtypes_hinted(leaf):
            reader = _reader_of_one(leaf, module, symbols)
            return reader.argument(reader.source.args[0])

    def read_node(node: object) -> object:
        if _is_string(node):
            return read(node)
        return jax.tree.map(lambda x: read(x) if _is_string(x) and set(x) & set("[(") else x, node)

    try:
        for leaf in jax.tree.leaves(tree):
            if _is_string(leaf) and "[" in leaf and "=" in leaf:
                _reader_of_one(leaf, module, symbols)  # collects the constraints on symbols
        return jax.tree.map(
            read_node, tree, is_leaf=lambda node: not isinstance(node, tuple | list | dict)
        )
    except ValueError as error:  # dict keys that cannot be sorted, or a malformed node
        raise ArgumentsError(f"the example arguments are not a pytree: {error}") from error


def require_sequence(types: object) -> None:
    """Raise ArgumentsError unless these are argument types in a sequence."""
    if not isinstance(types, Sequence):
        raise ArgumentsError(
            f"types of arguments must be a string, 'f32[n,d], i32[n]', or a sequence, not {types!r}"
        )


def _reader_of_one(text: str, module: ModuleType | None, symbols: Symbols) -> _ArgumentReader:
    what = f"the example argument {text[:40]!r}"
    reader = _ArgumentReader(text, what, module, symbols)
    if len(reader.source.args) != 1 or reader.source.keywords:
        raise ArgumentsError(f"{what} must be one value", _ONE_STRING_HINT)
    return reader


@contextmanager
def _dtypes_hinted(text: str) -> Iterator[None]:
    """Add a hint to the error for a text of shapes without dtypes, as JAX wrote them until 2022."""
    try:
        yield
    except ArgumentsError as error:
        written = _with_dtypes(text) if len(text) <= expressions.MAX_LENGTH else None
        if written and error.hint in _REPLACEABLE_HINTS:
            error.hint = f"write types as a jaxpr prints them: {written}"
        raise


def _with_dtypes(text: str) -> str | None:
    """Return `f32[m,n]` for `(m, n)`, `m, n` or `m n`; None if the text is not of this kind."""
    text = re.sub(r"\w+ *=(?!=)", "", text)
    names = re.findall(r"[^\W\d]\w*", text)
    if not re.fullmatch(r"([\w\s,()\[\]+*/-]|\.\.\.)*", text) or not (names or "..." in text):
        return None
    if not set(names).isdisjoint({*dtypes.array_dtypes(), *_ArgumentReader._FUNCTIONS}):
        return None
    shapes = re.findall(r"[(\[]([^()\[\]]*)[)\]]", text) or [text]
    close = (re.sub(r"\s*([+*/-])\s*", r"\1", shape) for shape in shapes)
    sizes = [re.findall(r"[^\s,]+", shape) for shape in close]
    if any("." in size for shape in sizes for size in shape):  # `...` stood for any further sizes
        return "f32[m,n]"
    return ", ".join(f"f32[{','.join(shape)}]" for shape in sizes)


class _ArgumentReader:
    """Walks one parsed argument list; each method reads one kind of node."""

    def __init__(self, text: str, what: str, module: ModuleType | None, symbols: Symbols):
        self.source = expressions.parse_arguments(text, what, ArgumentsError, types=True)
        self.module = module
        self.symbols = symbols
        for start, end in self.source.types.items():
            self._constrain(start, self.source.text[start:end])

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and the keyword arguments."""
        args = tuple(map(self.argument, self.source.args))
        return args, {name: self.argument(node) for name, node in self.source.keywords}

    def argument(self, node: ast.expr) -> Any:
        """Return an argument, or a part of one. A whole file is read as a dict of its arrays."""
        read = self._VALUES.get(type(node))
        value = read(self, node) if read else self._not_allowed(node)
        return value.read() if isinstance(value, Arrays) else value

    # --- scalars and containers

    def _constant(self, node: ast.Constant) -> Any:
        if isinstance(node.value, str):
            hint = f"write a Python value that is not traced as static({node.value!r})"
            raise self.source.fail(node, "a string is not an array", hint)
        return self._number(node)

    def _number(self, node: ast.expr) -> Any:
        value = self.source.literal(node)
        bits = 64 if dtypes.x64_enabled() else 32
        if isinstance(value, int) and not -(2 ** (bits - 1)) <= value < 2 ** (bits - 1):
            hint = "--x64 enables 64-bit integers" if bits == 32 else None
            raise self.source.fail(node, f"{value} does not fit an i{bits}", hint)
        return value

    def _dict(self, node: ast.Dict) -> dict[Hashable, Any]:
        pairs = expressions.dict_items(node)
        result = {self.source.key(key, node): self.argument(value) for key, value in pairs}
        try:
            sorted(result)
        except TypeError:
            raise self.source.fail(node, "the keys of a dict must all have one type") from None
        return result

    def _name(self, node: ast.Name) -> Any:
        if where := self.source.type_at(node):
            return self._type(where)
        if node.id in ("inf", "nan"):
            return self.source.literal(node)
        raise self._unknown(node.id, self.source.start(node))

    def _subscript(self, node: ast.Subscript) -> Any:
        root: ast.expr = node.value
        while isinstance(root, ast.Subscript):
            root = root.value
        if _called(root) not in ("load", "ref"):
            raise self.source.not_allowed(node, "only load(...) and ref(...) can be subscripted")
        return self._item(node)

    # --- types

    def _constrain(self, start: int, text: str) -> None:
        """Collect the constraints on symbols in the text of a type."""
        if "=" not in text:
            return
        try:
            parsed = types.parse_type(text)
        except ValueError:  # the error is reported when the type is read
            return
        for dim in parsed.dims:
            try:
                self.symbols.constrain(types.constrained(dim)[1])
            except ValueError as error:
                raise self.source.fail_at(start + dim.at, f"not a dimension: {error}") from None

    def _type(self, where: slice) -> jax.ShapeDtypeStruct:
        text, start = self.source.text[where], where.start
        try:
            parsed = types.parse_type(text)
        except ValueError as error:
            raise self.source.fail_at(start, str(error), _TYPES_HINT) from None
        sizes = [self._size(start, dim) for dim in parsed.dims]
        if parsed.memory_space:
            raise self.source.fail_at(start, f"the argument {text} cannot be put in a memory space")
        dtype = self._dtype(parsed.dtype, start)
        if not parsed.axis_names:
            return jax.ShapeDtypeStruct(tuple(sizes), dtype)
        mesh = self._mesh(text, start, parsed)
        try:
            aval = types.aval_of_type(parsed, sizes, mesh)
        except Exception as error:  # JAX rejects a layout with errors of several classes
            raise self.source.fail_at(start, f"{text}: {' '.join(str(error).split())}") from None
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=aval.sharding)

    def _mesh(self, text: str, start: int, parsed: types.TypeText) -> AbstractMesh:
        """Return the current mesh, whose axes a type names."""
        mesh = jax.sharding.get_abstract_mesh()
        axis_types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        if "varying" in parsed.axes:
            message = f"{text} varies over mesh axes, which is only possible inside shard_map"
            raise self.source.fail_at(start, message)
        for name in parsed.axis_names:
            if mesh.empty:
                raise self.source.fail_at(
                    start,
                    f"{text} is sharded over the mesh axis '{name}', but no mesh is set",
                    f"set one with --mesh {name}=2, or jax.set_mesh",
                )
            if name not in axis_types:
                message = f"the mesh has no axis '{name}'"
                raise self.source.fail_at(start, message, f"it has {_list(axis_types)}")
            if axis_types[name] is not jax.sharding.AxisType.Explicit:
                message = (
                    f"the axis '{name}' is {axis_types[name].name}, "
                    "but types can name only Explicit axes"
                )
                raise self.source.fail_at(start, message)
        return mesh

    def _dtype(self, name: str, at: int) -> np.dtype:
        if name.startswith("key<"):
            impl, impls = name[4:-1], dtypes.key_dtypes()
            if impl not in impls:
                message = f"unknown kind of key '{impl}'"
                public = (kind for kind in impls if not kind.startswith("_"))  # not of JAX itself
                raise self.source.fail_at(at + 4, message, f"available: {_list(public)}")
            return impls[impl]
        dtype = dtypes.array_dtypes().get(name)
        if dtype is None:
            raise self._unknown(name, at)
        if dtypes.needs_x64(dtype):
            message = f"{name} needs JAX's 64-bit types, which are not enabled"
            raise self.source.fail_at(at, message, "add --x64, or set jax_enable_x64")
        return dtype

    def _size(self, start: int, dim: types.Dimension) -> Any:
        at = start + dim.at
        if dim.size.strip() == "_":
            return self.symbols.unnamed()
        try:
            dim, _ = types.constrained(dim)
            size = types.size_in(self.source, start, dim)(self.symbols)
        except (ValueError, ArithmeticError, TypeError) as error:  # of symbolic dimensions
            detail = " ".join(str(error).split())
            raise self.source.fail_at(at, f"not a dimension: {detail}") from None
        if isinstance(size, int) and not 0 <= size < 2**63:
            raise self.source.fail_at(at, f"a dimension cannot be {dim.size}")
        return size

    # --- functions

    def _call(self, node: ast.Call) -> Any:
        if not isinstance(node.func, ast.Name):
            raise self._called_attribute(node, node.func)
        name = node.func.id
        if (where := self.source.type_at(node.func)) is not None:
            hint = self._full_hint(where, node.args[0] if len(node.args) == 1 else None)
            raise self.source.fail(node, f"{self.source.segment(node)}: a type is not called", hint)
        if name not in self._FUNCTIONS:
            raise self._unknown(name, self.source.start(node.func))
        try:
            return self._FUNCTIONS[name](self, node)
        except JaxprToolError:
            raise
        except (ValueError, TypeError, OverflowError, MemoryError, NotImplementedError) as error:
            detail = " ".join(str(error).split())[:200]
            message = f"{self.source.segment(node)} cannot be created: {detail}"
            raise self.source.fail(node, message) from error

    def _options(
        self, node: ast.Call, required: tuple[str, ...], optional: tuple[str, ...] = ()
    ) -> dict[str, ast.expr]:
        """Return the argument nodes of a call of one of our functions, by parameter name."""
        name, names = _called(node), (*required, *optional)
        if len(node.args) > len(names):
            raise self.source.fail(node, f"{name}(...) takes at most {len(names)} arguments")
        options = dict(zip(names, node.args, strict=False))
        for keyword in node.keywords:
            if keyword.arg not in names or keyword.arg in options:
                shown = "**" if keyword.arg is None else f"'{keyword.arg}'"
                message = f"{name}(...) takes no argument {shown} here"
                raise self.source.fail(keyword.value, message, f"it takes {_list(names)}")
            options[keyword.arg] = keyword.value
        for missing in (n for n in required if n not in options):
            raise self.source.fail(node, f"{name}(...) needs an argument '{missing}'")
        return options

    def _static(self, node: ast.Call) -> Static:
        value = self._options(node, ("value",))["value"]
        root = value
        while isinstance(root, ast.Subscript):
            root = root.value
        return Static(self._item(value) if _called(root) == "ref" else self.source.literal(value))

    def _array_type(self, node: ast.expr, float0: bool = False) -> jax.ShapeDtypeStruct:
        """Return the type of an array to fill; its shape is in numbers and its size is limited."""
        struct = self.argument(node)
        if not isinstance(struct, jax.ShapeDtypeStruct) or struct.is_ref:
            shape = self._shape_text(node)
            hint = None if shape is None else f"write f32[{shape}]"
            raise self.source.fail(node, "expected a type such as f32[3]", hint)
        if jax.dtypes.issubdtype(struct.dtype, jax.dtypes.extended) or (
            struct.dtype == jax.dtypes.float0 and not float0
        ):
            raise self.source.fail(node, "an array of this type cannot be filled with numbers")
        if not all(isinstance(size, int) for size in struct.shape):
            raise self.source.fail(node, "an array with values needs dimensions that are numbers")
        self._check_bytes(node, math.prod(struct.shape) * 8)
        return struct

    def _check_bytes(self, node: ast.expr, size: int) -> None:
        if size > MAX_BYTES:
            hint = "give only its type, such as f32[1000,1000]"
            raise self.source.fail(node, f"an array of {size / 2**30:.3g} GiB is too large", hint)

    def _full(self, node: ast.Call) -> np.ndarray:
        options = self._options(node, ("type", "value"))
        struct, value = self._array_type(options["type"]), self._number(options["value"])
        if not isinstance(value, bool | int | float | complex):
            raise self.source.fail(options["value"], "expected a number")
        return self._of_dtype(node, np.full(struct.shape, value), struct.dtype)

    def _array(self, node: ast.Call) -> np.ndarray:
        options = self._options(node, ("values",), ("dtype",))
        try:
            numbers = np.asarray(self.source.literal(options["values"]))
        except ValueError:
            message = "the lists in array(...) must have equal lengths"
            raise self.source.fail(options["values"], message) from None
        if numbers.dtype.kind not in "bifc":
            raise self.source.fail(node, "array(...) takes numbers in nested lists")
        if "dtype" in options:
            return self._of_dtype(node, numbers, self._dtype_option(options["dtype"]))
        bits = 64 if dtypes.x64_enabled() else 32
        names = {"b": "bool", "i": f"i{bits}", "f": f"f{bits}", "c": f"c{2 * bits}"}
        dtype = dtypes.array_dtypes()[names[numbers.dtype.kind]]
        return self._of_dtype(node, numbers, dtype)

    def _of_dtype(self, node: ast.Call, numbers: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Return numbers as an array of a dtype; raise an error if it cannot represent them."""
        inexact = jax.dtypes.issubdtype(dtype, np.inexact)
        fits = numbers.dtype.kind != "c" or jax.dtypes.issubdtype(dtype, np.complexfloating)
        if fits and inexact:
            with np.errstate(over="ignore"):
                array = numbers.astype(dtype)
            special = np.isinf, np.isnan
            fits = all(np.array_equal(test(numbers), test(array)) for test in special)
        elif fits:
            fits = np.array_equal(numbers, np.trunc(numbers))
        if not fits:
            message = f"{self.source.segment(node)} has values that {dtype} cannot represent"
            raise self.source.fail(node, message)
        return array if inexact else self._held_in(node, numbers, dtype)

    def _zeros(self, node: ast.Call) -> np.ndarray:
        struct = self._array_type(self._options(node, ("type",))["type"], float0=True)
        return np.zeros(struct.shape, struct.dtype)

    def _ones(self, node: ast.Call) -> np.ndarray:
        struct = self._array_type(self._options(node, ("type",))["type"])
        return self._held_in(node, np.ones(struct.shape), struct.dtype)

    def _normal(self, node: ast.Call) -> np.ndarray:
        options = self._options(node, ("type",), ("seed",))
        struct = self._array_type(options["type"])
        if not jax.dtypes.issubdtype(struct.dtype, np.inexact):
            raise self.source.fail(node, "normal(...) needs a floating or complex type")
        seed = self.source.integer(options["seed"]) if "seed" in options else 0
        if seed < 0:
            raise self.source.fail(options["seed"], "a seed cannot be negative")
        draw = np.random.default_rng(seed).standard_normal
        if jax.dtypes.issubdtype(struct.dtype, np.complexfloating):
            values = (draw(struct.shape) + 1j * draw(struct.shape)) / math.sqrt(2)
        else:
            values = draw(struct.shape)
        if np.iscomplexobj(values):
            return values.astype(struct.dtype)
        return self._held_in(node, np.asarray(values), struct.dtype)

    def _arange(self, node: ast.Call) -> np.ndarray:
        options = self._options(node, ("start",), ("stop", "step", "dtype"))
        if len(options) == 1 and self.source.type_at(options["start"]) is not None:
            struct = self._array_type(options["start"])
            counted = np.arange(math.prod(struct.shape))
            return self._held_in(node, counted, struct.dtype).reshape(struct.shape)
        dtype = self._dtype_option(options.pop("dtype")) if "dtype" in options else None
        numbers = [self._real(options[n]) for n in ("start", "stop", "step") if n in options]
        start, stop = (0, numbers[0]) if len(numbers) == 1 else numbers[:2]
        step = numbers[2] if len(numbers) == 3 else 1
        if "step" in options and "stop" not in options:
            raise self.source.fail(node, "arange(...) with a step needs a stop")
        if step == 0:
            raise self.source.fail(options["step"], "the step cannot be 0")
        self._check_bytes(node, 8 * math.ceil(max(0, (stop - start) / step)))
        if dtype is None:
            kind = "f" if any(isinstance(number, float) for number in numbers) else "i"
            dtype = dtypes.array_dtypes()[f"{kind}{64 if dtypes.x64_enabled() else 32}"]
        return self._held_in(node, np.arange(start, stop, step), dtype)

    def _held_in(self, node: ast.Call, numbers: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Return real numbers as an array of a dtype; raise an error instead of wrapping around."""
        if numbers.size:
            least, most = _range(dtype)
            low, high = numbers.min(), numbers.max()
            if not least <= np.trunc(low) <= np.trunc(high) <= most:
                message = (
                    f"{self.source.segment(node)} has values from {low} to {high}, which {dtype} "
                    "cannot represent"
                )
                raise self.source.fail(node, message)
        return numbers.astype(dtype)

    def _dtype_option(self, node: ast.expr) -> np.dtype:
        if not isinstance(node, ast.Name):
            raise self.source.not_allowed(node, _TYPES_HINT)
        return self._dtype(self.source.segment(node), self.source.start(node))

    def _real(self, node: ast.expr) -> int | float:
        value = self._number(node)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.source.fail(node, "expected a finite number")
        return value

    @jax.transfer_guard("allow")
    def _key(self, node: ast.Call) -> jax.Array:
        options = self._options(node, ("seed",), ("impl",))
        implementation = self.source.literal(options["impl"]) if "impl" in options else None
        start_backends()
        return jax.random.key(self.source.integer(options["seed"]), impl=implementation)

    def _load(self, node: ast.Call) -> np.ndarray | Arrays:
        return load_arrays(self._string(self._options(node, ("path",))["path"]))

    def _ref(self, node: ast.Call) -> Any:
        path = self._options(node, ("name",))["name"]
        if not isinstance(path, ast.Constant):
            raise self.source.fail(
                path,
                "ref(...) takes the name of an attribute",
                "write new_ref(f32[3]) for a Ref that holds an array",
            )
        if self.module is None:
            raise self.source.fail(node, "ref(...) needs a TARGET with a module")
        value: Any = self.module
        for part in self._string(path).split("."):
            try:
                value = getattr(value, part)
            except Exception as error:  # a user's property may raise anything
                segment = self.source.segment(node)
                message = f"{self.module.__name__} has no attribute '{part}' for {segment}"
                hint = did_you_mean(part, getattr(value, "__dict__", ()))
                raise self.source.fail(path, message, hint) from error
        return value

    @jax.transfer_guard("allow")
    def _new_ref(self, node: ast.Call) -> jax.ShapeDtypeStruct | jax.Ref:
        value = self.argument(self._options(node, ("value",))["value"])
        if not isinstance(value, _ARRAYS) or is_ref(value):
            raise self.source.fail(node, "new_ref(...) takes one array, or its type")
        if getattr(value, "dtype", None) == jax.dtypes.float0:
            raise self.source.fail(node, "a Ref cannot hold a float0")
        if isinstance(value, jax.ShapeDtypeStruct):
            return value.update(is_ref=True)
        return jax.new_ref(value)

    def _string(self, node: ast.expr) -> str:
        value = self.source.literal(node)
        if not isinstance(value, str):
            raise self.source.fail(node, "expected a string")
        return value

    def _item(self, node: ast.expr) -> Any:
        """Return the value of `load(...)` or `ref(...)`, subscripted any number of times."""
        if not isinstance(node, ast.Subscript):
            assert isinstance(node, ast.Call)
            return self._call(node)
        container, key = self._item(node.value), self.source.literal(node.slice)
        try:
            return container.at(str(key)) if isinstance(container, Arrays) else container[key]
        except Exception as error:  # whatever the user's container raises
            message = f"{self.source.segment(node.value)} has no item {key!r}"
            names = list(filter(_is_string, container)) if isinstance(container, dict) else []
            hint = did_you_mean(str(key), names) or (f"it has {_list(names)}" if names else None)
            raise self.source.fail(node, message, hint) from error

    # --- refusals

    def _unknown(self, name: str, at: int) -> JaxprToolError:
        fail = self.source.fail_at
        if name in dtypes.array_dtypes():
            hint = f"write {name}[] for a scalar, {name}[8,128] for an array"
            return fail(at, f"the type {name} needs a shape", hint)
        if name in self._FUNCTIONS:
            return fail(at, f"{name} is a function: write {name}(...)")
        if name[0].isdigit():
            return fail(at, f"the literal {name} is not allowed in {self.source.what}", _TYPES_HINT)
        names = [*dtypes.array_dtypes(), *self._FUNCTIONS]
        hint = did_you_mean(name, names) or _TYPES_HINT
        return fail(at, f"unknown name '{name}' in {self.source.what}", hint)

    def _not_allowed(self, node: ast.expr) -> NoReturn:
        hint = _TYPES_HINT if isinstance(node, ast.Attribute) else None
        raise self.source.not_allowed(node, hint)

    def _arithmetic(self, node: ast.BinOp) -> Any:
        """Return a complex number; refuse other arithmetic, with what to write instead."""
        count = getattr(node.right, "value", None)
        if isinstance(node.op, ast.Mult) and isinstance(node.left, ast.List | ast.Tuple):
            if type(count) is int and 0 < count * len(node.left.elts) <= _MOST_REPEATED:
                items = [self.source.segment(item) for item in node.left.elts] * count
                raise self.source.not_allowed(node, f"write all items: [{', '.join(items)}]")
            raise self.source.not_allowed(node, "write all items")
        if (where := self.source.type_at(node.left)) is not None:
            value = node.right if isinstance(node.op, ast.Mult) else None
            raise self.source.not_allowed(node, self._full_hint(where, value))
        return self._number(node)

    def _full_hint(self, where: slice, value: ast.expr | None) -> str:
        """Return how to write an array of a type that is full of a number."""
        try:
            number = None if value is None else self.source.literal(value)
        except JaxprToolError:
            number = None
        if not isinstance(number, bool | int | float | complex):
            return _VALUES_HINT
        return f"write full({self.source.text[where]}, {number!r}) for an array full of {number!r}"

    def _called_attribute(self, node: ast.Call, function: ast.expr) -> Exception:
        """Return the error for a call such as `np.zeros((3, 4))`, with what to write instead."""
        root = function
        while isinstance(root, ast.Attribute):
            root = root.value
        if root is function or getattr(root, "id", None) not in _ARRAY_MODULES:
            return self.source.not_allowed(function)
        assert isinstance(function, ast.Attribute)
        hint, shape = _VALUES_HINT, self._shape_text(node.args[0]) if node.args else None
        if function.attr in ("zeros", "ones") and shape is not None:
            hint = f"write {function.attr}(f32[{shape}])"
        elif function.attr == "full" and shape is not None and len(node.args) > 1:
            hint = f"write full(f32[{shape}], {self.source.segment(node.args[1])})"
        called = self.source.segment(function)
        return self.source.fail(node, f"{self.source.what} cannot call {called}", hint)

    def _shape_text(self, node: ast.expr) -> str | None:
        """Return `3,4` for a node that is the shape `(3, 4)`, or a size; None for another."""
        try:
            shape = self.source.literal(node)
        except JaxprToolError:
            return None
        sizes = shape if isinstance(shape, tuple | list) else [shape]
        return ",".join(map(str, sizes)) if all(type(size) is int for size in sizes) else None

    _FUNCTIONS: ClassVar[dict[str, Callable[[_ArgumentReader, ast.Call], Any]]] = {
        "arange": _arange,
        "array": _array,
        "full": _full,
        "key": _key,
        "load": _load,
        "new_ref": _new_ref,
        "normal": _normal,
        "ones": _ones,
        "ref": _ref,
        "static": _static,
        "zeros": _zeros,
    }
    _VALUES: ClassVar[dict[type, Callable[[_ArgumentReader, Any], Any]]] = {
        ast.BinOp: _arithmetic,
        ast.Call: _call,
        ast.Constant: _constant,
        ast.Dict: _dict,
        ast.List: lambda self, node: list(map(self.argument, node.elts)),
        ast.Name: _name,
        ast.Subscript: _subscript,
        ast.Tuple: lambda self, node: tuple(map(self.argument, node.elts)),
        ast.UnaryOp: _number,
    }


def _literal(reader: _ArgumentReader, node: ast.expr) -> Any:
    return reader.source.literal(node)


def _any_dict(reader: _ArgumentReader, node: ast.Dict) -> dict[Hashable, Any]:
    source, pairs = reader.source, expressions.dict_items(node)
    return {source.key(key, node): reader.argument(value) for key, value in pairs}


class _ValueReader(_ArgumentReader):
    """Reads arguments that are passed to a function without tracing."""

    _FUNCTIONS: ClassVar[dict[str, Callable[[_ArgumentReader, ast.Call], Any]]] = {
        **_ArgumentReader._FUNCTIONS,
        "static": lambda self, node: self._static(node).value,
    }
    _VALUES: ClassVar[dict[type, Callable[[_ArgumentReader, Any], Any]]] = {
        **_ArgumentReader._VALUES,
        ast.BinOp: _literal,
        ast.Constant: _literal,
        ast.Dict: _any_dict,
        ast.UnaryOp: _literal,
    }


def _called(node: ast.expr) -> str | None:
    """Return the name of the function in a call, or None."""
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None


def _range(dtype: np.dtype) -> tuple[float, float]:
    """Return the smallest and the largest number of a dtype."""
    if dtype == np.bool_:
        return 0, 1
    info: Any = (jnp.iinfo if jax.dtypes.issubdtype(dtype, np.integer) else jnp.finfo)(dtype)
    return float(info.min), float(info.max)


def _is_string(value: object) -> TypeGuard[str]:
    return isinstance(value, str)


def _list(names: Iterable[object]) -> str:
    shown = [str(name) for name in names]
    return ", ".join(shown[:10]) + (", ..." if len(shown) > 10 else "")


# --- files ----------------------------------------------------------------------------------------
# Loading of arrays from `.npy`, `.npz` and `.safetensors` files, and checkpoints of Orbax.
#
# Nothing is unpickled. Only regular files are read, and only if they fit into memory. A
# `.safetensors` file is mapped into memory, and a checkpoint is read array by array, so that unused
# arrays are not read.

#: Bytes; the header of a model with a hundred thousand tensors takes a tenth of it.
_MAX_HEADER = 100_000_000

_SAFETENSORS_DTYPES: dict[str, type] = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "U64": np.uint64,
    "I64": np.int64,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "F64": np.float64,
    "C64": np.complex64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}


class Arrays(dict[str, Any]):
    """The arrays of a file by name. Names with dots and slashes stay flat.

    Those of a checkpoint are `Stored` until they are read from `folder`.
    """

    folder: str | None = None

    def at(self, path: str) -> np.ndarray | Arrays:
        """Return the array of this name, or the `Arrays` whose names have this path as a prefix.

        The prefix is removed from their names: `0/w`. Raises KeyError if there is none.
        """
        if path in self:
            return self.read([path])[path]  # type: ignore[no-any-return]
        arrays = Arrays()
        arrays.folder = self.folder
        for name, array in self.items():
            rest = name.removeprefix(path)
            if rest.startswith("/"):
                arrays[rest[1:]] = array
            elif name.startswith((f"{path}[", f"{path}.")) and (steps := path_steps(f"_{rest}")):
                arrays["/".join(steps)] = array
        return arrays or self[path]

    def read(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Return the arrays of these names, or all, in a plain dict.

        Raises ArgumentsError if a checkpoint is damaged.
        """
        wanted = {name: self[name] for name in (self if names is None else names)}
        if self.folder is None:
            return wanted
        from jaxprtool.ir.array_files import read_stored

        with _named(self.folder):
            return read_stored(self.folder, wanted)


def load_arrays(path: str) -> np.ndarray | Arrays:
    """Return the array in a `.npy` file, or the `Arrays` in another file or in a checkpoint.

    Raises ArgumentsError if the file cannot be read, is damaged, or holds Python objects.
    """
    if os.path.isdir(path):
        from jaxprtool.ir.array_files import stored_arrays

        with _named(path):
            arrays = Arrays(stored_arrays(path))
        arrays.folder = path
        return arrays
    suffix = os.path.splitext(path)[1].lower()
    reader = {".npy": _numpy, ".npz": _numpy, ".safetensors": _safetensors, "": _numpy}.get(suffix)
    if reader is None:
        raise ArgumentsError(
            f"cannot load {path!r}: only .npy, .npz and .safetensors files, and "
            "checkpoints of Orbax, can be read"
        )
    try:
        with _named(path), opened_plain(path) as file:
            return reader(file)
    except ArgumentsError:
        raise
    except OSError as error:
        raise ArgumentsError(f"cannot load {path!r}: {error.strerror or error}") from None
    except Exception as error:  # numpy and zipfile report damage with many exception types
        detail = " ".join(str(error).split()) or type(error).__name__
        raise ArgumentsError(f"cannot load {path!r}: {detail}") from error


@contextmanager
def _named(path: str) -> Iterator[None]:
    """Add the path to the message of an ArgumentsError."""
    try:
        yield
    except ArgumentsError as error:
        raise ArgumentsError(f"cannot load {path!r}: {error.message}", error.hint) from None


def _numpy(file: BinaryIO) -> np.ndarray | Arrays:
    # Check the first bytes, so that numpy does not read a file of another format as a pickle.
    start = file.read(6)
    file.seek(0)
    if not start.startswith((b"\x93NUMPY", b"PK\x03\x04", b"PK\x05\x06")):
        raise ArgumentsError("it is not a file written by numpy.save or numpy.savez")
    loaded = np.load(file, allow_pickle=False)
    if isinstance(loaded, np.ndarray):
        return loaded
    size = sum(entry.file_size for entry in loaded.zip.infolist())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > memory:  # decompressed data may be a thousand times larger
        message = f"it holds {size:,} bytes of arrays, but this machine has {memory:,} of memory"
        raise ArgumentsError(message)
    return Arrays({name: loaded[name] for name in loaded.files})


def _safetensors(file: BinaryIO) -> Arrays:
    empty = os.fstat(file.fileno()).st_size == 0
    data = b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(_MAX_HEADER, len(data) - 8):
        raise ArgumentsError("its header is truncated, or it is not a safetensors file")
    try:
        header = json.loads(data[8 : 8 + size])
    except (ValueError, RecursionError):
        raise ArgumentsError("its header is damaged, or it is not a safetensors file") from None
    if not isinstance(header, dict):
        raise ArgumentsError("its header is damaged")
    header.pop("__metadata__", None)
    buffer = memoryview(data)[8 + size :]
    return Arrays({name: _tensor(name, entry, buffer) for name, entry in header.items()})


def _tensor(name: str, entry: Any, buffer: memoryview) -> np.ndarray:
    try:
        dtype_name, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise ArgumentsError(f"its entry for '{name}' is damaged") from None
    if dtype_name not in _SAFETENSORS_DTYPES:
        raise ArgumentsError(f"'{name}' has dtype {dtype_name}, which is not supported")
    dtype = np.dtype(_SAFETENSORS_DTYPES[dtype_name])
    numbers = [*shape, begin, end] if isinstance(shape, list) else [-1]
    if not all(type(n) is int and n >= 0 for n in numbers):
        raise ArgumentsError(f"its entry for '{name}' is damaged")
    if end > len(buffer) or end - begin != math.prod(shape) * dtype.itemsize:
        raise ArgumentsError(
            f"its data for '{name}' is truncated, or its size differs from the header's"
        )
    return np.frombuffer(buffer[begin:end], dtype).reshape(shape)
