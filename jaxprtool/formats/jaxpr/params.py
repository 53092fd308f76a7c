"""Which parameters of an equation a `.jaxpr` file holds, and what the file calls them, both ways.

`written` gives the parameters to write, `restored` makes the running JAX's out of those that a
file gives. Between the two,

- a parameter that JAX's listing hides is in the file only if it says something;
- one that only some JAX have is read by the others if it says nothing;
- primitives whose parameters hold live objects, or differ from JAX to JAX, have a `Form` of their
  own: scan counts its operands, custom derivatives have their rules as jaxprs.

The table of forms is open to plug-ins: `rule("jaxpr", "my_primitive")(Form(write, read))`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxprtool import jaxcompat, primitives
from jaxprtool.formats.jaxpr.values import Unwritable
from jaxprtool.ir.callbacks import Stub, batching_rule, custom_vmap_params
from jaxprtool.ir.custom_rules import (
    JVPRule,
    VJPRule,
    jvp_params,
    jvp_rule,
    vjp_params,
    vjp_rule,
)
from jaxprtool.ir.plugins import load_rules_of
from jaxprtool.ir.rules import RuleTable, rule
from jaxprtool.ir.traits import traits
from jaxprtool.ir.trees import build, describe
from jaxprtool.jaxcompat import JaxprEqn


class BadParameter(ValueError):
    """A parameter that a file gives and that makes no sense, or one that it should give."""


class UnknownPrimitive(BadParameter):
    """A primitive that this JAX does not have, nor any plug-in that is loaded."""


class Rule(NamedTuple):
    """A rule of a custom derivative: the name of its function, and its closed jaxpr.

    Of a rule that is read, `jaxpr` is a function that gives it, since a rule may hold the call
    that it belongs to.
    """

    name: str
    jaxpr: Any


#: The parameters that are rules. One that is nothing but a name is the jaxpr of that name, and
#: its function's name too.
RULES = {"custom_jvp_call": ("jvp",), "custom_vjp_call": ("fwd", "bwd")}

Params: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Form:
    """How a file has the parameters of one primitive.

    `write(eqn)` gives them in the order in which they are written, `read(given, operands,
    results)` makes JAX's of them, from the types of the equation's operands and results. `read`
    raises BadParameter, and KeyError for a parameter that is missing.
    """

    write: Callable[[JaxprEqn], Params]
    read: Callable[[Params, Sequence[Any], Sequence[Any]], Params]


#: The forms of primitives that have one, by the primitive's name in the file.
forms: RuleTable[Form] = RuleTable()


# --- both ways ------------------------------------------------------------------------------------


def primitive_name(eqn: JaxprEqn) -> str:
    """What the file calls an equation's primitive, the same on every JAX."""
    name = eqn.primitive.name
    return "closed_call" if name == "eval_jaxpr" else name


def written(eqn: JaxprEqn) -> Params:
    """The parameters of `eqn` that are written, in the order in which they are.

    A value is what `values.encode` takes, or a jaxpr, open or closed, or a `Rule`. Raises
    Unwritable; UnsupportedError if the rule of a custom derivative cannot be traced.
    """
    form = forms.get(primitive_name(eqn))
    if form is not None:
        return form.write(eqn)
    hidden = _hidden(eqn.primitive)
    shown = {k: v for k, v in eqn.params.items() if not (k in hidden and _alike(v, hidden[k]))}
    return dict(sorted(shown.items()))


def restored(
    primitive: str, given: Params, operands: Sequence[Any], results: Sequence[Any]
) -> tuple[Any, Params]:
    """The primitive of this JAX, and its parameters, from the name and parameters in a file.

    `operands` and `results` are the types of the equation's operands and results; the type of a
    result that the file does not give is None. `given` holds no equation contexts: see `context`.
    Jaxprs are closed. Raises BadParameter.
    """
    load_rules_of(primitive)
    known = jaxcompat.registered_primitives()
    if traits(primitive).call == "closed_call" and primitive not in known:
        primitive = "eval_jaxpr"
    if primitive not in known:
        raise UnknownPrimitive(f"there is no primitive '{primitive}'")
    found = known[primitive]
    form = forms.get(primitive)
    unknown = given.keys() - _ALL_NAMES.get(primitive, given.keys())
    if unknown:
        raise BadParameter(f"there is no parameter '{min(unknown)}'")
    try:
        if form is not None:
            return found, form.read(dict(given), operands, results)
    except KeyError as error:
        raise BadParameter(f"the parameter {error} is missing") from None
    params = {**_hidden(found), **given}
    for name, (default, must) in _OPTIONAL.get(primitive, {}).items():
        if _takes(primitive, name):
            params.update({} if name in params or not must else {name: default})
        elif name in params and _alike(params[name], default):
            del params[name]
    for name in _OPEN_BODIES.get(primitive, ()):
        params[name] = jaxcompat.open_jaxpr(params.get(name))
    return found, params


#: The names of the parameters of those primitives whose checkers in JAX look at some only.
_ALL_NAMES: dict[str, frozenset[str]] = {
    "closed_call": frozenset({"call_jaxpr"}),
    "cond": frozenset({"branches", "branches_platforms"}),
}


def _alike(value: Any, default: Any) -> bool:
    return type(value) is type(default) and value == default


# --- equation contexts ----------------------------------------------------------------------------

#: What the file calls the settings that an equation is traced in; see `jaxcompat`.
_SETTINGS = {
    "compute_type": "compute_type",
    "threefry_partitionable": "threefry_partitionable",
    "mesh": "cur_abstract_mesh",
    "layout_mode": "cur_layout_mode",
    "remove_size_one_mesh_axis": "remove_size_one_mesh_axis",
    "no_collectives": "no_collectives",
    "xla_metadata": "xla_metadata",
}

_DEFAULTS = {name: jaxcompat.CONTEXT_DEFAULTS[full] for name, full in _SETTINGS.items()}


def implied_mesh(operands: Sequence[Any], results: Sequence[Any], usual: Any) -> Any:
    """The mesh that an equation is traced in, if nothing else is said.

    In the body of a `shard_map` it is that of the types, which has manual axes (of several types,
    that of the first result, or, if there is none, of the first operand); elsewhere the `usual`.
    """
    for aval in (*results[:1], *operands[:1]):
        sharding = getattr(getattr(aval, "inner_aval", aval), "sharding", None)
        return sharding.mesh if sharding is not None and sharding.mesh.manual_axes else usual
    return usual


def context_written(context: Any, mesh: Any) -> Params:
    """The settings of an equation's context that are written; `mesh` is the implied one."""
    settings = jaxcompat.context_settings(context)
    named = {name: settings[full] for name, full in _SETTINGS.items() if full in settings}
    defaults = {**_DEFAULTS, "mesh": mesh}
    return {name: value for name, value in named.items() if value != defaults[name]}


def context(given: Params, operands: Sequence[Any], results: Sequence[Any], usual_mesh: Any) -> Any:
    """The context of an equation from the settings that a file gives. Raises BadParameter."""
    unknown = given.keys() - _SETTINGS.keys()
    if unknown:
        raise BadParameter(f"there is no setting '@{min(unknown)}' of equations")
    named = {"mesh": implied_mesh(operands, results, usual_mesh), **given}
    try:
        return jaxcompat.equation_context({_SETTINGS[name]: v for name, v in named.items()})
    except (TypeError, ValueError, AttributeError) as error:
        raise BadParameter(f"bad settings of an equation: {error}") from error


# --- parameters that are there or not -------------------------------------------------------------

#: What JAX's printing rules hide, with the value that says nothing.
_HIDDEN: dict[str, Params] = {
    "_unary_with_accuracy_pp_rule": {"accuracy": None},
    "_binary_with_out_dtype_pp_rule": {"out_dtype": None},
    "_convert_elt_type_pp_rule": {"sharding": None},
    "_pp_reshard": {"concrete_mesh": None},
}


@cache
def _hidden(primitive: Any) -> Params:
    return _HIDDEN.get(jaxcompat.printing_rule(primitive) or "", {})


#: Parameters that only some JAX have: the value that says nothing, and whether a JAX that has them
#: must be given one.
_OPTIONAL: dict[str, dict[str, tuple[Any, bool]]] = {
    "new_ref": {"pin": (False, True)},
    "reduce_max": {"out_sharding": (None, False)},
    "reduce_min": {"out_sharding": (None, False)},
    "top_k": {"is_stable": (True, True)},
}

_EXAMPLES: dict[str, Callable[[Any], Any]] = {
    "new_ref": lambda x: jax.new_ref(x)[...],
    "reduce_max": jnp.max,
    "reduce_min": jnp.min,
    "top_k": lambda x: lax.top_k(x, 1),
}


@cache
def _takes(primitive: str, parameter: str) -> bool:
    """Whether the running JAX has this parameter."""
    example = jax.make_jaxpr(_EXAMPLES[primitive])(jax.ShapeDtypeStruct((2,), jnp.float32))
    return any(e.primitive.name == primitive and parameter in e.params for e in example.eqns)


#: The parameters that hold open jaxprs where JAX has a class of its own for closed ones.
_OPEN_BODIES: dict[str, tuple[str, ...]] = {
    "reduce_window": ("jaxpr",),
    "remat2": ("jaxpr",),
    "shard_map": ("jaxpr",),
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"),
        ("update_jaxpr",),
    ),
}


def is_open_body(primitive: str, parameter: str) -> bool:
    """Whether JAX keeps this jaxpr open, so that nothing needs to be written of that."""
    return parameter in _OPEN_BODIES.get(primitive, ())


# --- forms ----------------------------------------------------------------------------------------


def _without(eqn: JaxprEqn, *names: str) -> Params:
    return {k: v for k, v in sorted(eqn.params.items()) if k not in names}


def _write_broadcast(eqn: JaxprEqn) -> Params:
    params = _without(eqn)
    says_nothing = {
        "shape": eqn.outvars[0].aval.shape,
        "sharding": None,
        "broadcast_dimensions": (),
    }
    return {k: v for k, v in params.items() if v != says_nothing[k]}


def _read_broadcast(given: Params, operands: Sequence[Any], results: Sequence[Any]) -> Params:
    if "shape" not in given:
        if not results or results[0] is None:
            raise BadParameter("the shape is missing, or the type of the result")
        given["shape"] = results[0].shape
    return {"sharding": None, "broadcast_dimensions": (), **given}


def _write_dot(eqn: JaxprEqn) -> Params:
    params = {k: v for k, v in _without(eqn).items() if v is not None}
    pairs = params["dimension_numbers"]
    return {**params, "dimension_numbers": tuple(tuple(map(list, pair)) for pair in pairs)}


def _read_dot(given: Params, operands: Sequence[Any], results: Sequence[Any]) -> Params:
    pairs = given["dimension_numbers"]
    numbers = tuple(tuple(map(tuple, pair)) for pair in pairs)
    nothing = dict.fromkeys(("precision", "preferred_element_type", "out_sharding"))
    return {**nothing, **given, "dimension_numbers": numbers}


def _jit_defaults(operands: int, results: int) -> Params:
    """What a jit says if nothing is asked of it."""
    unspecified = jaxcompat.UNSPECIFIED
    return {
        "donated_invars": (False,) * operands,
        "in_shardings": (unspecified,) * operands,
        "out_shardings": (unspecified,) * results,
        "in_layouts": (None,) * operands,
        "out_layouts": (None,) * results,
        "keep_unused": False,
        "ctx_mesh": jaxcompat.EMPTY_MESH,
        "compiler_options_kvs": (),
        "inline": False,
    }


def _write_jit(eqn: JaxprEqn) -> Params:
    defaults = _jit_defaults(len(eqn.invars), len(eqn.outvars))
    params = {**_without(eqn), "inline": jaxcompat.inline_as_word(eqn.params["inline"])}
    shown = {k: v for k, v in params.items() if k not in defaults or v != defaults[k]}
    return {"name": eqn.params["name"], **shown}


def _read_jit(given: Params, operands: Sequence[Any], results: Sequence[Any]) -> Params:
    if not isinstance(given["name"], str):
        raise BadParameter("name is a text")
    given = {**_jit_defaults(len(operands), len(results)), **given}
    return {**given, "inline": jaxcompat.inline_of_word(given["inline"])}


def _write_scan(eqn: JaxprEqn) -> Params:
    num_consts, num_carry = jaxcompat.scan_counts(eqn.params)
    counts = {"num_consts": num_consts, "num_carry": num_carry}
    return dict(sorted({**_without(eqn, "ft_in", "ft_out"), **counts}.items()))


def _read_scan(given: Params, operands: Sequence[Any], results: Sequence[Any]) -> Params:
    consts, carry = given.pop("num_consts"), given.pop("num_carry")
    xs, ys = len(operands) - consts - carry, len(results) - carry
    if min(consts, carry, xs, ys) < 0:
        raise BadParameter("fewer operands or results than num_consts and num_carry say")
    return {**given, **jaxcompat.scan_count_params({}, consts, carry, xs, ys)}


def _write_while(eqn: JaxprEqn) -> Params:
    return _without(eqn)


def _read_while(given: Params, operands: Sequence[Any], results: Sequence[Any]) -> Params:
    # In JAX's order, in which its listing meets the bodies and numbers those that have no names.
    return {k: given[k] for k in ("cond_nconsts", "cond_jaxpr", "body_nconsts", "body_jaxpr")}


def _write_reduce(eqn: JaxprEqn) -> Params:
    # The function's jaxpr says what it computes; its name is what listings show.
    name = getattr(eqn.params["computation"], "__qualname__", "computation")
    return {"computation": name, **_without(eqn, "computation")}


def _read_reduce(given: Params, operands: Sequence[Any], results: Sequence[Any]) -> Params:
    body = given["jaxpr"]

    def computation(*args: Any) -> Any:
        return jaxcompat.jaxpr_as_fun(body)(*args)

    computation.__qualname__ = given["computation"]
    return {**given, "computation": computation}


def _write_select(eqn: JaxprEqn) -> Params:
    return {**_without(eqn), "select_prim": eqn.params["select_prim"].name}


def _read_select(given: Params, operands: Sequence[Any], results: Sequence[Any]) -> Params:
    found = {"ge": lax.ge_p, "le": lax.le_p}.get(given["select_prim"])
    if found is None:
        raise BadParameter("select_prim is ge or le")
    return {**given, "select_prim": found}


def _write_linear_call(eqn: JaxprEqn) -> Params:
    transpose = jaxcompat.linear_call_transpose(eqn)
    return {**_without(eqn, "transpose_thunk"), "transpose": transpose}


def _read_linear_call(given: Params, operands: Sequence[Any], results: Sequence[Any]) -> Params:
    transpose = given.pop("transpose")
    return {**given, **jaxcompat.linear_call_transpose_param(transpose)}


def _write_sow(eqn: JaxprEqn) -> Params:
    p = eqn.params
    shown = {"tag": p["tag"], "name": p["name"]}
    shown |= {} if p["mode"] == "strict" else {"mode": p["mode"]}
    # A reader need not know the classes of a value's nodes.
    return shown | ({} if p["tree"] == primitives.LEAF else {"tree": build(describe(p["tree"]))})


def _read_sow(given: Params, operands: Sequence[Any], results: Sequence[Any]) -> Params:
    given = {"mode": "strict", "tree": primitives.LEAF, **given}
    tag, name, mode, tree = (given[k] for k in ("tag", "name", "mode", "tree"))
    if not (isinstance(tag, str) and isinstance(name, str | None)):
        raise BadParameter("tag and name are texts")
    if mode not in primitives.MODES:
        raise BadParameter(f"mode is one of {', '.join(primitives.MODES)}")
    if not isinstance(tree, jax.tree_util.PyTreeDef) or tree.num_leaves > len(operands):
        raise BadParameter("tree is the structure of a value, of not more leaves than operands")
    return given


rule(forms, "broadcast_in_dim")(Form(_write_broadcast, _read_broadcast))
rule(forms, "dot_general")(Form(_write_dot, _read_dot))
rule(forms, "jit")(Form(_write_jit, _read_jit))
_ALL_NAMES["jit"] = frozenset({"name", "jaxpr", *_jit_defaults(0, 0)})
rule(forms, "scan")(Form(_write_scan, _read_scan))
rule(forms, "while")(Form(_write_while, _read_while))
rule(forms, "reduce")(Form(_write_reduce, _read_reduce))
rule(forms, "select_and_gather_add")(Form(_write_select, _read_select))
rule(forms, "select_and_scatter_add")(Form(_write_select, _read_select))
rule(forms, "linear_call")(Form(_write_linear_call, _read_linear_call))
rule(forms, "sow")(Form(_write_sow, _read_sow))
_ALL_NAMES["sow"] = frozenset({"tag", "name", "mode", "tree"})


# --- the rules of custom derivatives --------------------------------------------------------------


def _of_custom_call(eqn: JaxprEqn) -> Params:
    """The parameters that custom_jvp and custom_vjp calls have in common, the body's name first."""
    body, count = eqn.params["call_jaxpr"], eqn.params["num_consts"]
    params = {"call_jaxpr": body, "symbolic_zeros": eqn.params["symbolic_zeros"]}
    params |= {"num_consts": count} if count else {}
    return params


def _named_first(eqn: JaxprEqn, params: Params) -> Params:
    name = jaxcompat.open_jaxpr(eqn.params["call_jaxpr"]).debug_info.func_name
    return {"name": name, **dict(sorted(params.items()))}


def _write_custom_jvp(eqn: JaxprEqn) -> Params:
    rule = jvp_rule(eqn)
    params = _of_custom_call(eqn)
    if rule.raises is None:
        params["jvp"] = Rule(rule.name, rule.jaxpr)
    else:
        params |= {"jvp": rule.name, "raises": rule.raises}
    params |= {"out_zeros": rule.out_zeros} if any(rule.out_zeros) else {}
    params |= {} if all(rule.perturbed) else {"perturbed": rule.perturbed}
    return _named_first(eqn, params)


def _read_custom_jvp(given: Params, operands: Sequence[Any], results: Sequence[Any]) -> Params:
    zeros, raises = given.get("out_zeros", (False,) * len(results)), given.get("raises")
    if isinstance(given["jvp"], Rule) == (raises is not None):
        raise BadParameter("a rule is a jaxpr, or it raises what the parameter 'raises' says")
    name, jaxpr = given["jvp"] if raises is None else (given["jvp"], None)

    def rule() -> JVPRule:
        return JVPRule(name, jaxpr and jaxpr(), zeros, perturbed, raises)

    num_consts = given.get("num_consts", 0)
    perturbed = given.get("perturbed", (True,) * (len(operands) - num_consts))
    return jvp_params(_renamed(given), name, rule, num_consts, given["symbolic_zeros"])


def _write_custom_vjp(eqn: JaxprEqn) -> Params:
    rule = vjp_rule(eqn)
    params = _of_custom_call(eqn)
    params |= {"fwd": Rule(rule.fwd_name, rule.fwd), "bwd": Rule(rule.bwd_name, rule.bwd)}
    if any(index is not None for index in rule.forwarded):
        params["forwarded"] = rule.forwarded
    if any(rule.in_zeros):
        params["in_zeros"] = rule.in_zeros
    params |= {} if all(rule.perturbed) else {"perturbed": rule.perturbed}
    return _named_first(eqn, params)


def _read_custom_vjp(given: Params, operands: Sequence[Any], results: Sequence[Any]) -> Params:
    (fwd_name, fwd), (bwd_name, bwd) = given["fwd"], given["bwd"]
    num_consts = given.get("num_consts", 0)
    in_zeros = given.get("in_zeros", (False,) * (len(operands) - num_consts))
    perturbed = given.get("perturbed", (True,) * (len(operands) - num_consts))

    def rule() -> VJPRule:
        backward = bwd()
        residuals = len(backward.invars) - len(results)
        forwarded = given.get("forwarded", (None,) * residuals)
        return VJPRule(fwd_name, bwd_name, fwd(), backward, forwarded, in_zeros, perturbed)

    names = fwd_name, bwd_name
    return vjp_params(_renamed(given), names, rule, num_consts, given["symbolic_zeros"])


def _renamed(given: Mapping[str, Any]) -> Any:
    """The body of a custom call, which bears the name that listings show."""
    body, name = given["call_jaxpr"], given["name"]
    same = jaxcompat.open_jaxpr(body).debug_info.func_name == name
    return body if same else jaxcompat.with_function_name(body, name)


rule(forms, "custom_jvp_call")(Form(_write_custom_jvp, _read_custom_jvp))
rule(forms, "custom_vjp_call")(Form(_write_custom_vjp, _read_custom_vjp))
_OF_CUSTOM_CALLS = frozenset({"name", "call_jaxpr", "num_consts", "symbolic_zeros", "perturbed"})
_ALL_NAMES["custom_jvp_call"] = _OF_CUSTOM_CALLS | {"jvp", "out_zeros", "raises"}
_ALL_NAMES["custom_vjp_call"] = _OF_CUSTOM_CALLS | {"fwd", "bwd", "forwarded", "in_zeros"}


def _write_custom_vmap(eqn: JaxprEqn) -> Params:
    if not isinstance(eqn.params["rule"], Stub):
        raise Unwritable(batching_rule(eqn))
    name = jaxcompat.open_jaxpr(eqn.params["call"]).debug_info.func_name
    return {"name": name, "call_jaxpr": eqn.params["call"], "rule": eqn.params["rule"]}


def _read_custom_vmap(given: Params, operands: Sequence[Any], results: Sequence[Any]) -> Params:
    if not isinstance(given["rule"], Stub):
        raise BadParameter("rule is a stub")
    return custom_vmap_params(_renamed(given), given["rule"], len(operands), len(results))


rule(forms, "custom_vmap_call")(Form(_write_custom_vmap, _read_custom_vmap))
_ALL_NAMES["custom_vmap_call"] = frozenset({"name", "call_jaxpr", "rule"})
