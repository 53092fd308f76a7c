"""A module before XLA's partitioner: its values with their specs, lines and names.

In this module arrays have their global shapes. Values pass through tuples, calls and loops; `maker`
finds the operation that computes a value.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from jaxprtool.ir.basics.caches import cached_method
from jaxprtool.ir.hlo.device_tiles import DeviceTiles, device_tiles
from jaxprtool.ir.hlo.mesh_axes import MeshAxes, Spec, spec_text
from jaxprtool.ir.hlo.module import Instruction, Module, Shape
from jaxprtool.ir.source.frames import BEHIND, Frames
from jaxprtool.jaxcompat.source_locations import UserFrame

#: Operations that pass on an operand, or lay it out anew.
LAYOUT = frozenset({"bitcast", "copy", "reshape", "transpose", "convert"})

#: Custom calls that pass a value into a `shard_map`, and out of it.
MAPPED = frozenset({"SPMDFullToShardShape", "SPMDShardToFullShape"})

#: The maximum number of instructions through which a value is followed.
_STEPS = 64


class Place(NamedTuple):
    """The path and call stack that JAX gave an operation.

    Attributes:
        path: The path that JAX gave it.
        frames: Its call stack, the innermost frame first.
    """

    path: str
    frames: tuple[UserFrame, ...]

    def inside(self, call: Place) -> Place:
        """Return the place of the operation after a call of its function is inlined."""
        path = "/".join(filter(None, (call.path, self.path)))
        return Place(path, tuple(dict.fromkeys((*self.frames, *call.frames))))


_NOWHERE = Place("", ())


class ShardedModule:
    """The values of a module before the partitioner.

    Args:
        module: The module.
        axes: The axes of the user's mesh.
        frames: Reads frames, and decides which are the user's.
        result_names: The names of the results of the program.
    """

    def __init__(
        self, module: Module, axes: MeshAxes, frames: Frames, result_names: Sequence[str] = ()
    ):
        self.module, self.axes, self._frames = module, axes, frames
        self._result_names = result_names
        self._known: dict[tuple[bytes, int], DeviceTiles | None] = {}

    @cached_property
    def users(self) -> dict[int, list[Instruction]]:
        """The instructions that read each instruction, by number."""
        found = defaultdict[int, list[Instruction]](list)
        for each in self.module.instructions.values():
            for operand in dict.fromkeys(each.operands):
                found[operand].append(each)
        return found

    @cached_property
    def results(self) -> dict[str, Instruction]:
        """The instruction that returns each result, by name."""
        root = self.module.entry.root
        given = list(self.operands(root)) if root.opcode == "tuple" else [root]
        # The tokens of effects come before the results of the program.
        return dict(zip(self._result_names[::-1], given[::-1], strict=False))

    @cached_property
    def result_tiles(self) -> dict[str, DeviceTiles | None]:
        """The tiles of each result, by name. XLA may move a value before it returns it."""
        root = self.module.entry.root
        if root.opcode != "tuple" or 40 not in root.fields:  # then results do not move
            return {name: self.tiles(made) for name, made in self.results.items()}
        found = device_tiles(root, self.axes.devices)
        return dict(zip(self._result_names[::-1], found[::-1], strict=False))

    @cached_property
    def _names_of_results(self) -> dict[int, str]:
        return {each.id: name for name, each in self.results.items()}

    @cached_property
    def _callers(self) -> dict[int, list[Instruction]]:
        """The instructions that call each computation, by number."""
        callers = defaultdict[int, list[Instruction]](list)
        for each in self.module.instructions.values():
            for number in each.calls:
                callers[number].append(each)
        return callers

    @cached_property
    def _computation_of(self) -> dict[int, int]:
        computations = self.module.computations.values()
        return {i.id: each.id for each in computations for i in each.instructions}

    @cached_method
    def tiles(self, instruction: Instruction) -> DeviceTiles | None:
        """Return the tiles of an array; None for a tuple, or an array on one device."""
        if instruction.shape.dtype == "tuple":
            return None
        key = bytes(instruction.fields.get(40, [b""])[-1]), len(instruction.shape.sizes)
        if key not in self._known:  # many instructions share a sharding
            self._known[key] = device_tiles(instruction, self.axes.devices)[0]
        return self._known[key]

    @cached_method
    def spec(self, instruction: Instruction) -> Spec | None:
        """Return the spec of an array; None if it has none."""
        tiles = self.tiles(instruction)
        return None if tiles is None else self._spec_of(tiles)

    def is_on_one_device(self, instruction: Instruction) -> bool:
        """Return True for an array that only one device has, as the result of a callback."""
        is_array = instruction.shape.dtype not in ("tuple", "token")
        return is_array and self.tiles(instruction) is None

    def result_for(self, consumer: Instruction, position: int) -> Shape:
        """Return the shape of the result; of several results, that of the one for an operand."""
        parts = consumer.shape.parts
        return parts[min(position, len(parts) - 1)] if parts else consumer.shape

    @cached_method
    def spec_for(self, consumer: Instruction, position: int) -> Spec | None:
        """Return the spec of the result; of several results, that of the one for an operand.

        For a result on one device it is a spec without axes.
        """
        shape, parts = self.result_for(consumer, position), consumer.shape.parts
        found = device_tiles(consumer, self.axes.devices) if parts else (self.tiles(consumer),)
        if shape.dtype in ("tuple", "token") or len(found) != max(len(parts), 1):
            return None
        tiles = found[min(position, len(found) - 1)]
        return ((),) * len(shape.sizes) if tiles is None else self._spec_of(tiles)

    @cached_method
    def _spec_of(self, tiles: DeviceTiles) -> Spec | None:
        return self.axes.spec(tiles)

    def spec_text(self, instruction: Instruction) -> str:
        """Return the spec of an array as text, "" if it has none."""
        tiles = None if instruction.shape.dtype == "tuple" else self.tiles(instruction)
        if tiles is None:
            return "one device" if self.is_on_one_device(instruction) else ""
        return self.text_of(tiles)

    def text_of(self, tiles: DeviceTiles, reduced: Sequence[str] = ()) -> str:
        """Return the spec of tiles as text, "" if axes cannot describe them.

        Args:
            tiles: The tiles.
            reduced: The axes that a type names as reduced, which have no effect on tiles.
        """
        spec = self._spec_of(tiles)
        unreduced = self.axes.unreduced(tiles)
        return "" if spec is None else spec_text(spec, unreduced=unreduced, reduced=reduced)

    def frames(self, instruction: Instruction) -> tuple[UserFrame, ...]:
        """Return the call stack of an instruction, the innermost frame first."""
        return own_frames(self.module, instruction)

    @cached_method
    def places(self, instruction: Instruction) -> tuple[Place, ...]:
        """Return the path and the call stack of an instruction after XLA inlined its function.

        There is one place for each call of the function.
        """
        own = Place(instruction.path, self.frames(instruction))
        return tuple(map(own.inside, self._around(self._computation_of[instruction.id])))

    @cached_method
    def _around(self, computation: int) -> tuple[Place, ...]:
        """Return the places of the calls, or of the loop, that run a computation."""
        found: dict[Place, None] = {}
        for caller in self._callers[computation]:
            is_call = caller.opcode == "call"
            outer = self._around(self._computation_of[caller.id])
            found |= dict.fromkeys(self.places(caller) if is_call else outer)
        return tuple(found)[:_STEPS] or (_NOWHERE,)

    def line(self, instruction: Instruction) -> str:
        """Return the user's line of an instruction, followed by the library's; "" if unknown."""
        return self.line_of(self.frames(instruction))

    def line_of(self, frames: Sequence[UserFrame]) -> str:
        """Return the user's line of a call stack, followed by the library's; "" if unknown."""
        return self._frames.location_text(self._frames.location_in(frames))

    def name(self, instruction: Instruction) -> str:
        """Return the path of an argument, or an operation and its line: `tanh at model.py:9`."""
        if self.is_argument(instruction):
            return instruction.op_name or instruction.name
        if not instruction.op_name and instruction.id in self._names_of_results:
            return self._names_of_results[instruction.id]
        if instruction.opcode == "get-tuple-element":
            caller = self._caller(self.module.instructions[instruction.operands[0]])
            if caller is not None and caller.opcode == "while":
                return f"carry of {self.name(caller)}"
        line = self.line(instruction).partition(BEHIND)[0]
        scope, _, primitive = instruction.path.rpartition("/")
        if not (primitive and (scope or line)):  # XLA's own, which it numbers
            primitive = instruction.opcode
        return " at ".join(filter(None, (primitive, line)))

    def value_name(self, instruction: Instruction) -> str:
        """Return the name of a value's operation; for a slice of a `scan`, `slice of params`."""
        made = found = self.maker(instruction)
        is_slice = False
        while found.opcode in ("reshape", "dynamic-slice"):
            is_slice |= found.opcode == "dynamic-slice"
            found = self.maker(next(self.operands(found)))
        is_inside = self._computation_of[made.id] != self.module.entry.id
        if is_slice and is_inside and self.is_argument(found) and found.op_name:
            return f"slice of {found.op_name}"
        return self.name(made)

    def reader_name(self, consumer: Instruction, position: int) -> str:
        """Return the name of an operation; for a tuple, that of the result or loop that it is for.

        Args:
            consumer: The operation.
            position: The position of the operand that it reads; negative for the operation's own
                result.
        """
        if position < 0:
            return self._names_of_results.get(consumer.id, self.name(consumer))
        if consumer.opcode != "tuple":
            return self.name(consumer)
        if consumer is self.module.entry.root:
            first = len(consumer.operands) - len(self._result_names)  # tokens come before
            return self._result_names[position - first] if position >= first else "token"
        computation = self.module.computations[self._computation_of[consumer.id]]
        readers = self.users[consumer.id]
        if consumer is computation.root:
            readers = self._callers[computation.id]
        return self.name(readers[0] if readers else consumer)

    def is_argument(self, instruction: Instruction) -> bool:
        """Return True for an argument of the program."""
        is_entry = self._computation_of.get(instruction.id) == self.module.entry.id
        return instruction.opcode == "parameter" and is_entry

    def maker(self, instruction: Instruction) -> Instruction:
        """Return the operation that computes a value, or the argument that it is.

        Copies, tuples, branches, and loops that only read the value are passed through.
        """
        found = instruction
        for _ in range(_STEPS):
            before = self.passed(found)
            if before is None:
                return found
            found = before
        return found

    def passed(self, instruction: Instruction) -> Instruction | None:
        """Return the value that an instruction passes on unchanged; None if it computes one."""
        is_mapped = instruction.custom_call_target in MAPPED
        if instruction.opcode in ("copy", "bitcast", "opt-barrier") or is_mapped:
            return self._operand(instruction, 0)
        if instruction.opcode == "get-tuple-element":
            operand = self._operand(instruction, 0)
            return None if operand is None else self._element(operand, instruction.tuple_index)
        if instruction.opcode == "call":
            return self.module.computations[instruction.calls[0]].root
        return self._given_to(instruction)

    def _given_to(self, parameter: Instruction) -> Instruction | None:
        """Return the operand that a call or a branch passes to a parameter."""
        caller = self._caller(parameter)
        if caller is not None and caller.opcode == "call":
            return self._operand(caller, parameter.parameter_number)
        if caller is not None and caller.opcode == "conditional":
            branch = caller.calls.index(self._computation_of[parameter.id])
            return self._operand(caller, 1 + branch)
        return None

    def _element(self, value: Instruction, index: int) -> Instruction | None:
        """Return an element of a tuple; for a loop-invariant element, the operand of the loop."""
        for _ in range(_STEPS):
            if value.opcode == "tuple":
                return self._operand(value, index)
            caller = self._caller(value)
            if caller is not None and caller.opcode == "while":
                if not self._is_kept(value, index):
                    return None
                value = self.module.instructions[caller.operands[0]]
            elif value.opcode == "call":
                value = self.module.computations[value.calls[0]].root
            elif (given := self._given_to(value)) is not None:
                value = given
            elif value.opcode in ("copy", "opt-barrier"):
                value = self.module.instructions[value.operands[0]]
            else:
                return None
        return None

    def _is_kept(self, carry: Instruction, index: int) -> bool:
        """Return True if the body of a loop returns an element of its carry unchanged."""
        root = self.module.computations[self._computation_of[carry.id]].root
        returned = self._operand(root, index) if root.opcode == "tuple" else None
        while returned is not None and returned.opcode == "copy":
            returned = self._operand(returned, 0)
        return (
            returned is not None
            and returned.opcode == "get-tuple-element"
            and returned.operands == (carry.id,)
            and returned.tuple_index == index
        )

    def _caller(self, instruction: Instruction) -> Instruction | None:
        """Return the instruction that calls the computation of a parameter."""
        return self.caller(instruction) if instruction.opcode == "parameter" else None

    def caller(self, instruction: Instruction) -> Instruction | None:
        """Return the instruction that calls the computation of an instruction; None if none."""
        return next(iter(self._callers[self._computation_of[instruction.id]]), None)

    def _operand(self, instruction: Instruction, position: int) -> Instruction | None:
        if position >= len(instruction.operands):
            return None
        return self.module.instructions.get(instruction.operands[position])

    def operands(self, instruction: Instruction) -> Iterator[Instruction]:
        """Yield the operands of an instruction."""
        return (self.module.instructions[each] for each in instruction.operands)


def own_frames(module: Module, instruction: Instruction) -> tuple[UserFrame, ...]:
    """Return the call stack of an instruction, each frame once, the innermost first.

    The body of a loop has the stack of the loop behind its own.
    """
    return tuple(dict.fromkeys(module.frames(instruction)))
