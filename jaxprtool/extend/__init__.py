"""What an extension of jaxprtool stands on: a pass, or the rules of primitives of one's own.

*   What an equation is like: `view` and the views, for those that hold jaxprs, and `regions`, the
    edges along which values pass into and out of these; `traits` and `add_traits`, by primitive;
    `Contains`, `equations`, `free_variables`, `size_of`.
*   A loop, branch or call of one's own: a `View` with its `Edges`, `@rule("view", "primitive")`.
    No pass needs more of it.
*   How programs are rewritten: `map_equations`, `rewrite` with its `Writer`, `with_bodies`, `Memo`.
*   How a pass or a format learns of a primitive: `rule(table, "primitive")`, where `table` is one
    of `TABLES`. What its rules are called with, and return, is in `extend.batch`, `extend.cost`,
    `extend.domains`, `extend.files`, `extend.mask`, `extend.python` and `extend.unzip`; for "dce",
    `rule(used_outputs, live_inputs, eqn)` returns `(used_inputs, new_eqn)`.
*   What is known of a program: how its values flow and what a pass changed (`extend.analysis`), the
    tokens of its equations (`extend.listing`), the lines that they come from (`extend.sources`).
    `extend.pipelines` is for what watches the passes run.
*   What functions such as `vmap` and `mask` are made of: `extend.tracing`, `extend.trees` of
    arguments, `extend.sizes` that vary; and what passes do to a program, for those that call it:
    `extend.vmap`, `extend.padding`, `extend.ragged`.

A package names the primitives that it has rules and traits for in the entry-point group
`jaxprtool.primitives`; its module is imported when a program with one of them is met. A pass is a
`jaxprtool.Pass`, in the group `jaxprtool.passes`. Errors of users are those of `jaxprtool.errors`.
"""

from jaxprtool.ir.basics.dtypes import is_extended
from jaxprtool.ir.basics.rules import TABLES, RuleTable, rule
from jaxprtool.ir.core.equations import (
    Contains,
    bodies,
    equations,
    free_variables,
    is_flat,
    named,
    size_of,
    type_of,
)
from jaxprtool.ir.core.regions import Region, Regions, regions
from jaxprtool.ir.core.structured import (
    Call,
    Cond,
    CustomJVP,
    CustomVJP,
    Edges,
    High,
    Scan,
    ShardMap,
    View,
    While,
    call,
    holds_jaxpr,
    keep,
    map_sub_jaxprs,
    sub_jaxprs,
    view,
)
from jaxprtool.ir.core.traits import Traits, add_traits, primitives_with, traits
from jaxprtool.ir.core.weak_types import as_weak_as, is_weak, strongly_typed
from jaxprtool.ir.programs.border import NamedValue, border, top_jaxpr
from jaxprtool.ir.programs.ref_contents import contents, is_ref
from jaxprtool.ir.rewriting.custom_rules import (
    JVPRule,
    VJPRule,
    jvp_params,
    jvp_rule,
    vjp_params,
    vjp_rule,
)
from jaxprtool.ir.rewriting.rewrite import (
    Memo,
    RewriteRule,
    Writer,
    map_equations,
    narrow,
    partition,
    rewrite,
    with_bodies,
)
from jaxprtool.jaxcompat import (
    AbstractRef,
    Atom,
    Aval,
    ClosedJaxpr,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    Primitive,
    Var,
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
    "border",
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
