"""The public interface for extensions: passes, and rules for new primitives.

*   Properties of equations: `view` and the views, for equations that hold jaxprs; `regions`, the
    edges along which values pass into and out of their bodies; `traits` and `add_traits`, by
    primitive; `Contains`, `equations`, `free_variables` and `size_of`.
*   New loops, branches and calls: a `View` with its `Edges`, `@rule("view", "primitive")`. All
    passes then support the primitive.
*   Rewriting of programs: `map_equations`, `rewrite` with its `Writer`, `with_bodies`, `Memo`.
*   Rules of passes and formats for a primitive: `rule(table, "primitive")`, where `table` is one of
    `TABLES`. The arguments and results of its rules are documented in `extend.mapping` ("batch"),
    `extend.sizes` ("mask"), `extend.rules` ("jaxpr", "python", "unzip") and `extend.commands`
    ("cost", and rules of `jaxprtool lint`); for "dce", `rule(used_outputs, live_inputs, eqn)`
    returns `(used_inputs, new_eqn)`.
*   Building blocks of functions such as `vmap` and `mask`: `extend.programs` traces functions,
    matches pytrees and analyses programs; `extend.mapping` and `extend.sizes` also have the
    rewrites of passes as functions. `extend.listing` has the tokens of equations and their source
    lines.

A package lists the primitives for which it has rules and traits in the entry-point group
`jaxprtool.primitives`; its module is imported when a program with one of them is met. A pass is a
`jaxprtool.Pass`, in the group `jaxprtool.passes`. Errors that users can cause are in
`jaxprtool.errors`.

A command is a `jaxprtool.registry.CommandInfo`, in the group `jaxprtool.commands`. Its module is
imported by `jaxprtool --help`, and must not import JAX; the module of its function is imported when
the command is called. The function is decorated with `command` of `jaxprtool.cli.session`, whose
`Session` returns the programs of a TARGET after passes. `jaxprtool.cli.options` declares options,
and `jaxprtool.cli.output` writes tables, JSON and notes. These four modules are public too.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from importlib import import_module
from typing import Any, TypeVar

from jaxprtool.errors import PluginError, did_you_mean
from jaxprtool.ir import rules as rule_tables
from jaxprtool.ir.conversions import contents, is_ref
from jaxprtool.ir.custom_rules import jvp_params, jvp_rule, vjp_params, vjp_rule
from jaxprtool.ir.dtypes import is_extended
from jaxprtool.ir.equations import (
    Contains,
    as_weak_as,
    bodies,
    equations,
    free_variables,
    is_flat,
    is_weak,
    named,
    size_of,
    strongly_typed,
    type_of,
)
from jaxprtool.ir.program import NamedValue, ProgramSignature, program_signature, top_jaxpr
from jaxprtool.ir.regions import (
    Call,
    Cond,
    CustomJVP,
    CustomVJP,
    Edges,
    High,
    Region,
    Regions,
    Scan,
    ShardMap,
    View,
    While,
    call,
    holds_jaxpr,
    keep,
    map_sub_jaxprs,
    regions,
    sub_jaxprs,
    view,
)
from jaxprtool.ir.rewrite import (
    Memo,
    RewriteRule,
    Writer,
    map_equations,
    narrow,
    partition,
    rewrite,
    with_bodies,
)
from jaxprtool.ir.rules import RuleTable
from jaxprtool.ir.traits import Traits, add_traits, primitives_with, traits
from jaxprtool.jaxcompat import (
    AbstractRef,
    Atom,
    Aval,
    ClosedJaxpr,
    DropVar,
    Jaxpr,
    JaxprEqn,
    JVPRule,
    Literal,
    Primitive,
    Var,
    VJPRule,
    close_jaxpr,
    hide_frames,
    inferred_types,
    inside_shard_map,
    jaxpr_as_fun,
    name_stack,
    new_jaxpr,
    new_jaxpr_eqn,
    open_jaxpr,
    operand_effects,
    replace_jaxpr,
    setting_of,
    stacked_aval,
    traced_like,
    varying_axes,
    weakly_typed,
)
from jaxprtool.passes.cleanup.dce import dce_body, has_lasting_effect
from jaxprtool.primitives import VARIABLE, scope_of, sow_p
from jaxprtool.registry import tables_of_rules

__all__ = [
    "TABLES",
    "VARIABLE",
    "AbstractRef",
    "Atom",
    "Aval",
    "Call",
    "ClosedJaxpr",
    "Cond",
    "Contains",
    "CustomJVP",
    "CustomVJP",
    "DropVar",
    "Edges",
    "High",
    "JVPRule",
    "Jaxpr",
    "JaxprEqn",
    "Literal",
    "Memo",
    "NamedValue",
    "Primitive",
    "ProgramSignature",
    "Region",
    "Regions",
    "RewriteRule",
    "RuleTable",
    "Scan",
    "ShardMap",
    "Traits",
    "VJPRule",
    "Var",
    "View",
    "While",
    "Writer",
    "add_traits",
    "as_weak_as",
    "bodies",
    "call",
    "close_jaxpr",
    "contents",
    "dce_body",
    "equations",
    "free_variables",
    "has_lasting_effect",
    "hide_frames",
    "holds_jaxpr",
    "inferred_types",
    "inside_shard_map",
    "is_extended",
    "is_flat",
    "is_ref",
    "is_weak",
    "jaxpr_as_fun",
    "jvp_params",
    "jvp_rule",
    "keep",
    "map_equations",
    "map_sub_jaxprs",
    "name_stack",
    "named",
    "narrow",
    "new_jaxpr",
    "new_jaxpr_eqn",
    "open_jaxpr",
    "operand_effects",
    "partition",
    "primitives_with",
    "program_signature",
    "regions",
    "replace_jaxpr",
    "rewrite",
    "rule",
    "scope_of",
    "setting_of",
    "size_of",
    "sow_p",
    "stacked_aval",
    "strongly_typed",
    "sub_jaxprs",
    "top_jaxpr",
    "traced_like",
    "traits",
    "type_of",
    "varying_axes",
    "view",
    "vjp_params",
    "vjp_rule",
    "weakly_typed",
    "with_bodies",
]

R = TypeVar("R")

#: Where each table is: the module that fills it, and its name there.
_TABLES = {
    "batch": ("jaxprtool.passes.mapping.batch", "batch_rules"),
    "batch_bodies": ("jaxprtool.passes.mapping.batch", "structured_rules"),
    "dce": ("jaxprtool.passes.cleanup.dce", "dce_rules"),
    "equivalence": ("jaxprtool.ir.equivalence", "readable_params"),
    "expand": ("jaxprtool.ir.expansions", "expansion_rules"),
    "jaxpr": ("jaxprtool.formats.jaxpr.params", "forms"),
    "mask": ("jaxprtool.passes.mapping.mask", "mask_rules"),
    "mask_bodies": ("jaxprtool.passes.mapping.mask", "structured_mask_rules"),
    "python": ("jaxprtool.formats.python.emit", "python_rules"),
    "ragged": ("jaxprtool.passes.mapping.ragged", "ragged_rules"),
    "ragged_bodies": ("jaxprtool.passes.mapping.ragged", "structured_ragged_rules"),
    "stablehlo": ("jaxprtool.formats.stablehlo", "stablehlo_rules"),
    "unzip": ("jaxprtool.passes.unzip", "unzip_rules"),
    "view": ("jaxprtool.ir.regions", "views"),
}


class _RuleTables(Mapping[str, tuple[str, ...]]):
    """Where the tables are, with those that commands have, which are looked up when needed."""

    @cached_property
    def _all(self) -> dict[str, tuple[str, ...]]:
        of_commands = {name: tuple(path.split(":")) for name, path in tables_of_rules().items()}
        return dict(sorted({**_TABLES, **of_commands}.items()))

    def __getitem__(self, name: str) -> tuple[str, ...]:
        return _TABLES[name] if name in _TABLES else self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


#: The tables by name, each with its module and its name there.
TABLES: Mapping[str, tuple[str, ...]] = _RuleTables()


def table_named(name: str) -> RuleTable[Any]:
    """Return the filled table with a name, one of `TABLES`. Raises PluginError."""
    if name not in TABLES:
        hint = did_you_mean(name, TABLES) or f"available: {', '.join(TABLES)}"
        raise PluginError(f"unknown table of rules '{name}'", hint)
    module, variable = TABLES[name]
    return getattr(import_module(module), variable)


def rule(table: RuleTable[R] | str, *primitives: str) -> Callable[[R], R]:
    """Return a decorator that adds a rule to a table.

    Args:
        table: The table, or its name: one of `TABLES`, whose module is then imported.
        primitives: The names of the primitives that the rule is for.

    Returns:
        A function that puts its argument in the table, and returns it as it is.

    Raises:
        PluginError: If there is no table of this name.
    """
    filled: RuleTable[R] = table_named(table) if isinstance(table, str) else table
    return rule_tables.rule(filled, *primitives)
