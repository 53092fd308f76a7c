"""The header of a `.jaxpr` file, and the source locations in it and in comments.

Argument and result structures are written with the name of each leaf in its place: `({'w':
"params['w']"}, 'x')` is a tree with two leaves and their names. The entry `jit` has the options of
`jax.jit`, by the names of arguments and results; options with default values are left out, down to
`jit = {}`:

    jit = {
        'donated': ("params['b']", "params['w']"),
        'in': {'x': NamedSharding(mesh=..., spec=P('data',))},
        'compiler_options': {'xla_cpu_enable_fast_math': True},
    }
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from pathlib import PurePath
from typing import Any, TypeAlias

import jax
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, Sharding
from jax.tree_util import PyTreeDef

from jaxprtool import jaxcompat
from jaxprtool.errors import ProgramFileError, did_you_mean
from jaxprtool.formats.jaxpr import values
from jaxprtool.formats.jaxpr.syntax import ExpressionSyntax, FileSyntax, FileText
from jaxprtool.formats.jaxpr.values import NO_MESH, TypeReader, TypeWriter
from jaxprtool.ir import source_text
from jaxprtool.ir.frames import Root, frames_now
from jaxprtool.ir.notation.signatures import VariableNames, source_names
from jaxprtool.ir.program import JitOptions, Program
from jaxprtool.ir.source_text import BEHIND
from jaxprtool.ir.symbols import Bound, LengthsBound, SizeBound
from jaxprtool.ir.trees import Tree, describe
from jaxprtool.jaxcompat import Jaxpr, JaxprEqn
from jaxprtool.jaxcompat.jaxprs import identity
from jaxprtool.jaxcompat.source_locations import PACKAGES, UserFrame, is_installed, naming_frame

# --- header ---------------------------------------------------------------------------------------
# The header of a `.jaxpr` file as values: the parts of a Program besides its jaxpr.

#: The maximal width of a header line.
_WIDTH = 100


# --- writing --------------------------------------------------------------------------------------


def header_text(
    program: Program,
    constants: str | None,
    tables: Mapping[str, Mapping[str, str]],
    types: TypeWriter,
    usual_mesh: AbstractMesh,
) -> str:
    """Return the header of a program's file, after its first line. Raises values.Unwritable.

    Args:
        program: The program.
        constants: The name of its constants file, if it has one.
        tables: The entries that are tables of texts, written if they are not empty.
        types: The writer of its types.
        usual_mesh: The abstract mesh of its equations.
    """
    entries = {
        "jax": repr(jax.__version__),
        **({"constants": repr(constants)} if constants else {}),
        "name": repr(program.name),
        "arguments": _structure_text(program.in_tree, program.arg_names),
        "results": _structure_text(program.out_tree, program.out_names),
    }
    if program.axis_env:
        entries["axis_env"] = values.encode(tuple(program.axis_env))
    if program.bounds:
        entries["bounds"] = _table({name: _bound(bound, types) for name, bound in program.bounds})
    if program.jit is not None:
        entries["jit"] = _table(_jit_parts(program, program.jit))
    if not usual_mesh.empty:
        entries["mesh"] = values.encode(usual_mesh)
    if types.meshes:
        entries["meshes"] = _table({name: mesh for mesh, name in types.meshes.items()})
    if types.scope is not None:
        entries["symbols"] = values.encode(
            tuple(c.text for c in jaxcompat.symbolic_constraints(types.scope))
        )
    entries |= {name: _table(table) for name, table in tables.items() if table}
    return "".join(f"{name} = {text}\n" for name, text in entries.items())


def _bound(bound: Bound, types: TypeWriter) -> Any:
    if isinstance(bound, SizeBound):
        least = {"at_least": bound.at_least, "at_most": bound.at_most}
        return least if bound.at_least else bound.at_most
    rows = bound.rows
    parts: dict[str, Any] = {
        "rows": types.dimension(rows) if jaxcompat.is_symbolic_dimension(rows) else str(rows)
    }
    if bound.longest is not None:
        parts["longest"] = bound.longest
    if bound.shortest:
        parts["shortest"] = bound.shortest
    return {**parts, "left_over": True} if bound.left_over else parts


def _jit_parts(program: Program, options: JitOptions) -> dict[str, Any]:
    arguments = options.of_arguments(program.arguments)
    results = options.of_results(program.results)
    parts = {
        "donated": tuple(a.name for a in arguments if a.donated),
        "in": {a.name: a.placement for a in arguments if a.placement is not None},
        "out": {r.name: r.placement for r in results if r.placement is not None},
        "compiler_options": dict(options.compiler_options),
        "keep_unused": options.keep_unused,
        "inline": jaxcompat.inline_as_word(options.inline),
    }
    return {name: value for name, value in parts.items() if value}


def _table(entries: Mapping[str, Any]) -> str:
    # In a tuple, since a single text may be a bare word.
    items = [f"{name!r}: {values.encode((value,))[1:-2]}" for name, value in entries.items()]
    return _bracketed("{", items, "}", 0)


def _structure_text(tree: PyTreeDef, names: tuple[str, ...]) -> str:
    """Return a tree structure with a name at each leaf."""
    return _tree_text(describe(tree), map(repr, names), 0)


def _tree_text(tree: Tree, leaves: Iterator[str], indent: int) -> str:
    if tree.kind == "leaf":
        return next(leaves)
    if tree.kind in ("none", "held"):
        return values.encode(tree.held)
    children = [_tree_text(child, leaves, indent + 4) for child in tree.children]
    if tree.kind in ("tuple", "list"):
        opening, closing = ("(", ")") if tree.kind == "tuple" else ("[", "]")
        alone = tree.kind == "tuple" and len(children) == 1
        return _bracketed(opening, children, f",{closing}" if alone else closing, indent)
    if tree.keys or tree.kind != "custom":
        items = [f"{key!r}: {child}" for key, child in zip(tree.keys, children, strict=True)]
        inside = _bracketed("{", items, "}", indent)
    else:
        inside = _bracketed("[", children, "]", indent)
    if tree.kind == "custom":
        return f"Node({tree.type_name!r}, {inside}" + (f", {tree.aux!r})" if tree.aux else ")")
    return inside if tree.kind == "dict" else f"{tree.kind}({inside})"


def _bracketed(opening: str, items: list[str], closing: str, indent: int) -> str:
    """Return items in brackets: on one line if they fit, else one item per line."""
    flat = f"{opening}{', '.join(items)}{closing}"
    if indent + len(flat) <= _WIDTH and "\n" not in flat:
        return flat
    lines = "".join(f"\n{' ' * (indent + 4)}{item}," for item in items)
    return f"{opening}{lines}\n{' ' * indent}{closing.removeprefix(',')}"


# --- reading --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Header:
    """The checked entries of a header; a structure is a tree and the names of its leaves."""

    jax: str
    name: str
    arguments: tuple[PyTreeDef, tuple[str, ...]]
    results: tuple[PyTreeDef, tuple[str, ...]]
    constants: str | None = None
    foreign: Mapping[str, str] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    stacks: Mapping[str, str] = field(default_factory=dict)
    axis_env: tuple[tuple[Hashable, int], ...] = ()
    bounds: Mapping[str, Any] = field(default_factory=dict)
    mesh: AbstractMesh = NO_MESH
    meshes: Mapping[str, AbstractMesh] = field(default_factory=dict)
    symbols: Any = None
    jit: Mapping[str, Any] | None = None


def read_header(source: FileText, entries: Mapping[str, ExpressionSyntax]) -> Header:
    """Return the header of a file. Raises ProgramFileError."""
    for name, entry in entries.items():
        if name not in _READERS:
            hint = did_you_mean(name, _READERS)
            raise source.fail(entry.position, f"unknown header entry '{name}'", hint)
    for name in REQUIRED:
        if name not in entries:
            end = max((e.position + len(e.text) for e in entries.values()), default=0)
            raise source.fail(end, f"the header has no entry '{name}'")
    return Header(**{name: _read(source, entry, name) for name, entry in entries.items()})


def _read(source: FileText, entry: ExpressionSyntax, name: str) -> Any:
    node = entry.parse(source)
    try:
        return _READERS[name](values.decode(node))
    except values.Unreadable as error:
        raise source.fail(entry.position_of(error.node), str(error)) from None
    except ProgramFileError:
        raise
    except Exception as error:  # trees and scopes made of invalid data may raise any class
        raise source.fail(entry.position, str(error) or type(error).__name__) from None


def _checked(is_good: Callable[[Any], bool], message: str) -> Callable[[Any], Any]:
    """Return a function that returns its argument, or raises ValueError with the message."""

    def check(value: Any) -> Any:
        if not is_good(value):
            raise ValueError(message)
        return value

    return check


def _is_dict(value: object, *of: type) -> bool:
    """Return True if a value is a dict from texts to values of these classes, or any."""
    return isinstance(value, dict) and all(
        isinstance(k, str) and isinstance(v, of or object) for k, v in value.items()
    )


def _is_printable(value: Any) -> bool:
    """Return True if a value is a dict of printable texts."""
    return _is_dict(value, str) and all(map(str.isprintable, chain(*value.items())))


def _is_axes(value: object) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(axis, tuple) and len(axis) == 2 and type(axis[1]) is int and axis[1] > 0
        for axis in value
    )


def _is_bound(value: object) -> bool:
    """Return True if a value is the largest size, both bounds of a size, or bounds of lengths."""
    if not isinstance(value, dict):
        return type(value) is int and value >= 0
    if value.keys() == {"at_least", "at_most"}:
        return all(type(part) is int and part >= 0 for part in value.values())
    types = {"rows": str, "longest": int, "shortest": int, "left_over": bool}
    return "rows" in value and all(type(part) is types.get(k) for k, part in value.items())


def _is_file_name(value: str) -> bool:
    return "\0" not in value and value not in ("", ".", "..") and os.path.basename(value) == value


_text = _checked(lambda value: isinstance(value, str), "expected a string in quotes")
_file_name = _checked(
    lambda value: value is None or _is_file_name(_text(value)),
    "expected the name of a file in the same folder, in quotes",
)
_checked_arguments = _checked(
    lambda value: isinstance(value, tuple) and [*map(type, value)] == [tuple, dict],
    "write arguments as ((positional, ...), {'keyword': ..., ...})",
)
_checked_axes = _checked(_is_axes, "write an axis environment as (('name', size), ...)")


def _structure(value: Any) -> tuple[PyTreeDef, tuple[str, ...]]:
    names, tree = jax.tree.flatten(value)
    if not all(isinstance(name, str) for name in names):
        raise ValueError("each leaf of the structure must be the value's name, in quotes")
    return tree, tuple(names)


def _axis_env(value: Any) -> tuple[tuple[Hashable, int], ...]:
    with jaxcompat.axes_bound(_checked_axes(value)):
        return value


def _jit(value: Any) -> dict[str, Any]:
    for name, part in _checked_jit(value).items():
        if name not in _JIT_PARTS:
            raise ValueError(f"unknown entry '{name}' of jit; available: {', '.join(_JIT_PARTS)}")
        if not _JIT_PARTS[name](part):
            raise ValueError(f"'{name}' of jit is not valid")
    return {**value, "inline": jaxcompat.inline_of_word(value.get("inline", False))}


_checked_jit = _checked(_is_dict, "write jit as {'donated': ('x',), ...}")
_JIT_PARTS: dict[str, Callable[[Any], bool]] = {
    "donated": lambda part: isinstance(part, tuple) and all(isinstance(n, str) for n in part),
    "in": lambda part: _is_dict(part, Sharding, Format),
    "out": lambda part: _is_dict(part, Sharding, Format),
    "compiler_options": _is_dict,
    "keep_unused": lambda part: isinstance(part, bool),
    "inline": lambda part: isinstance(part, bool | str),
}

#: The reader of each entry; required entries come first.
_READERS: dict[str, Callable[[Any], Any]] = {
    "jax": _text,
    "name": _text,
    "arguments": lambda value: _structure(_checked_arguments(value)),
    "results": _structure,
    "constants": _file_name,
    "foreign": _checked(
        lambda value: _is_printable(value) and all(map(str.isidentifier, value)),
        "write foreign dtypes as {'name': 'i32[]', ...}, and memory spaces as {'name': ''}",
    ),
    "modules": _checked(_is_printable, "write modules as {'primitive': 'module', ...}"),
    "files": _checked(_is_printable, "write files as {'name in comments': 'path', ...}"),
    "digests": _checked(_is_printable, "write digests as {'name in comments': 'digest', ...}"),
    "stacks": _checked(
        _is_printable, "write stacks as {'2': 'model.py:12:9-12:20 (loss) from 1', ...}"
    ),
    "axis_env": _axis_env,
    "bounds": _checked(
        lambda value: _is_dict(value) and all(map(_is_bound, value.values())),
        "write bounds as {'n': 512, 'lengths': {'rows': 'N', 'longest': 512}, ...}",
    ),
    "mesh": _checked(
        lambda value: isinstance(value, AbstractMesh),
        "write a mesh as AbstractMesh((2,), ('x',), axis_types=...)",
    ),
    "meshes": _checked(
        lambda value: _is_dict(value, AbstractMesh),
        "write meshes as {'name in types': AbstractMesh(...), ...}",
    ),
    "symbols": lambda value: None if value is None else jax.export.SymbolicScope(value),
    "jit": _jit,
}
REQUIRED = [*_READERS][:4]


def bound_of(value: Any, types: TypeReader) -> Bound:
    """Return the bound in an entry of `bounds`. Raises ValueError for rows that are not sizes."""
    if isinstance(value, int):
        return SizeBound(value)
    if "at_most" in value:
        return SizeBound(**value)
    return LengthsBound(**{**value, "rows": types.dimension(value["rows"])})


def parsed_jit_options(program: Program, parts: Mapping[str, Any]) -> JitOptions:
    """Return the options in the entry `jit` of a program. Raises ValueError for unknown names."""
    donated, placed, out_placed = (parts.get(name, {}) for name in ("donated", "in", "out"))
    pairs = ((*donated, *placed), program.arg_names), (tuple(out_placed), program.out_names)
    for named, allowed in pairs:
        for name in named:
            if name not in allowed:
                raise ValueError(f"jit names '{name}', which the program does not have")
    options = jaxcompat.TracedOptions(
        donated=tuple(name in donated for name in program.arg_names),
        in_placements=tuple(placed.get(name) for name in program.arg_names),
        out_placements=tuple(out_placed.get(name) for name in program.out_names),
        compiler_options=tuple(parts.get("compiler_options", {}).items()),
        keep_unused=parts.get("keep_unused", False),
        inline=parts["inline"],
    )
    return JitOptions.from_traced(program.arguments, program.results, options)


# --- call stacks ----------------------------------------------------------------------------------
# Call stacks of equations in the header of a `.jaxpr` file.
#
#     stacks = {
#         '1': 'train.py:30:13-30:24 (train_step)',
#         '2': 'model.py:12:9-12:20 (Block.__call__) from 1',
#     }
#
# An entry is a frame and the entry of the frame that called it. A range of columns is that of the
# call expression. `# model.py:12:9 (Block.__call__) from 2` refers to an entry, so a program has
# the same layers after it is written and read.

#: The maximal number of frames in a stack. Reading recurses once for each frame.
DEEPEST = 200

_FRAME = re.compile(
    r"(?P<file>\S.*?):(?P<line>\d{1,8})"
    r"(?::(?P<column>\d{1,8})(?:-(?P<end_line>\d{1,8}):(?P<end_column>\d{1,8}))?)?"
    r"(?: \((?P<function>[^()]*)\))?"
)
_ENTRY = re.compile(r"(?P<frame>.*?)(?: from (?P<caller>\w+))?")


def frame_text(file: str, frame: UserFrame, ends: bool = False) -> str:
    """Return `model.py:12:9 (loss)`; with the end of the expression, `model.py:12:9-12:20 (loss)`.

    Args:
        file: The name of the frame's file.
        frame: The frame.
        ends: Whether to write the end of its expression.
    """
    function = frame.function
    is_shown = function.isprintable() and not set(function) & set("()")
    has_range = frame.column >= 0 and frame[-2:] >= (frame.line, frame.column)  # else unknown
    until = f"-{frame.end_line}:{frame.end_column + 1}" if ends and has_range else ""
    named = f" ({function})" if is_shown else ""
    return f"{file}:{frame.line}:{frame.column + 1}{until}{named}"


def read_frame(text: str, files: Mapping[str, str]) -> UserFrame | None:
    """Return the frame that `frame_text` wrote.

    The result is None if the text has another form, another file, or an invalid range.
    """
    match = _FRAME.fullmatch(text)
    if match is None or match["file"] not in files:
        return None
    line, column = int(match["line"]), int(match["column"] or 1) - 1
    end_line, end_column = line, column
    if match["end_line"]:
        end_line, end_column = int(match["end_line"]), int(match["end_column"]) - 1
        if column < 0 or end_column < 0 or (end_line, end_column) < (line, column):
            return None
    function = match["function"] or "<unknown>"
    return UserFrame(files[match["file"]], line, function, column, end_line, end_column)


class StackWriter:
    """Numbers the call stacks of equations."""

    def __init__(self) -> None:
        self._numbers: dict[str, str] = {}

    @property
    def table(self) -> dict[str, str]:
        """The text of each entry, by its number."""
        return {number: text for text, number in self._numbers.items()}

    def entry(self, frames: Sequence[str]) -> str:
        """Return the entry of a call stack, the innermost frame first; "" if it is too deep."""
        if len(frames) > DEEPEST:
            return ""
        entry = ""
        for frame in reversed(frames):
            text = f"{frame} from {entry}" if entry else frame
            entry = self._numbers.setdefault(text, str(len(self._numbers) + 1))
        return entry


def read_stacks(
    table: Mapping[str, str], files: Mapping[str, str]
) -> dict[str, tuple[UserFrame, ...]]:
    """Return the frames of each entry, the outermost first. Raises ValueError."""
    stacks: dict[str, tuple[UserFrame, ...]] = {}
    for number, text in table.items():
        entry = _ENTRY.fullmatch(text)
        frame = read_frame(entry["frame"], files) if entry else None
        if entry is None or frame is None:
            raise ValueError(f"entry {number!r} of stacks is not a frame of a file: {text!r}")
        caller = entry["caller"]
        if caller is not None and caller not in stacks:
            raise ValueError(f"entry {number!r} of stacks comes before its caller {caller!r}")
        stacks[number] = (*stacks.get(caller or "", ()), frame)
        if len(stacks[number]) > DEEPEST:
            raise ValueError(f"entry {number!r} of stacks has more than {DEEPEST - 1} callers")
    return stacks


# --- source comments ------------------------------------------------------------------------------
# Source locations of equations in the comments of a `.jaxpr` file.
#
#     # model.py:12:8 (loss) ← flax/linen/linear.py:199:8 (call) from 4 in layer/dense as hidden
#
# First comes the user's own frame, then the library frame that it calls, if any; `from 4`, if there
# are more frames, is their entry in the header's table of call stacks. Then come the name scopes,
# and the names of the results in the user's source, `low, _` if only the first of two has one. Each
# part may be missing. An equation without a comment has that of the equation before it in the file,
# and `# -` says that there is no place. The header's table has the paths of the files: relative to
# the user's folder or, for libraries, to the folder of installed packages on the reading machine. A
# comment that names none of these files, or has another form, is an ordinary comment.

#: The comment of an equation that has no place.
NO_PLACE = "-"

_FUNCTION = re.compile(r" \([^()]*\)")

#: The frames of an equation, outermost first, and the name scopes around it.
Location: TypeAlias = tuple[tuple[UserFrame, ...], str]

_LOCATION = re.compile(
    r"(?:(?P<frames>\S.*?:\d{1,8}(?::\d{1,8})?(?: \([^()]*\))?)(?: from (?P<stack>\w+))?)?"
    r"(?:(?:^| )in (?:'(?P<quoted>[^']+)'|(?P<scope>\S+)))?"
    r"(?:(?:^| )as (?P<names>\w+(?:, \w+)*))?"
)


class LocationComments:
    """The source locations of equations as comments, with their files and call stacks.

    Each location is looked up once; the equations must outlive this object.

    Args:
        root: The jaxpr of the program.
        unread: The variables that have a name already: unused results of the program, which are
            written as `_` and have no name when they are read.
        source: Whether the comments include source lines and not only name scopes.
        roots: The folders of the user's files, as a `Program` has them.
    """

    def __init__(
        self, root: Jaxpr, unread: VariableNames, source: bool, roots: Sequence[Root]
    ) -> None:
        self.files: dict[str, str] = {}
        self._users: dict[str, str] = {}
        self._source = source
        names = source_names(root, roots) if source else {}
        self._given = {var: name for var, name in names.items() if var not in unread}
        self._reader = frames_now(roots, chosen=False)
        self._names: dict[tuple[str, bool], str | None] = {}
        self._comments: dict[tuple[str | None, ...], str] = {}
        self._scopes: dict[int, str] = {}
        self._frames: dict[object, str] = {}
        self._written: set[str] = set()
        self._last = ""
        self._stacks = StackWriter()

    @property
    def stacks(self) -> Mapping[str, str]:
        """The table of the call stacks that the comments mention."""
        return self._stacks.table

    def digests(
        self, digest_of: Callable[[str], str] = source_text.source_digest
    ) -> dict[str, str]:
        """Return a digest of each of the user's files that the comments mention.

        Args:
            digest_of: Returns the digest of a file; "" if its text is not known.
        """
        return {name: digest_of(file) for name, file in self._users.items()}

    def comment(self, eqn: JaxprEqn) -> tuple[str, ...]:
        """Return `# file.py:12:8 (function) in scope as name`, or known parts, as one token.

        Equations are asked for in the order of the file. There is no token for one whose place is
        that of the equation before it, and `# -` for one without a place after one with a place.
        """
        info, full = eqn.source_info, None
        frames = self._frames.get(info.traceback)
        if frames is None:
            frames, full = self._shown_frames(eqn)
        scope = self._scopes.get(identity(info.name_stack))
        if scope is None:
            scope = _scope_text(jaxcompat.name_stack(eqn))
            self._scopes[identity(info.name_stack)] = scope
        key = frames, scope, *map(self._given.get, eqn.outvars)
        comment = self._comments.get(key)
        if comment is None:
            names = [name or "_" for name in key[2:]]
            parts = frames, f"in {scope}" if scope else "", f"as {', '.join(names)}"
            text = " ".join(filter(None, parts if set(names) - {"_"} else parts[:2]))
            comment = self._comments[key] = text
        if comment == self._last:
            return ()
        self._last = comment
        if full is not None:
            return (f"# {full}{comment[len(frames) :]}",)
        return (f"# {comment or NO_PLACE}",)

    def _shown_frames(self, eqn: JaxprEqn) -> tuple[str, str | None]:
        """Return the frames of an equation, and what to write if no line has their functions yet.

        Frames without an entry always have functions.
        """
        text, entry = self._place(eqn) if self._source else ("", "")
        short = f"{_FUNCTION.sub('', text)} from {entry}" if entry else text
        self._frames[eqn.source_info.traceback] = short
        if not entry or short in self._written:
            return short, None
        self._written.add(short)
        return short, f"{text} from {entry}"

    def _place(self, eqn: JaxprEqn) -> tuple[str, str]:
        """Return the frames to show, and the entry of their call stack if there are more."""
        frames = self._reader.of(eqn)
        if not frames:
            return "", ""
        nearest = self._reader.nearest(frames)
        # All that the user's own frame calls is written as a library's, and read as such.
        libraries = [i < nearest or not self._reader.is_users(f.file) for i, f in enumerate(frames)]
        shown = dict.fromkeys((nearest, 0))
        text = BEHIND.join(filter(None, (self._frame_text(frames[i], libraries[i]) for i in shown)))
        if not text or len(frames) == len(shown):
            return text, ""
        texts = map(partial(self._frame_text, ends=True), frames, libraries)
        return text, self._stacks.entry([*filter(None, texts)])

    def _frame_text(self, frame: UserFrame, library: bool, ends: bool = False) -> str:
        name = self._file(frame.file, library)
        return "" if name is None else frame_text(name, frame, ends)

    def _file(self, file: str, library: bool) -> str | None:
        """Return the name of a file in comments: a library's path, else the shortest name."""
        if (file, library) not in self._names:
            path = self._reader.path(file)
            path = f"{PACKAGES}/{path}" if library else path
            name = self._distinct(path) if path.isprintable() else None
            self._names[file, library] = name
            if name is not None:
                self.files[name] = path
                if not library and not path.startswith("<"):
                    self._users[name] = file
        return self._names[file, library]

    def _distinct(self, path: str) -> str:
        parts = [re.sub(r"[^\w./+-]", "_", part) for part in PurePath(path).parts] or ["file"]
        if is_installed(path):
            parts = ["/".join(parts[1:])]
        names = ("/".join(parts[-n:]) for n in range(1, len(parts) + 1))
        numbered = (f"{parts[-1]}.{n}" for n in count(2))
        return next(n for names in (names, numbered) for n in names if n not in self.files)


def _scope_text(scope: str) -> str:
    """Return a name scope in a comment, quoted if it has spaces, without invalid characters."""
    if "'" in scope or not scope.isprintable():
        scope = "".join(c if c.isprintable() and c != "'" else "_" for c in scope)
    return f"'{scope}'" if " " in scope else scope


def source_infos_by_comment(
    comments: Iterable[str], files: Mapping[str, str], stacks: Mapping[str, tuple[UserFrame, ...]]
) -> dict[str | None, object]:
    """Return the `source_info` for each comment that has a place, and for equations without one.

    Args:
        comments: The comments.
        files: The path of each file by its name in comments.
        stacks: The call stacks by their names in comments, the outermost frame first.
    """
    places: dict[str | None, Location] = {None: ((), "")}
    for text in dict.fromkeys(comments):
        if (place := _location(text, files, stacks)) is not None:
            places[text] = place
    return dict(zip(places, jaxcompat.source_infos([*places.values()]), strict=True))


def complete_comments(file: FileSyntax, places: Container[str | None]) -> None:
    """Set the comment of each equation of a file to one that has a place, or to None.

    Args:
        file: The file, whose equations have the comments on their lines.
        places: The comments that have a place, and None.
    """
    before: str | None = None
    for equation in file.equations:
        if equation.comment == NO_PLACE or file.version == 1:
            before = None
        if equation.comment in places and equation.comment is not None:
            before = equation.comment
        equation.comment = before


def _location(
    comment: str, files: Mapping[str, str], stacks: Mapping[str, tuple[UserFrame, ...]]
) -> Location | None:
    """Return the place in a comment; None for an ordinary comment."""
    match = _LOCATION.fullmatch(comment)
    if not comment or not comment.isprintable() or not match:
        return None
    frames: list[UserFrame] = []
    for text in match["frames"].split(BEHIND) if match["frames"] else ():
        frame = read_frame(text, files)
        if frame is None:
            return None
        frames.append(frame)
    if match["stack"]:
        if match["stack"] not in stacks:
            return None
        frames = [*stacks[match["stack"]]]
    if frames or match["names"]:  # a result has the name of the file or none: the source may differ
        names = (match["names"] or "").split(", ")
        frames.append(naming_frame([name.strip("_") and name for name in names]))
    return tuple(frames), match["scope"] or match["quoted"] or ""
