"""HLO modules in files: text, protos, and the folders that `--xla_dump_to` fills, as TARGETs.

step.hlo, step.txt, step.hlo.pb     a module, as text or as a proto
dump/                               the only module in a folder of `--xla_dump_to`
dump/jit_step, dump/jit_step@2      one of its modules by name; the second of this name
dump/jit_step:before                before XLA's optimizations

stored_module("dump/jit_step").module.entry.instructions
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from jaxprtool.errors import TargetError, UnsupportedError, did_you_mean
from jaxprtool.files import opened_plain

if TYPE_CHECKING:
    from jaxprtool.ir.hlo.buffers import BufferAssignment
    from jaxprtool.ir.hlo.module import HloModule

#: The end of a TARGET that names a module before XLA's optimizations.
BEFORE = ":before"

#: A file of `--xla_dump_to` with a module; other files of the folder are about its compilation.
_DUMPED = re.compile(
    r"module_(?P<number>\d+)\.(?P<name>.+?)\."
    r"(?:(?P<before>before_optimizations)|[\w.]*after_optimizations)\.(?P<kind>txt|hlo\.pb)"
)

#: What the text of a module begins with, after comments.
_TEXT = re.compile(rb"(?:\s|//[^\n]*\n|/\*.*?\*/)*HloModule\b", re.DOTALL)

_SUFFIXES = (".hlo", ".txt", ".pb")

#: The field of an `HloModuleProto` that an `HloProto`, which has one in its field 1, lacks.
_ENTRY_NAME = 2

#: The number of modules of a folder that an error lists.
_LISTED = 6


@dataclass(frozen=True)
class StoredModule:
    """A module that was read from a file.

    Attributes:
        module: The module.
        assignment: XLA's assignment of its buffers; None if the file has none.
    """

    module: HloModule
    assignment: BufferAssignment | None


class _Dumped(NamedTuple):
    """A module in a folder of `--xla_dump_to`."""

    number: int
    name: str
    is_before: bool
    kind: str
    path: str


def is_hlo(target: str) -> bool:
    """Return True if a TARGET is an HLO module in a file or a folder of `--xla_dump_to`."""
    if os.path.isdir(target):
        return any(_dumped(target))
    if os.path.isfile(target):
        return target.endswith(_SUFFIXES) and _has_module(target)
    folder, name = os.path.split(target)
    is_function = ".py" in name
    return not is_function and os.path.isdir(folder) and any(_dumped(folder))


def stored_module(target: str, call: Callable[..., bytes] = operator.call) -> StoredModule:
    """Return the module that a TARGET names.

    Args:
        target: The TARGET.
        call: Calls XLA's parser, which ends the process on some invalid texts.

    Raises:
        TargetError: If there is no such module, or jaxlib cannot parse it.
    """
    # Most targets are programs: their commands only ask `is_hlo`.
    from jaxprtool.ir.hlo.buffers import read_assignment
    from jaxprtool.ir.hlo.module import message, read_module

    path = target if os.path.isfile(target) else _chosen(target)
    try:
        with opened_plain(path) as file:
            data = file.read()
            since = os.fstat(file.fileno()).st_mtime
    except OSError as error:
        raise TargetError(f"cannot read '{path}': {error.strerror or error}") from None
    if _TEXT.match(data):
        text = data.decode(errors="replace")
        return StoredModule(read_module(_parsed(path, text, call), since, text), None)
    try:
        fields = message(data)
        if _ENTRY_NAME in fields:
            return StoredModule(read_module(data, since), None)
        module = read_module(fields[1][-1], since)
        assignment = fields[3][-1] if 3 in fields else None
    except (IndexError, KeyError, StopIteration, ValueError, TypeError):
        raise TargetError(
            f"'{path}' has no HLO module", "write one with XLA_FLAGS=--xla_dump_to=FOLDER"
        ) from None
    return StoredModule(module, None if assignment is None else read_assignment(assignment, module))


def _has_module(path: str) -> bool:
    try:
        with opened_plain(path) as file:
            if path.endswith(".pb"):
                return bool(file.read(1))
            return _TEXT.match(file.read(1 << 16)) is not None
    except OSError:
        return False


def _parsed(path: str, text: str, call: Callable[..., bytes]) -> bytes:
    from jaxprtool.jaxcompat.lowering import HloSyntaxError, parsed_hlo

    try:
        return call(parsed_hlo, text)
    except UnsupportedError as error:
        raise TargetError(f"{path}: the HLO parser of this jaxlib fails on it: {error}") from None
    except HloSyntaxError as error:
        reason = f"the HLO parser of this jaxlib does not know it: {error.reason}"
        raise TargetError(f"{path}:{error.line}: {reason}") from None


def _dumped(folder: str) -> Iterator[_Dumped]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if (found := _DUMPED.fullmatch(entry.name)) is not None:
                number, name, before, kind = found.groups()
                yield _Dumped(int(number), name, before is not None, kind, entry.path)


def _chosen(target: str) -> str:
    """Return the file of a module in a folder of `--xla_dump_to`."""
    is_before, bare = target.endswith(BEFORE), target.removesuffix(BEFORE)
    folder, name = (bare, "") if os.path.isdir(bare) else os.path.split(bare)
    name, at, position = name.partition("@")
    modules = [each for each in _dumped(folder) if each.is_before == is_before]
    named = _named(modules, name) if name else _named(modules, _only(folder, modules))
    index = int(position) if position.isdecimal() else 0 if at else 1
    if not 1 <= index <= len(named):
        if not named:
            names = {module.name for module in modules}
            hint = did_you_mean(name, names) or _listing(folder, modules)
            raise TargetError(f"'{folder}' has no module '{name}'", hint)
        raise TargetError(f"'{folder}' has {len(named)} modules '{name}', no '@{position}'")
    return named[index - 1].path


def _named(modules: Sequence[_Dumped], name: str) -> list[_Dumped]:
    """Return the modules of a name in order, each once: as a proto, which also has its buffers."""
    by_number: dict[int, _Dumped] = {}
    for module in sorted(modules, key=lambda module: module.kind != "txt"):
        if module.name == name:
            by_number[module.number] = module
    return [by_number[number] for number in sorted(by_number)]


def _only(folder: str, modules: Sequence[_Dumped]) -> str:
    names = {module.name for module in modules}
    if len(names) == 1:
        return names.pop()
    what = f"{len(names)} modules" if names else "no modules of this stage"
    raise TargetError(f"'{folder}' has {what}: choose one", _listing(folder, modules))


def _listing(folder: str, modules: Sequence[_Dumped]) -> str:
    """Return the names of the largest modules, as TARGETs."""
    sizes: dict[str, int] = {}
    for module in modules:
        sizes[module.name] = max(os.path.getsize(module.path), sizes.get(module.name, 0))
    largest = sorted(sizes, key=lambda name: -sizes[name])
    listed = ", ".join(os.path.join(folder, name) for name in largest[:_LISTED])
    return f"the largest: {listed}" if listed else f"is '{folder}' the folder of --xla_dump_to?"
