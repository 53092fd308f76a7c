"""Reading of Programs from StableHLO modules: text, bytecode and artifacts of `jax.export`.

    program = read_module_program(data, "model.mlir")

jaxlib parses and verifies the module. The operations of `main` are then traced one by one: the
rule of an operation calls the `lax` function that computes the same. The table "stablehlo" has the
rules by operation, and is open to plug-ins:

    @rule("stablehlo", "my_dialect.square")
    def _(op, x):
        return lax.mul(x, x)

A rule takes an `Operation` and its operands, and returns its results. It takes each attribute that
it knows by `op.take`. An attribute that no rule has taken, and a result of another type than the
module says, are errors: an operation is read with all it says, or refused by name. Rules for
`custom_call` are named by the target, as "@Sharding", and those of a composite by its name.

Functions become jits of their names, each traced once. Locations become lines and name scopes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import export, lax
from jax.extend import mlir as jax_mlir
from jax.extend.mlir import ir as mlir_ir
from jax.extend.mlir.dialects import func as func_dialect
from jax.extend.source_info_util import SourceInfo, user_context
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from jaxprtool import jaxcompat
from jaxprtool.errors import (
    ArgumentsError,
    JaxprToolError,
    ProgramFileError,
    UnsupportedError,
    described,
)
from jaxprtool.ir.equations import equations, named
from jaxprtool.ir.expansions import expansion_rules
from jaxprtool.ir.process import without_collector
from jaxprtool.ir.program import JitOptions, Program, ValueOptions, Values
from jaxprtool.ir.rules import RuleTable, rule
from jaxprtool.jaxcompat import ClosedJaxpr, JaxprEqn
from jaxprtool.jaxcompat.source_locations import UserFrame

#: MLIR's bindings, which have no types.
ir: Any = mlir_ir
func: Any = func_dialect

# --- table ----------------------------------------------------------------------------------------
# The open table of rules, and what its rules take.

StableHloRule: TypeAlias = Callable[..., Any]

#: Rules by the name of the operation, of a composite, or of the target of a custom call with "@".
stablehlo_rules: RuleTable[StableHloRule] = RuleTable()

#: Rules that take operands as they are, with those that are `Lazy`.
LAZY: set[StableHloRule] = set()


def lazy(function: StableHloRule) -> StableHloRule:
    """Mark a rule that takes `Lazy` operands."""
    LAZY.add(function)
    return function


class Lazy:
    """A value whose equations are only written if an operation needs it.

    Attributes:
        shape: Its shape.
        force: Writes the equations, and returns the value.
    """

    def __init__(self, shape: Sequence[int], force: Callable[[], Any]) -> None:
        self.shape = tuple(shape)
        self.force = force


class Splat(Lazy):
    """A constant all of whose elements are one scalar."""

    def __init__(self, scalar: Any, shape: Sequence[int]) -> None:
        super().__init__(shape, self._filled)
        self.scalar = scalar

    def _filled(self) -> Any:
        return lax.broadcast_in_dim(self.scalar, self.shape, ()) if self.shape else self.scalar


class Aggregate(Lazy):
    """A tuple of values; a token, which orders effects, is an empty one."""

    def __init__(self, elements: Sequence[Any]) -> None:
        super().__init__((), lambda: self)
        self.elements = tuple(elements)


def leaves(values: Sequence[Any]) -> list[Any]:
    """Return the arrays among some values and in their tuples, with their equations written."""
    arrays: list[Any] = []
    for value in values:
        arrays += leaves(value.elements) if isinstance(value, Aggregate) else [forced(value)]
    return arrays


def bundled(kinds: Sequence[Any], arrays: Iterator[Any]) -> list[Any]:
    """Return values of some types of the module made of arrays."""
    return [
        next(arrays) if parts is None else Aggregate(bundled(parts, arrays))
        for parts in map(_parts, kinds)
    ]


def _parts(kind: Any) -> list[Any] | None:
    """Return the types in a tuple, none for a token; None for the type of an array."""
    if isinstance(kind, ir.TupleType):
        return [kind.get_type(i) for i in range(kind.num_types)]
    return [] if str(kind) == _TOKEN else None


def forced(value: Any) -> Any:
    """Return a value, with its equations written."""
    return value.force() if isinstance(value, Lazy) else value


class Operation:
    """An operation of a module, as rules see it.

    Attributes:
        name: Its name, such as "stablehlo.add".
        op: The operation in JAX's MLIR bindings.
        reader: The reader of its module.
        attributes: The attributes that no rule has taken.
    """

    __slots__ = ("attributes", "name", "op", "reader")

    def __init__(self, op: Any, reader: ModuleReader) -> None:
        self.op = op
        self.name: str = op.name
        self.reader = reader
        attributes = op.attributes
        self.attributes = {name: attributes[name] for name in attribute_names(attributes)}

    def take(self, name: str, default: Any = None) -> Any:
        """Return an attribute as a Python value, and count it as known; `default` without it."""
        attribute = self.attributes.pop(name, None)
        return default if attribute is None else self.reader.value_of(attribute)

    def use_attributes_of_composite(self) -> None:
        """Take the attributes of the operation that a composite stands for, for its own."""
        inner = self.attributes.get("composite_attributes", {})
        self.attributes = {name: inner[name] for name in attribute_names(inner)}

    def require(self, **values: Any) -> None:
        """Refuse the operation unless attributes have these values, or are absent."""
        for name, value in values.items():
            if (other := self.take(name, value)) != value:
                raise self.refused(f"{name} = {other}")

    @property
    def result_types(self) -> list[Any]:
        """The types of the arrays in its results: `ShapeDtypeStruct`s."""
        return self.reader.types_of([result.type for result in self.op.results])

    @property
    def result_type(self) -> Any:
        """The type of its only result."""
        return self.reader.type_of(self.op.results[0].type)

    def operand_types(self) -> list[Any]:
        """Return the types of its operands."""
        return [self.reader.type_of(operand.type) for operand in self.op.operands]

    @property
    def kind(self) -> str:
        """Its name, with the target of a custom call or the name of a composite."""
        return _kind(self.op)

    @property
    def place(self) -> str:
        """Its place in messages: ` at model.py:9`, or nothing."""
        return self.reader.place(self.op)

    def block(self, number: int = 0) -> Any:
        """Return the block of a region."""
        return self.op.regions[number].blocks[0]

    def body(self, number: int = 0) -> Callable[..., list[Any]]:
        """Return a region as a function of the arguments of its block."""
        return partial(self.reader.run, self.block(number), self.op)

    def refused(self, why: str) -> UnsupportedError:
        """Return the error for an operation that cannot be read."""
        return self.reader.refused(self.op, why)


def attribute_names(attributes: Any) -> list[str]:
    """Return the names in a dictionary of attributes."""
    return [name if isinstance(name, str) else name.name for name in attributes]


# --- module ---------------------------------------------------------------------------------------
# Parsing: text, bytecode, portable artifacts.

_BYTECODE = b"ML\xefR"
_TEXT = re.compile(rb"\s*(//[^\n]*\n\s*)*(module\b|func\.func\b|#loc|#\w+ =|\"builtin\.module\")")


def is_stablehlo(data: bytes) -> bool:
    """Return True if these bytes begin like an MLIR module, in text or bytecode."""
    return data.startswith(_BYTECODE) or _TEXT.match(data) is not None


@contextmanager
def parsed_module(data: bytes, path: str) -> Iterator[Any]:
    """Yield the module in JAX's MLIR bindings, within its context.

    Raises:
        ProgramFileError: If it cannot be parsed, with the place.
    """
    with mlir.make_ir_context() as context:
        context.allow_unregistered_dialects = True
        if b"quant" in data:
            jaxcompat.load_quantized_types(context)
        try:
            if data.startswith(_BYTECODE) and b"StableHLO_v" in data[:64]:
                module = jax_mlir.deserialize_portable_artifact(data)
                module = module if isinstance(module, ir.Module) else ir.Module.parse(module)
            else:
                module = ir.Module.parse(data)
        except Exception as error:  # jaxlib raises its own errors, which have no common class
            raise ProgramFileError(f"{path}{_parse_error(error)}") from error
        yield module


def _parse_error(error: Exception) -> str:
    """Return the first complaint of MLIR's parser, with its line and column."""
    text = str(error)
    if match := re.search(r'error: "[^"]*"(:\d+:\d+): (.*)', text):
        return f"{match[1]}: {match[2].strip()}"
    return f" is not StableHLO: {described(error)}"


def read_module_program(
    data: bytes,
    path: str = "the module",
    shapes: Sequence[Sequence[int]] | None = None,
    opaque: bool = False,
) -> Program:
    """Return the program of a StableHLO module.

    Args:
        data: The text or the bytecode of the module.
        path: Its name in errors.
        shapes: The shapes of its arguments, if it leaves some of their sizes open.
        opaque: Whether operations that cannot be read are kept as equations.

    Raises:
        ProgramFileError: If it cannot be parsed, or its types are none of JAX.
        UnsupportedError: If it has an operation that cannot be read.
        ArgumentsError: If the shapes do not fit its arguments.
    """
    with parsed_module(data, path) as module, without_collector():
        reader = ModuleReader(module, path, opaque)
        if reader.has_open_sizes and (shapes := shapes or reader.shapes()) is not None:
            reader = ModuleReader(reader.refined(shapes), path, opaque)
        if reader.has_quantized_types:
            reader.lower_quantized()
            reader = ModuleReader(reader.module, path, opaque)
        return reader.program()


@rule(expansion_rules, "call_exported")
def exported_body(eqn: JaxprEqn) -> ClosedJaxpr:
    """Return what a `call_exported` equation computes, as a jaxpr of its operands.

    Raises:
        UnsupportedError: If the module was written for several platforms, or cannot be read.
    """
    artifact = eqn.params["exported"]
    name = f"the module of {named(eqn)}"
    if len(artifact.platforms) > 1:
        raise UnsupportedError(
            f"{name} is for several platforms ({', '.join(artifact.platforms)}), and chooses "
            "among them when it is compiled"
        )
    kept = artifact.module_kept_var_idx
    shapes = [eqn.invars[i].aval.shape for i in kept]
    program = read_module_program(artifact.mlir_module_serialized, name, shapes)
    call = jaxcompat.jaxpr_as_fun(program.jaxpr)

    def of_operands(*operands: Any) -> list[Any]:
        return list(call(*(operands[i] for i in kept)))

    return jaxcompat.traced_like(eqn, of_operands, eqn.invars)


#: Names that JAX gives to the module of a function under `jax.jit` and others.
_PREFIX = re.compile(r"^(jit|pmap|pjit)_+(?=.)")


class ModuleReader:
    """Reads the functions of one module."""

    def __init__(self, module: Any, path: str, opaque: bool = False) -> None:
        self.module = module
        self.path = path
        self.opaque = opaque
        self.values: dict[Any, Any] = {}
        self.functions: dict[str, Any] = {}
        self.symbols: dict[str, Any] = {}
        self._names: set[str] = set()  # of operations
        self.devices: Any = None
        for view in module.body.operations:
            op = view.operation
            if "sym_name" in op.attributes:
                kind = self.functions if op.name == "func.func" else self.symbols
                kind[op.attributes["sym_name"].value] = op
        self._jaxprs: dict[Any, ClosedJaxpr | None] = {}  # by name and mesh
        self._types: dict[Any, jax.ShapeDtypeStruct] = {}
        self._attributes: dict[Any, Any] = {}
        self.dtypes = _dtypes()
        self._rules: dict[str, StableHloRule | None] = {}
        self._skipped: set[Any] = set()

    # --- program ------------------------------------------------------------------------------

    def program(self) -> Program:
        """Return the program of the function `main`, or of the only public one."""
        main = self.main
        arguments = self._block_of(main).arguments
        self.devices = stablehlo_rules["builtin.module"](self)
        with jaxcompat.default_settings(self._is_wide):
            jaxpr = self._traced(main, self.devices)
        name = _PREFIX.sub("", self._name(main)) or "main"
        avals, out_avals = [*jaxpr.in_avals], [*jaxpr.out_avals]
        names = [_argument_name(x) for x in arguments for _ in self.types_of([x.type])]
        arg_names = _distinct("arg", names)
        names = [_result_name(attributes) for attributes in self._attributes_of(main, "res_attrs")]
        out_names = _distinct("result", names)
        program = Program(
            name=name,
            jaxpr=jaxpr,
            in_tree=jax.tree.structure((tuple(avals), {})),
            out_tree=jax.tree.structure(out_avals[0] if len(out_avals) == 1 else tuple(out_avals)),
            arg_names=arg_names,
            out_names=out_names,
        )
        return program.replace(jit=self._options(main, program))

    @cached_property
    def _kinds(self) -> dict[Any, Any]:
        """The types of all values of the module, with an operation of each, or a function."""
        kinds: dict[Any, Any] = {}

        def visit(op: Any) -> Any:
            self._names.add(op.name)
            for result in op.results:
                kinds.setdefault(result.type, op)
            return ir.WalkResult.ADVANCE

        self.module.operation.walk(visit)
        for function in self.functions.values():
            for region in function.regions:
                for argument in (x for block in region.blocks for x in block.arguments):
                    kinds.setdefault(argument.type, function)
        return kinds

    @property
    def has_open_sizes(self) -> bool:
        """Whether the module does not say all sizes in types and attributes."""
        is_open = any(not getattr(kind, "has_static_shape", True) for kind in self._kinds)
        return is_open or self.has_any(_OF_OPEN_SIZES)

    def has_any(self, names: Iterable[str]) -> bool:
        """Return True if the module has operations of some of these names."""
        return bool(self._kinds) and not self._names.isdisjoint(names)

    @property
    def has_quantized_types(self) -> bool:
        """Whether the module has quantized values."""
        return any("!quant." in str(kind) for kind in self._kinds)

    def lower_quantized(self) -> None:
        """Compute with the integers that store quantized values, as StableHLO defines it.

        Raises:
            UnsupportedError: If jaxlib does not lower an operation on quantized values.
        """
        try:
            jaxcompat.lower_quantized(self.module)
        except Exception as error:  # jaxlib's errors have no common class
            illegal = re.search(r"failed to legalize operation '([^']*)'", str(error))
            for op in self.operations_named(illegal[1]) if illegal else ():
                if any("!quant." in str(x.type) for x in (*op.operands, *op.results)):
                    refused = self.refused(op, "jaxlib lacks it for these quantized values")
                    refused.hint = None
                    raise refused from error
            why = self._first_complaint(error)
            raise UnsupportedError(f"{self.path}: quantized values: {why}") from error

    def operations_named(self, *names: str) -> list[Any]:
        """Return all operations of some names in `main`, and in the functions that it calls."""
        operations: list[Any] = []
        functions = [self.main]

        def visit(op: Any) -> Any:
            if op.name in names:
                operations.append(op)
            if op.name in ("func.call", "stablehlo.composite"):
                callee = op.attributes["callee" if op.name == "func.call" else "decomposition"]
                function = self.functions.get(callee.value)
                if function is not None and function not in functions:
                    functions.append(function)
            return ir.WalkResult.ADVANCE

        for function in functions:
            function.walk(visit)
        return operations

    def shapes(self) -> list[Sequence[int]] | None:
        """Return the shapes of the arguments of the program; None if the module leaves one open."""
        kinds = [argument.type for argument in self._block_of(self.main).arguments]
        is_open = any(not getattr(kind, "has_static_shape", True) for kind in kinds)
        return None if is_open else [getattr(kind, "shape", ()) for kind in kinds]

    def refined(self, shapes: Sequence[Sequence[int]]) -> Any:
        """Return the module for arguments of these shapes, with all sizes that follow."""
        arguments = [*self._block_of(self.main).arguments]
        if len(arguments) != len(shapes):
            message = f"{self.path} takes {len(arguments)} arguments, not {len(shapes)}"
            raise ArgumentsError(message)
        for i, (argument, shape) in enumerate(zip(arguments, shapes, strict=True)):
            kind = argument.type
            if not isinstance(kind, ir.RankedTensorType):
                continue
            if len(shape) != kind.rank or any(
                not kind.is_dynamic_dim(axis) and kind.get_dim_size(axis) != size
                for axis, size in enumerate(shape)
            ):
                message = f"{self.path}: argument {i} is {kind}, not of shape {[*shape]}"
                raise ArgumentsError(message)
        self._name_main()
        try:
            jaxcompat.set_argument_shapes(self.module, arguments, shapes)
            code = mlir.module_to_bytecode(self.module)
            return ir.Module.parse(jax_mlir.refine_polymorphic_shapes(code))
        except Exception as error:  # jaxlib's errors have no common class
            why = self._first_complaint(error)
            message = f"{self.path}: its sizes do not follow from the shapes: {why}"
            raise ProgramFileError(message) from error

    @cached_property
    def main(self) -> Any:
        """The function `main`, or the only public one."""
        public = [
            op
            for op in self.functions.values()
            if "sym_visibility" not in op.attributes
            or op.attributes["sym_visibility"].value == "public"
        ]
        if "main" not in self.functions and len(public) != 1:
            raise ProgramFileError(
                f"{self.path} has no function 'main', but "
                f"{', '.join(sorted(self.functions)) or 'no functions'}"
            )
        return self.functions.get("main") or public[0]

    def _name_main(self) -> None:
        """Give the function of the program the name `main`, as jaxlib expects it."""
        name = self.main.attributes["sym_name"]
        if name.value != "main":
            if "sym_name" not in self.module.operation.attributes:
                self.module.operation.attributes["sym_name"] = name
            self.main.attributes["sym_name"] = ir.StringAttr.get("main")
            for call in self.operations_named("func.call"):
                if call.attributes["callee"].value == name.value:
                    call.attributes["callee"] = ir.FlatSymbolRefAttr.get("main")

    def _name(self, main: Any) -> str:
        attributes = self.module.operation.attributes
        named = "sym_name" in attributes
        return (attributes if named else main.attributes)["sym_name"].value

    def _options(self, main: Any, program: Program) -> JitOptions | None:
        """Return the shardings of arguments and results, and what is donated; None without any."""
        arguments, results = (
            self._value_options(main, key, values)
            for key, values in (("arg_attrs", program.arguments), ("res_attrs", program.results))
        )
        return JitOptions(arguments, results) if arguments or results else None

    def _attributes_of(self, function: Any, key: str) -> list[Any]:
        """Return the attributes of the arguments or results of a function, one for each array."""
        kind = function.attributes["function_type"].value
        kinds = kind.inputs if key == "arg_attrs" else kind.results
        given = function.attributes[key] if key in function.attributes else [{}] * len(kinds)
        return [
            attributes
            for kind, attributes in zip(kinds, given, strict=True)
            for _ in self.types_of([kind])
        ]

    def _value_options(self, main: Any, key: str, values: Values) -> tuple[ValueOptions, ...]:
        op, options = Operation(main, self), []
        attributes_of_values = self._attributes_of(main, key)
        for (name, aval), attributes in zip(values, attributes_of_values, strict=True):
            donated = any(donor in attributes for donor in _DONORS)
            placement = None
            if "sdy.sharding" in attributes:
                placement = stablehlo_rules["sdy.sharding"](op, attributes["sdy.sharding"])
                placement = _closed(placement)
            if donated or placement is not None:
                shape = tuple(aval.shape)
                options.append(ValueOptions(name, shape, aval.dtype, placement, donated))
        return tuple(options)

    @cached_property
    def _is_wide(self) -> bool:
        """Whether the module has 64-bit types."""
        wide = {ir.Type.parse(name) for name in ("i64", "ui64", "f64", "complex<f64>")}
        return any(getattr(kind, "element_type", None) in wide for kind in self._kinds)

    # --- functions ----------------------------------------------------------------------------

    def call(self, name: str, args: Sequence[Any]) -> list[Any]:
        """Return the results of a call of a function: a jit of its name."""
        key = name, jax.sharding.get_abstract_mesh()
        if key not in self._jaxprs:
            self._jaxprs[key] = None
            self._jaxprs[key] = self._traced(self.functions[name])
        jaxpr = self._jaxprs[key]
        if jaxpr is None:
            raise UnsupportedError(f"{self.path}: the function '{name}' calls itself")
        results = jaxcompat.call_jit(jaxpr, name, leaves(args))
        kind = self.functions[name].attributes["function_type"].value
        return bundled(kind.results, iter(results))

    def run_function(self, name: str, args: Sequence[Any]) -> list[Any]:
        """Return the results of a call of a function, in place of the call."""
        function = self.functions[name]
        self._locate(function)
        return self.run(self._block_of(function), function, *args)

    def _traced(self, function: Any, devices: Any = None) -> ClosedJaxpr:
        name, block = function.attributes["sym_name"].value, self._block_of(function)
        kinds = [argument.type for argument in block.arguments]
        avals = [jax.core.ShapedArray(x.shape, x.dtype) for x in self.types_of(kinds)]
        self._locate(function)

        def flat(*args: Any) -> list[Any]:
            return leaves(self.run(block, function, *bundled(kinds, iter(args))))

        if devices is not None:
            avals = [jax.core.ShapedArray((devices.count, *x.shape), x.dtype) for x in avals]
        return jaxcompat.trace_flat(devices.mapped(flat) if devices else flat, name, avals)

    def _block_of(self, function: Any) -> Any:
        blocks = [*function.regions[0].blocks]
        if len(blocks) != 1:
            name = function.attributes["sym_name"].value
            what = "has several blocks" if blocks else "is only declared"
            raise ProgramFileError(f"{self.path}: the function '{name}' {what}")
        return blocks[0]

    def block_named(self, function: str) -> Any:
        """Return the block of a function."""
        return self._block_of(self.functions[function])

    def run(self, block: Any, parent: Any, *args: Any) -> list[Any]:
        """Return the results of a block for these arguments."""
        values, skipped = self.values, self._skipped
        values.update(zip(block.arguments, args, strict=True))
        for view in block.operations:
            op = view.operation
            name = op.name
            if name in _TERMINATORS:
                return [forced(values.get(operand)) for operand in op.operands]
            if skipped and op.results and op.results[0] in skipped:
                continue
            if name in _CONSTANTS:
                values[op.results[0]] = self._constant_or_kept(op)
                continue
            source = self._sources.get(op.location.attr)
            if source is None:
                self._evaluate(op)
            else:
                with user_context(source.traceback, name_stack=source.name_stack):
                    self._evaluate(op)
        raise ProgramFileError(f"{self.path}: a block of {parent.name} has no terminator")

    @contextmanager
    def skipping(self, results: set[Any]) -> Iterator[None]:
        """Leave out the operations of these results, whose values are known or not needed."""
        outer, self._skipped = self._skipped, results
        try:
            yield
        finally:
            self._skipped = outer

    def value(self, operand: Any) -> Any:
        """Return the value of an operand, with its equations written."""
        return forced(self.values[operand])

    def _evaluate(self, op: Any) -> None:
        operation = Operation(op, self)
        try:
            results = self._results(operation)
        except UnsupportedError as error:
            if not self.opaque or operation.name == "func.call":
                raise
            results = _kept(operation, error)
        kinds = [result.type for result in op.results]
        if len(results) != len(kinds) and len(results) == len(self.types_of(kinds)):
            results = bundled(kinds, iter(results))  # of a rule that knows arrays only
        for result, value in zip(op.results, results, strict=True):
            self._check_type(op, result.type, value)
            self.values[result] = value

    def _results(self, operation: Operation) -> Sequence[Any]:
        """Return the results of the rule of an operation."""
        function = self._rule(operation)
        if function is None:
            raise operation.refused("there is no rule for it")
        values = [self.values[operand] for operand in operation.op.operands]
        if function not in LAZY:
            values = [forced(value) for value in values]
        try:
            results = function(operation, *values)
        except JaxprToolError:
            raise
        except Exception as error:  # JAX's errors for what `lax` does not support
            raise operation.refused(described(error)) from error
        results = [*results] if isinstance(results, list | tuple) else [results]
        if (shardings := operation.attributes.pop("sdy.sharding", None)) is not None:
            results = stablehlo_rules["sdy.sharding_per_value"](operation, shardings, results)
        for name in _HINTS:
            operation.attributes.pop(name, None)
        if operation.attributes:
            name, value = next(iter(operation.attributes.items()))
            raise operation.refused(f"unknown attribute {name} = {value}")
        return results

    def _check_type(self, op: Any, kind: Any, value: Any) -> None:
        if isinstance(value, Aggregate):
            for part, element in zip(_parts(kind) or (), value.elements, strict=True):
                self._check_type(op, part, element)
            return
        wanted = self.type_of(kind)
        dtype = getattr(value, "dtype", wanted.dtype)
        if value.shape != wanted.shape or dtype != wanted.dtype:
            raise self.refused(op, f"it would return {dtype}{list(value.shape)}, not {kind}")

    def _rule(self, operation: Operation) -> StableHloRule | None:
        key = operation.name
        if key == "stablehlo.custom_call":
            key = f"@{operation.op.attributes['call_target_name'].value}"
        elif key == "stablehlo.composite":
            key = operation.op.attributes["name"].value
        if key not in self._rules:
            function = stablehlo_rules.get(key)
            self._rules[key] = function or stablehlo_rules.get(operation.name)
        if operation.name == "stablehlo.composite" and stablehlo_rules.get(key) is not None:
            operation.use_attributes_of_composite()
        return self._rules[key]

    # --- types and attributes -----------------------------------------------------------------

    def types_of(self, kinds: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """Return the types of the arrays in values of some types."""
        types: list[jax.ShapeDtypeStruct] = []
        for kind in kinds:
            parts = _parts(kind)
            types += [self.type_of(kind)] if parts is None else self.types_of(parts)
        return types

    def type_of(self, kind: Any) -> jax.ShapeDtypeStruct:
        """Return a type of the module as a `ShapeDtypeStruct`."""
        aval = self._types.get(kind)
        if aval is None:
            aval = self._types[kind] = self._parsed_type(kind)
        return aval

    def _parsed_type(self, kind: Any) -> jax.ShapeDtypeStruct:
        op = self._kinds.get(kind)
        what = self.path if op is None else f"{self.path}: {_kind(op)}{self.place(op)}"
        if not isinstance(kind, ir.RankedTensorType):
            raise ProgramFileError(f"{what} has values of type {kind}, which JAX lacks")
        if not kind.has_static_shape:
            raise ProgramFileError(
                f"{self.path} has sizes that are not known: {kind}",
                "give the shapes of its arguments in --args",
            )
        dtype = self.dtypes.get(str(kind.element_type))
        if dtype is None:
            raise ProgramFileError(f"{what} has elements of {kind.element_type}, not of JAX")
        return jax.ShapeDtypeStruct(tuple(kind.shape), dtype)

    def value_of(self, attribute: Any) -> Any:
        """Return an attribute as a Python value; enums and others as text."""
        try:
            return self._attributes[attribute]
        except KeyError:
            value = self._attributes[attribute] = self._parsed_value(attribute)
            return value

    def _parsed_value(self, attribute: Any) -> Any:
        match attribute:
            case ir.BoolAttr() | ir.IntegerAttr() | ir.FloatAttr() | ir.StringAttr():
                return attribute.value
            case ir.FlatSymbolRefAttr():
                return attribute.value
            case ir.DenseElementsAttr():
                return np.asarray(attribute)
            case ir.ArrayAttr():
                return [self.value_of(item) for item in attribute]
            case ir.DictAttr():
                return {name: self.value_of(attribute[name]) for name in attribute_names(attribute)}
            case ir.TypeAttr():
                return attribute.value
            case ir.DenseI64ArrayAttr() | ir.DenseBoolArrayAttr() | ir.DenseI32ArrayAttr():
                return [*attribute]
            case ir.UnitAttr():
                return True
        match = _ENUM.fullmatch(str(attribute))
        return match[1] if match else attribute

    # --- constants ----------------------------------------------------------------------------

    def _constant_or_kept(self, op: Any) -> Any:
        try:
            return self.constant(op)
        except UnsupportedError as error:
            if not self.opaque:
                raise
            return _opaque(Operation(op, self), [], error, "its elements were left out")[0]

    def constant(self, op: Any) -> Any:
        """Return the value of a constant: an array, or a `Splat`."""
        aval = self.type_of(op.results[0].type)
        if 0 in aval.shape:
            return np.zeros(aval.shape, aval.dtype)
        try:
            attribute = op.attributes["value"]
            is_splat = getattr(attribute, "is_splat", False)
            array = np.asarray(attribute)  # a view of the module's memory
        except TypeError:  # bf16, int4, complex and others
            array = None
        if array is None or array.dtype != aval.dtype:
            array = self._constant_in_text(op, aval)
            is_splat = array.size == 1
        array = array.view(aval.dtype)  # NumPy has two types for 64 bits, and JAX knows one
        if is_splat:
            return Splat(array.reshape(-1)[0], aval.shape)
        return array.reshape(aval.shape)

    def _constant_in_text(self, op: Any, aval: Any) -> np.ndarray:
        text = op.get_asm(large_elements_limit=None)
        if match := _RESOURCE.search(text):
            return self._resource(op, match[1], aval)
        match = re.search(r'dense<(?:"0x([0-9A-Fa-f]*)"|(.*?))> : tensor<', text, re.DOTALL)
        if match is None:
            raise self.refused(op, "its elements cannot be read")
        if match[1] is not None:
            return _from_bytes(bytes.fromhex(match[1]), aval)
        elements = _elements(match[2], aval.dtype)
        return elements.reshape(aval.shape if "[" in match[2] else ())

    def _resource(self, op: Any, name: str, aval: Any) -> np.ndarray:
        data = self._resources.get(name)
        if data is None:
            raise self.refused(op, f"its elements were left out of the file ({name})")
        return _from_bytes(data, aval)

    @cached_property
    def _resources(self) -> Mapping[str, bytes]:
        """The blobs at the end of the module; each begins with its alignment, in four bytes."""
        text = self.module.operation.get_asm(large_elements_limit=10)
        return {
            name.strip('"'): bytes.fromhex(digits)[4:]
            for name, digits in re.findall(r'^\s*("?[^\s:]+"?): "0x([0-9A-Fa-f]*)"', text, re.M)
        }

    # --- errors -------------------------------------------------------------------------------

    def refused(self, op: Any, why: str) -> UnsupportedError:
        """Return the error for an operation, with its place and the number of others like it."""
        counts: Counter[str] = Counter()

        def visit(op: Any) -> Any:
            counts[_kind(op)] += 1
            return ir.WalkResult.ADVANCE

        self.module.operation.walk(visit)
        others = counts[_kind(op)] - 1
        more = f" ({others} more of its kind)" if others else ""
        return UnsupportedError(
            f"{self.path}: {_kind(op)}{self.place(op)} cannot be read: {why}{more}",
            None if self.opaque else "--opaque keeps it as an equation that can be shown",
        )

    def _first_complaint(self, error: Exception) -> str:
        """Return the first complaint of a pass of jaxlib, with its place."""
        place = r'"?([^\s"]+)"?:(\d+):\d+: '
        match = re.search(f"{place}error: (.*)|error: {place}(.*)", str(error))
        if match is None:
            return described(error)
        file, line, why = filter(None, match.groups())
        return f"{why.strip()} at {self.path if file == _TEXT_OF_MODULE else file}:{line}"

    # --- locations ----------------------------------------------------------------------------

    def _frames_and_path(self, location: Any) -> tuple[list[UserFrame], list[str]]:
        """Return the frames of a location, the outermost first, and its name scopes.

        JAX writes the scopes and the primitive as a name around the frames: "jit(f)/mlp/tanh".
        Each frame is a name, of its function, around a line, and calls are call sites. A module
        without locations gets the lines of its own text.
        """
        names: list[str] = []
        while isinstance(location, ir.NameLoc) and not names:
            names = location.name_str.split("/")
            location = location.child_loc
        frames = _frames(location)
        if frames and frames[-1].file == _TEXT_OF_MODULE:
            return [_counted_from_zero(frames[-1])._replace(file=self.path)], names
        return frames, names

    def place(self, op: Any) -> str:
        """Return the place of an operation in messages: ` at model.py:9`, or nothing."""
        frames = self._frames_and_path(op.location)[0]
        return f" at {frames[-1].file}:{frames[-1].line}" if frames else ""

    @cached_property
    def _sources(self) -> dict[Any, SourceInfo]:
        return {}

    def _locate(self, function: Any) -> None:
        """Make the `source_info` of all operations of a function."""
        stack: list[tuple[Any, Sequence[str] | None]]
        stack = [(function, () if _is_public(function) else None)]
        places: dict[Any, tuple[Sequence[UserFrame], str]] = {}
        while stack:
            op, path = stack.pop()
            for region in op.regions:
                for block in region.blocks:
                    for view in block.operations:
                        inner = view.operation
                        location = inner.location
                        names = None
                        key = location.attr  # equal locations differ in their hash
                        if key not in self._sources and key not in places:
                            frames, names = self._frames_and_path(location)
                            places[key] = frames, _scope(names, path)
                        if len(inner.regions):
                            if names is None:
                                names = self._frames_and_path(location)[1]
                            stack.append((inner, names))
        infos = jaxcompat.source_infos([*places.values()])
        self._sources.update(zip(places, infos, strict=True))


#: The type of what orders effects.
_TOKEN = "!stablehlo.token"

#: The file of locations that MLIR's parser makes.
_TEXT_OF_MODULE = "-"

_CONSTANTS = frozenset(("stablehlo.constant", "sdy.constant"))

_TERMINATORS = frozenset(("func.return", "stablehlo.return", "sdy.return", "mhlo.return"))

#: Operations whose operands are what other operations have as attributes.
_OF_OPEN_SIZES = frozenset(
    f"stablehlo.{name}"
    for name in ("dynamic_conv", "dynamic_gather", "dynamic_pad", "real_dynamic_slice")
)

#: Attributes of donated arguments.
_DONORS = ("jax.buffer_donor", "tf.aliasing_output")

#: Attributes that do not change what an operation computes.
_HINTS = (
    "mhlo.frontend_attributes",
    "mhlo.sharding",
    "name",
    "result_layout",
    "sdy.sharding_rule",
    "xla_shape",
)

_ENUM = re.compile(r"#\w+<\w+ (\w+)>")
_RESOURCE = re.compile(r'dense_resource<"?([^">]+)"?>')


def _dtypes() -> dict[str, Any]:
    """Return JAX's dtypes by MLIR's names of element types."""
    from jax import numpy as jnp

    names = (
        "bool int2 int4 int8 int16 int32 int64 uint2 uint4 uint8 uint16 uint32 uint64 "
        "float4_e2m1fn float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz "
        "float8_e5m2 float8_e5m2fnuz float8_e8m0fnu bfloat16 float16 float32 float64 complex64 "
        "complex128"
    )
    scalars = (getattr(jnp, "bool_" if name == "bool" else name, None) for name in names.split())
    dtypes = [np.dtype(scalar) for scalar in scalars if scalar is not None]
    return {str(mlir.dtype_to_ir_type(dtype)): dtype for dtype in dtypes}


def _kind(op: Any) -> str:
    if op.name == "stablehlo.custom_call":
        return f"custom_call @{op.attributes['call_target_name'].value}"
    if op.name == "stablehlo.composite":
        return f"composite {op.attributes['name'].value}"
    return op.name


def _from_bytes(data: bytes, aval: Any) -> np.ndarray:
    dtype = np.dtype(aval.dtype)
    if dtype == np.bool_ and len(data) != aval.size:  # packed to bits
        return np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")[: aval.size].astype(
            bool
        )
    array = np.frombuffer(data, dtype)
    return array[0] if len(array) == 1 and aval.size != 1 else array.reshape(aval.shape)


_NUMBER = re.compile(r"0x[0-9A-Fa-f]+|[-+]?\d[\d.]*(?:[eE][-+]?\d+)?|true|false|[-+]?(?:nan|inf)")


def _elements(text: str, dtype: Any) -> np.ndarray:
    """Return the elements of a `dense` attribute in text: numbers, or pairs for complex ones."""
    part = np.dtype(dtype)
    if part.kind == "c":
        part = np.dtype(f"f{part.itemsize // 2}")
    values = [_number(token, part) for token in _NUMBER.findall(text)]
    return np.array(values, part).view(dtype)


def _number(token: str, dtype: np.dtype) -> Any:
    if token in ("true", "false"):
        return token == "true"
    if token.startswith("0x"):
        bits = int(token, 16)
        return np.frombuffer(bits.to_bytes(dtype.itemsize, "little"), dtype)[0]
    is_integer = jax.dtypes.issubdtype(dtype, np.integer)
    return np.array(int(token) if is_integer else float(token)).astype(dtype)


# --- opaque operations ----------------------------------------------------------------------------
# Operations that cannot be read, kept as equations.
#
# One that XLA compiles becomes a `call_exported` equation, whose artifact has the operation alone.
# It can be shown, written, lowered and run; it has no derivative and no batching rule. One of
# another dialect becomes an opaque equation, which can only be looked at.

#: Operations that do more than to compute their results.
_EFFECTS = ("infeed", "outfeed", "send", "recv")


def _kept(op: Operation, error: UnsupportedError) -> list[Any]:
    """Return the results of an equation that stands for an operation.

    Args:
        op: The operation.
        error: Why it cannot be read.

    Raises:
        UnsupportedError: If it has effects, whose order and count an equation would not keep.
    """
    has_effect = "has_side_effect" in op.op.attributes and op.op.attributes["has_side_effect"].value
    if has_effect or op.name.removeprefix("stablehlo.") in _EFFECTS:
        raise op.refused("it has effects, so --opaque does not keep it")
    captured = _captured(op.op)
    operands = [op.reader.value(x) for x in captured]
    kinds = [x.type for x in (*captured, *op.op.results)]
    if any(_parts(kind) is not None for kind in kinds):
        raise op.refused("it has tuples or tokens, so --opaque does not keep it")
    try:
        code = jaxcompat.portable_artifact(_alone(op, captured))
    except Exception as fault:  # jaxlib's errors have no common class
        return _opaque(op, operands, error, described(fault))
    artifact = _artifact(op, captured, code)
    traced = jax.make_jaxpr(artifact.call)(*artifact.in_avals)
    (eqn,) = (
        eqn
        for eqn in equations(jaxcompat.open_jaxpr(traced))
        if eqn.primitive.name == "call_exported"
    )
    return list(eqn.primitive.bind(*operands, **eqn.params))


def _captured(op: Any) -> list[Any]:
    """Return the operands of an operation, and the values that its regions read from outside."""
    inside: set[Any] = set()
    values: dict[Any, None] = dict.fromkeys(op.operands)

    def visit(inner: Any) -> Any:
        inside.update(inner.results)
        for region in inner.regions:
            for block in region.blocks:
                inside.update(block.arguments)
        return ir.WalkResult.ADVANCE

    op.walk(visit)

    def read(inner: Any) -> Any:
        values.update(dict.fromkeys(value for value in inner.operands if value not in inside))
        return ir.WalkResult.ADVANCE

    op.walk(read)
    return [*values]


def _alone(op: Operation, operands: Sequence[Any]) -> Any:
    """Return a module of an operation alone, and of the functions that it may call."""
    module = ir.Module.create(loc=op.op.location)
    results = [result.type for result in op.op.results]
    with ir.InsertionPoint(module.body), op.op.location:
        kind = ir.FunctionType.get([value.type for value in operands], results)
        main = func.FuncOp("main", kind, visibility="public")
        if any(_names_symbol(op.op.attributes[n]) for n in attribute_names(op.op.attributes)):
            main_of_module = op.reader.main.attributes["sym_name"].value
            for name, other in (op.reader.functions | op.reader.symbols).items():
                if name != main_of_module:
                    other.clone(ir.InsertionPoint(module.body))
        block = main.add_entry_block()
    with ir.InsertionPoint(block), op.op.location:
        copy = op.op.clone()
        arguments = dict(zip(operands, block.arguments, strict=True))

        def visit(inner: Any) -> Any:
            for i, value in enumerate(inner.operands):
                if value in arguments:
                    inner.operands[i] = arguments[value]
            return ir.WalkResult.ADVANCE

        copy.operation.walk(visit)
        func.ReturnOp([*copy.operation.results])
    module.operation.verify()
    return module


def _names_symbol(attribute: Any) -> bool:
    match attribute:
        case ir.FlatSymbolRefAttr():
            return True
        case ir.ArrayAttr():
            return any(map(_names_symbol, attribute))
    return False


def _artifact(op: Operation, operands: Sequence[Any], code: bytes) -> export.Exported:
    """Return an artifact of a module with the signature of an operation, for all platforms."""
    kinds = [op.reader.type_of(value.type) for value in operands]
    results = op.result_types

    def like(*args: Any) -> Any:
        return tuple(np.zeros(kind.shape, kind.dtype) for kind in results)

    checks = [export.DisabledSafetyCheck.platform()]
    jitted = jax.jit(like, keep_unused=True)
    artifact = export.export(jitted, disabled_checks=checks)(*kinds)
    return replace(artifact, fun_name=op.kind, mlir_module_serialized=code, _get_vjp=None)


def _opaque(op: Operation, operands: Sequence[Any], error: UnsupportedError, why: str) -> list[Any]:
    """Return the results of an opaque equation, with the attributes as its parameters."""
    avals = [jax.core.ShapedArray(kind.shape, kind.dtype) for kind in op.result_types]
    primitive = jaxcompat.opaque_primitive(
        op.kind,
        tuple(jax.typeof(x) for x in operands),
        tuple(avals),
        frozenset(),
        f"{op.kind}{op.place}",
        f"it has no rule, and is none of XLA's operations ({why})",
        error.hint,
    )
    names = attribute_names(op.op.attributes)
    return list(primitive.bind(*operands, **{n: str(op.op.attributes[n]) for n in names}))


# --- names ----------------------------------------------------------------------------------------
# Names of arguments and results, and the lines and scopes of locations.


def _argument_name(argument: Any) -> str | None:
    location = argument.location
    return location.name_str if isinstance(location, ir.NameLoc) else None


def _result_name(attributes: Any) -> str | None:
    return attributes["jax.result_info"].value if "jax.result_info" in attributes else None


def _closed(placement: NamedSharding | None) -> NamedSharding | None:
    """Return a sharding as `jax.jit` takes it, which leaves no dimension to the partitioner.

    None if it leaves all of them.
    """
    if placement is None:
        return None
    free = PartitionSpec.UNCONSTRAINED
    if placement.spec and all(part is free for part in placement.spec):
        return None
    parts = [None if part is free else part for part in placement.spec]
    return NamedSharding(placement.mesh, PartitionSpec(*parts))


def _distinct(prefix: str, names: Sequence[str | None]) -> tuple[str, ...]:
    """Return the names of arguments or results, or numbers if names are missing or equal."""
    form = "arg{}" if prefix == "arg" else "result" if len(names) == 1 else "result[{}]"
    numbered = [form.format(i) for i in range(len(names))]
    chosen = [name or number for name, number in zip(names, numbered, strict=True)]
    return tuple(chosen if len({*chosen}) == len(chosen) else numbered)


def _is_public(function: Any) -> bool:
    return function.attributes["sym_name"].value == "main"


def _frames(location: Any) -> list[UserFrame]:
    match location:
        case ir.CallSiteLoc():
            return _frames(location.caller) + _frames(location.callee)
        case ir.NameLoc():
            child = location.child_loc
            if isinstance(child, ir.FileLineColLoc):
                return [_frame(child, location.name_str)]
            return _frames(child)
        case ir.FileLineColLoc():
            return [_frame(location, "")]
        case ir.FusedLoc():
            return next(filter(None, map(_frames, location.locations)), [])
    return []


def _frame(place: Any, function: str) -> UserFrame:
    end = place.end_line or place.start_line
    columns = place.start_col, place.end_col  # JAX writes those of Python, from zero
    return UserFrame(place.filename, place.start_line, function, columns[0], end, columns[1])


def _counted_from_zero(frame: UserFrame) -> UserFrame:
    """Return a frame with the columns of MLIR's parser, which count from one, as from zero."""
    column, end = (max(place - 1, 0) for place in (frame.column, frame.end_column))
    return frame._replace(column=column, end_column=end)


#: What JAX's lowering puts between the name of a loop or branch and those of its body.
_OF_BODY = re.compile(r"body|cond|branch_\d+_fun|eval_jaxpr|closed_call")


def _scope(names: Sequence[str], outer: Sequence[str] | None) -> str:
    """Return the scopes of an operation in a body, without those of the operation around it."""
    scopes = [*names[:-1]]
    if outer is not None:
        if scopes[: len(outer)] == [*outer] and outer:
            scopes = scopes[len(outer) :]
            while scopes and _OF_BODY.fullmatch(scopes[0]):
                del scopes[0]
        elif not outer and scopes and scopes[0].startswith(("jit(", "pjit(", "pmap(")):
            del scopes[0]
    return "/".join(scopes)
