"""Conversion between an equation's parameters and those in a `.jaxpr` file.

`encode_params` returns the parameters to write; `decode_params` converts the parameters in a file
to those of the running JAX. In the file,

- a parameter that JAX's listing hides is written only if it is not the default;
- a parameter unknown to this JAX release is ignored if it has its default value;
- primitives whose parameters contain live objects, or differ between releases, have their own
  `Form`: scan counts its operands, custom derivatives have their rules as jaxprs.

The table of forms is open to plug-ins: `rule("jaxpr", "my_primitive")(Form(write, read))`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple, TypeAlias

import jax
from jax import lax
from jax.sharding import AbstractMesh
from jax.tree_util import PyTreeDef

from jaxprtool import jaxcompat, primitives
from jaxprtool.formats.jaxpr.values import Encode, Unwritable, is_whole, record_text
from jaxprtool.ir.custom_rules import (
    Stub,
    batching_rule,
    custom_vmap_params,
    jvp_params,
    jvp_rule,
    vjp_params,
    vjp_rule,
    vjp_rule_that_raises,
)
from jaxprtool.ir.regions import CALLS, NO_OPTIONS
from jaxprtool.ir.rules import RuleTable, load_rules_of, rule
from jaxprtool.ir.traits import traits
from jaxprtool.ir.trees import Placeholder, StaticLeaf, build_tree, describe, description
from jaxprtool.jaxcompat import ClosedJaxpr, JaxprEqn, JVPRule, Primitive, VJPRule


class BadParameter(ValueError):
    """A parameter in a file that is invalid, or a required one that is missing."""


class UnknownPrimitive(BadParameter):
    """A primitive that neither this JAX release nor a loaded plug-in has."""


class NamedRule(NamedTuple):
    """A rule of a custom derivative: the name of its function, and its closed jaxpr.

    When a rule is read, `jaxpr` is a function that returns it, since a rule may contain its own
    call.
    """

    name: str
    jaxpr: Any


#: The parameters that are rules. A bare name is both the name of the jaxpr and of its function.
RULES = {"custom_jvp_call": ("jvp",), "custom_vjp_call": ("fwd", "bwd")}

Params: TypeAlias = dict[str, Any]
#: The types of an equation's operands or results; None for a result without a type in the file.
Avals: TypeAlias = Sequence[Any]


def _params(eqn: JaxprEqn, *without: str) -> Params:
    return {k: v for k, v in sorted(eqn.params.items()) if k not in without}


@dataclass(frozen=True)
class Form:
    """The representation of a primitive's parameters in a file.

    Attributes:
        write: `write(eqn)` returns the parameters in the order of writing.
        read: `read(given, operands, results)` returns JAX's parameters, from those in the file and
            the types of the equation's operands and results. It raises BadParameter, and KeyError
            for a missing parameter.
        defaults: `defaults(params, operands, results)` returns the values that are left out of the
            file and added before `read` is called.
        names: All valid parameters, for a primitive whose type checker in JAX does not check all of
            them; else None.
    """

    write: Callable[[JaxprEqn], Params] = _params
    read: Callable[[Params, Avals, Avals], Params] = lambda params, operands, results: params
    defaults: Callable[[Params, Avals, Avals], Params] = lambda params, operands, results: {}
    names: frozenset[str] | None = None


#: The special forms, by the primitive's name in the file.
forms: RuleTable[Form] = RuleTable()

_PLAIN = Form()


#: The primitives of JAX's sparse matrices, registered when their module is imported.
_SPARSE = ("bcoo_", "bcsr_", "coo_", "csr_")


# --- both ways ------------------------------------------------------------------------------------


def stable_primitive_name(eqn: JaxprEqn) -> str:
    """Return the file's name for an equation's primitive, the same on every JAX release."""
    name = eqn.primitive.name
    return "closed_call" if name == "eval_jaxpr" else name


def encode_params(eqn: JaxprEqn) -> Params:
    """Return the parameters of `eqn` to write, in the order of writing.

    A value is one that `values.encode` accepts, an open or closed jaxpr, or a `NamedRule`. Raises
    Unwritable; UnsupportedError if the rule of a custom derivative cannot be traced.
    """
    form = forms.get(stable_primitive_name(eqn), _PLAIN)
    params = form.write(eqn)
    avals = ([atom.aval for atom in atoms] for atoms in (eqn.invars, eqn.outvars))
    defaults = {**_hidden(eqn.primitive), **form.defaults(params, *avals)}
    return {k: v for k, v in params.items() if k not in defaults or not _same(v, defaults[k])}


def decode_params(
    primitive: str, stored: Params, operands: Avals, results: Avals
) -> tuple[Primitive, Params]:
    """Return this JAX's primitive and its parameters from the name and parameters in a file.

    Args:
        primitive: The name of the primitive in the file.
        stored: The parameters in the file, without equation contexts: see `decode_context`. Jaxprs
            in it are closed.
        operands: The types of the equation's operands.
        results: The types of its results; None for a result without a type in the file.

    Raises:
        BadParameter: If this JAX has no such primitive, or a parameter is unknown, missing or
            invalid.
    """
    load_rules_of(primitive)
    if primitive.startswith(_SPARSE):
        import_module("jax.experimental.sparse")
    registered = jaxcompat.registered_primitives()
    if traits(primitive).call == "closed_call" and primitive not in registered:
        primitive = "eval_jaxpr"
    resolved = registered.get(primitive) or jaxcompat.kernel_primitive(primitive)
    if resolved is None:
        raise UnknownPrimitive(f"unknown primitive '{primitive}'")
    form = forms.get(primitive, _PLAIN)
    unknown = set() if form.names is None else stored.keys() - form.names
    if unknown:
        raise BadParameter(f"unknown parameter '{min(unknown)}'")
    try:
        stored = {**_hidden(resolved), **form.defaults(stored, operands, results), **stored}
        params = form.read(stored, operands, results)
    except KeyError as error:
        raise BadParameter(f"the parameter {error} is missing") from None
    if primitive in _OPTIONAL:
        function, name, default, must = _OPTIONAL[primitive]
        if name not in inspect.signature(function).parameters:
            if name in params and _same(params[name], default):
                del params[name]
        elif must:
            params.setdefault(name, default)
    for name in _OPEN_BODIES.get(primitive, ()):
        params[name] = jaxcompat.open_jaxpr(params.get(name))
    return resolved, params


def _same(value: object, default: object) -> bool:
    return type(value) is type(default) and value == default


# --- equation contexts ----------------------------------------------------------------------------

#: The settings under which an equation is traced, by their names in the file.
_SETTINGS = {
    name.removeprefix("cur_").removeprefix("abstract_"): name for name in jaxcompat.CONTEXT_DEFAULTS
}
_DEFAULTS = {name: jaxcompat.CONTEXT_DEFAULTS[full] for name, full in _SETTINGS.items()}


def implied_mesh(operands: Avals, results: Avals, usual: AbstractMesh) -> AbstractMesh:
    """Return the mesh in which an equation is traced by default.

    In the body of a `shard_map` it is the mesh of the types, which has manual axes (from the first
    result, or else the first operand); elsewhere it is `usual`.
    """
    for aval in (*results[:1], *operands[:1]):
        sharding = getattr(getattr(aval, "inner_aval", aval), "sharding", None)
        return sharding.mesh if sharding is not None and sharding.mesh.manual_axes else usual
    return usual


def encode_context(context: object, mesh: AbstractMesh) -> Params:
    """Return the settings of an equation's context to write; `mesh` is the implied one."""
    settings = jaxcompat.context_settings(context)
    named = {name: settings[full] for name, full in _SETTINGS.items() if full in settings}
    defaults = {**_DEFAULTS, "mesh": mesh}
    return {name: value for name, value in named.items() if value != defaults[name]}


def decode_context(
    settings: Params, operands: Avals, results: Avals, usual_mesh: AbstractMesh
) -> Any:
    """Return the context of an equation from the settings in a file. Raises BadParameter."""
    unknown = settings.keys() - _SETTINGS.keys()
    if unknown:
        raise BadParameter(f"unknown setting '@{min(unknown)}' of equations")
    named = {"mesh": implied_mesh(operands, results, usual_mesh), **settings}
    try:
        return jaxcompat.equation_context({_SETTINGS[name]: v for name, v in named.items()})
    except (TypeError, ValueError, AttributeError) as error:
        raise BadParameter(f"invalid settings of an equation: {error}") from error


# --- optional parameters --------------------------------------------------------------------------

#: Parameters hidden by JAX's printing rules, with their defaults.
_HIDDEN: dict[str, Params] = {
    "_unary_with_accuracy_pp_rule": {"accuracy": None},
    "_binary_with_out_dtype_pp_rule": {"out_dtype": None},
    "_convert_elt_type_pp_rule": {"sharding": None},
    "_pp_reshard": {"concrete_mesh": None},
}


@cache
def _hidden(primitive: Primitive) -> Params:
    return _HIDDEN.get(jaxcompat.printing_rule(primitive) or "", {})


#: Parameters that only some JAX releases have: the function with the parameter, its name and
#: default, and whether equations must have it.
_OPTIONAL: dict[str, tuple[Callable[..., Any], str, object, bool]] = {
    "new_ref": (jax.new_ref, "pin", False, True),
    "reduce_max": (lax.reduce_max, "out_sharding", None, False),
    "reduce_min": (lax.reduce_min, "out_sharding", None, False),
    "top_k": (lax.top_k, "is_stable", True, True),
}

#: The parameters with open jaxprs, in JAX releases with a separate class for closed ones.
_OPEN_BODIES: dict[str, tuple[str, ...]] = {
    "core_map": ("jaxpr",),
    "pallas_call": ("jaxpr",),
    "reduce_window": ("jaxpr",),
    "remat2": ("jaxpr",),
    "shard_map": ("jaxpr",),
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"),
        ("update_jaxpr",),
    ),
}


def is_open_body(primitive: str, parameter: str) -> bool:
    """Return True if JAX always keeps this jaxpr open, which then need not be written."""
    return parameter in _OPEN_BODIES.get(primitive, ())


# --- forms ----------------------------------------------------------------------------------------


def _broadcast_defaults(params: Params, operands: Avals, results: Avals) -> Params:
    has_type = bool(results) and results[0] is not None
    shape = {"shape": results[0].shape} if has_type else {}
    return {"sharding": None, "broadcast_dimensions": (), **shape}


rule(forms, "broadcast_in_dim")(Form(defaults=_broadcast_defaults))


def _write_dot(eqn: JaxprEqn) -> Params:
    pairs = eqn.params["dimension_numbers"]
    numbers = tuple(tuple(map(list, pair)) for pair in pairs)
    return {**_params(eqn), "dimension_numbers": numbers}


def _read_dot(params: Params, operands: Avals, results: Avals) -> Params:
    numbers = tuple(tuple(map(tuple, pair)) for pair in params["dimension_numbers"])
    return {**params, "dimension_numbers": numbers}


_DOT_OPTIONS = "precision", "preferred_element_type", "out_sharding"
rule(forms, "dot_general")(Form(_write_dot, _read_dot, lambda *_: dict.fromkeys(_DOT_OPTIONS)))


def _write_jit(eqn: JaxprEqn) -> Params:
    inline = jaxcompat.inline_as_word(eqn.params["inline"])
    return {"name": eqn.params["name"], **_params(eqn), "inline": inline}


def _read_jit(params: Params, operands: Avals, results: Avals) -> Params:
    if not isinstance(params["name"], str):
        raise BadParameter("name must be a string")
    return {**params, "inline": jaxcompat.inline_of_word(params["inline"])}


def _jit_defaults(params: Params, operands: Avals, results: Avals) -> Params:
    _, per_operand, per_result = CALLS["jit"]
    return {
        **{name: (NO_OPTIONS[name],) * len(operands) for name in per_operand},
        **{name: (NO_OPTIONS[name],) * len(results) for name in per_result},
        "keep_unused": False,
        "ctx_mesh": jaxcompat.EMPTY_MESH,
        "compiler_options_kvs": (),
        "inline": False,
    }


_JIT_NAMES = frozenset({"name", "jaxpr", *_jit_defaults({}, (), ())})
rule(forms, "jit")(Form(_write_jit, _read_jit, _jit_defaults, _JIT_NAMES))


def _write_scan(eqn: JaxprEqn) -> Params:
    num_consts, num_carry = jaxcompat.scan_counts(eqn.params)
    counts = {"num_consts": num_consts, "num_carry": num_carry}
    return dict(sorted({**_params(eqn, "ft_in", "ft_out"), **counts}.items()))


def _read_scan(params: Params, operands: Avals, results: Avals) -> Params:
    consts, carry = params.pop("num_consts"), params.pop("num_carry")
    xs, ys = len(operands) - consts - carry, len(results) - carry
    if min(consts, carry, xs, ys) < 0:
        raise BadParameter("num_consts and num_carry exceed the number of operands or results")
    return {**params, **jaxcompat.scan_count_params({}, consts, carry, xs, ys)}


rule(forms, "scan")(Form(_write_scan, _read_scan))


def _read_while(params: Params, operands: Avals, results: Avals) -> Params:
    # In JAX's order, in which its listing numbers unnamed bodies.
    return {k: params[k] for k in ("cond_nconsts", "cond_jaxpr", "body_nconsts", "body_jaxpr")}


rule(forms, "while")(Form(read=_read_while))
rule(forms, "cond")(Form(names=frozenset({"branches", "branches_platforms"})))
rule(forms, "closed_call")(Form(names=frozenset({"call_jaxpr"})))


def _write_reduce(eqn: JaxprEqn) -> Params:
    # The jaxpr determines what the function computes; its name is shown in listings.
    name = getattr(eqn.params["computation"], "__qualname__", "computation")
    return {**_params(eqn), "computation": name}


def _read_reduce(params: Params, operands: Avals, results: Avals) -> Params:
    body = params["jaxpr"]

    def computation(*args: Any) -> Any:
        return jaxcompat.jaxpr_as_fun(body)(*args)

    computation.__qualname__ = params["computation"]
    return {**params, "computation": computation}


rule(forms, "reduce")(Form(_write_reduce, _read_reduce))


def _write_select(eqn: JaxprEqn) -> Params:
    return {**_params(eqn), "select_prim": eqn.params["select_prim"].name}


def _read_select(params: Params, operands: Avals, results: Avals) -> Params:
    primitive = {"ge": lax.ge_p, "le": lax.le_p}.get(params["select_prim"])
    if primitive is None:
        raise BadParameter("select_prim must be ge or le")
    return {**params, "select_prim": primitive}


rule(forms, "select_and_gather_add", "select_and_scatter_add")(Form(_write_select, _read_select))


def _write_linear_call(eqn: JaxprEqn) -> Params:
    transpose = jaxcompat.linear_call_transpose(eqn)
    return {**_params(eqn, "transpose_thunk"), "transpose": transpose}


def _read_linear_call(params: Params, operands: Avals, results: Avals) -> Params:
    transpose = params.pop("transpose")
    return {**params, **jaxcompat.linear_call_transpose_param(transpose)}


rule(forms, "linear_call")(Form(_write_linear_call, _read_linear_call))


_SOW_NAMES = ("tag", "name", "mode", "tree")


def _write_sow(eqn: JaxprEqn) -> Params:
    # A reader may lack the classes of a value's nodes.
    tree = build_tree(describe(eqn.params["tree"]))
    return {**{name: eqn.params[name] for name in _SOW_NAMES}, "tree": tree}


def _read_sow(params: Params, operands: Avals, results: Avals) -> Params:
    tag, name, mode, tree = (params[k] for k in _SOW_NAMES)
    if not (isinstance(tag, str) and isinstance(name, str | None)):
        raise BadParameter("tag and name must be strings")
    if mode not in primitives.MODES:
        raise BadParameter(f"mode must be one of {', '.join(primitives.MODES)}")
    if not isinstance(tree, PyTreeDef) or tree.num_leaves > len(operands):
        raise BadParameter(
            "tree must be the structure of a value, with at most as many leaves as operands"
        )
    return params


_SOW_DEFAULTS = {"mode": "strict", "tree": primitives.LEAF}
rule(forms, "sow")(Form(_write_sow, _read_sow, lambda *_: _SOW_DEFAULTS, frozenset(_SOW_NAMES)))


# --- the rules of custom derivatives --------------------------------------------------------------

_CALL_NAMES = frozenset({"name", "call_jaxpr", "num_consts", "symbolic_zeros", "perturbed"})


def _call_params(eqn: JaxprEqn, rule_params: Params) -> Params:
    """Return the parameters of a custom_jvp or custom_vjp call, with the body's name first."""
    call_params = {k: eqn.params[k] for k in ("call_jaxpr", "num_consts", "symbolic_zeros")}
    name = jaxcompat.open_jaxpr(call_params["call_jaxpr"]).debug_info.func_name
    return {"name": name, **dict(sorted({**call_params, **rule_params}.items()))}


def _call_defaults(params: Params, operands: Avals, results: Avals) -> Params:
    num_consts = params.get("num_consts", 0)
    primals = len(operands) - num_consts
    return {
        "num_consts": 0,
        "perturbed": (True,) * primals,
        "in_zeros": (False,) * primals,
        "out_zeros": (False,) * len(results),
        "forwarded": None,
        "raises": None,
    }


def _mask(params: Params, name: str, avals: Avals) -> tuple[bool, ...]:
    """Return a parameter with one bool per value."""
    mask = params[name]
    if not isinstance(mask, tuple) or len(mask) != len(avals):
        raise BadParameter(f"{name} must have one entry for each of {len(avals)} values")
    return mask


def _write_custom_jvp(eqn: JaxprEqn) -> Params:
    rule = jvp_rule(eqn)
    jvp = NamedRule(rule.name, rule.jaxpr) if rule.raises is None else rule.name
    masks = {"out_zeros": rule.out_zeros, "perturbed": rule.perturbed}
    return _call_params(eqn, {"jvp": jvp, "raises": rule.raises, **masks})


def _read_custom_jvp(params: Params, operands: Avals, results: Avals) -> Params:
    raises, num_consts = params["raises"], params["num_consts"]
    name, jaxpr = _rule(params["jvp"], raises)
    zeros = _mask(params, "out_zeros", results)
    perturbed = _mask(params, "perturbed", operands[num_consts:])

    def rule() -> JVPRule:
        return JVPRule(name, jaxpr and jaxpr(), zeros, perturbed, raises)

    return jvp_params(_renamed(params), name, rule, num_consts, params["symbolic_zeros"])


def _rule(rule: Any, raises: Any) -> NamedRule:
    """Return the rule of a custom derivative, without a jaxpr if it raises."""
    if isinstance(rule, NamedRule) == (raises is not None):
        raise BadParameter(
            "a rule must be a jaxpr, or the parameter 'raises' must have the exception that it "
            "raises"
        )
    if raises is None:
        return rule
    if not (isinstance(rule, str) and isinstance(raises, str)):
        raise BadParameter("a rule that raises needs two strings: its name, and the exception")
    return NamedRule(rule, None)


def _write_custom_vjp(eqn: JaxprEqn) -> Params:
    rule = vjp_rule(eqn)
    masks = {"in_zeros": rule.in_zeros, "perturbed": rule.perturbed}
    if rule.raises is not None:
        return _call_params(
            eqn, {"fwd": rule.fwd_name, "bwd": rule.bwd_name, "raises": rule.raises, **masks}
        )
    rules = {
        "fwd": NamedRule(rule.fwd_name, rule.fwd),
        "bwd": NamedRule(rule.bwd_name, rule.bwd),
    }
    any_forwarded = any(index is not None for index in rule.forwarded)
    forwarded = rule.forwarded if any_forwarded else None
    return _call_params(eqn, {**rules, "forwarded": forwarded, "raises": None, **masks})


def _read_custom_vjp(params: Params, operands: Avals, results: Avals) -> Params:
    raises = params["raises"]
    (fwd_name, fwd), (bwd_name, bwd) = (_rule(params[name], raises) for name in ("fwd", "bwd"))
    num_consts, forwarded = params["num_consts"], params["forwarded"]
    in_zeros = _mask(params, "in_zeros", operands[num_consts:])
    perturbed = _mask(params, "perturbed", operands[num_consts:])

    def rule() -> VJPRule:
        if raises is not None:
            return vjp_rule_that_raises(fwd_name, bwd_name, raises, len(operands) - num_consts)
        backward = bwd()
        none = (None,) * (len(backward.invars) - len(results))
        forwards = none if forwarded is None else forwarded
        return VJPRule(fwd_name, bwd_name, fwd(), backward, forwards, in_zeros, perturbed)

    names = fwd_name, bwd_name
    return vjp_params(_renamed(params), names, rule, num_consts, params["symbolic_zeros"])


def _renamed(params: Mapping[str, Any]) -> ClosedJaxpr:
    """Return the body of a custom call, renamed to the name shown in listings."""
    body, name = params["call_jaxpr"], params["name"]
    debug = jaxcompat.open_jaxpr(body).debug_info
    if debug.func_name == name:
        return body
    return jaxcompat.replace_jaxpr(body, debug_info=debug._replace(func_src_info=name))


_JVP_NAMES = _CALL_NAMES | {"jvp", "out_zeros", "raises"}
rule(forms, "custom_jvp_call")(
    Form(_write_custom_jvp, _read_custom_jvp, _call_defaults, _JVP_NAMES)
)
_VJP_NAMES = _CALL_NAMES | {"fwd", "bwd", "forwarded", "in_zeros", "raises"}
rule(forms, "custom_vjp_call")(
    Form(_write_custom_vjp, _read_custom_vjp, _call_defaults, _VJP_NAMES)
)


def _write_custom_vmap(eqn: JaxprEqn) -> Params:
    if not isinstance(eqn.params["rule"], Stub):
        raise Unwritable(batching_rule(eqn))
    name = jaxcompat.open_jaxpr(eqn.params["call"]).debug_info.func_name
    return {"name": name, "call_jaxpr": eqn.params["call"], "rule": eqn.params["rule"]}


def _read_custom_vmap(params: Params, operands: Avals, results: Avals) -> Params:
    if not isinstance(params["rule"], Stub):
        raise BadParameter("rule must be a stub")
    return custom_vmap_params(_renamed(params), params["rule"], len(operands), len(results))


_VMAP_NAMES = frozenset({"name", "call_jaxpr", "rule"})
rule(forms, "custom_vmap_call")(Form(_write_custom_vmap, _read_custom_vmap, names=_VMAP_NAMES))


# --- kernels --------------------------------------------------------------------------------------


def _read_kernel(params: Params, operands: Avals, results: Avals) -> Params:
    for name, value in params.items():
        if not is_whole(value):
            raise BadParameter(f"{name} has a value that this JAX does not have")
    return params


rule(forms, "mpmd_map")(Form(read=_read_kernel))


def _write_pallas_call(eqn: JaxprEqn) -> Params:
    """Return the parameters with the kernel's name and those of its Refs, which JAX does not."""
    debug = jaxcompat.open_jaxpr(eqn.params["jaxpr"]).debug_info
    names = None if debug.arg_names is None else tuple(debug.arg_names)
    return {"kernel": debug.func_name, "refs": names, **_params(eqn)}


def _read_pallas_call(params: Params, operands: Avals, results: Avals) -> Params:
    kernel, refs = params.pop("kernel"), params.pop("refs")
    params = _read_kernel(params, operands, results)
    body = params["jaxpr"]
    if not isinstance(kernel, str):
        raise BadParameter("kernel must be a name")
    if refs is not None and (
        not isinstance(refs, tuple)
        or len(refs) != len(body.invars)
        or not all(isinstance(name, str) for name in refs)
    ):
        raise BadParameter(f"refs must be the names of {len(body.invars)} arguments")
    debug = jaxcompat.open_jaxpr(body).debug_info._replace(func_src_info=kernel, arg_names=refs)
    return {**params, "jaxpr": jaxcompat.replace_jaxpr(body, debug_info=debug)}


rule(forms, "pallas_call")(
    Form(_write_pallas_call, _read_pallas_call, lambda *_: {"kernel": "jaxpr", "refs": None})
)


# The operands of these are the constants of their bodies, which a file has as arguments.


def _write_scoped(eqn: JaxprEqn) -> Params:
    return {
        **_params(eqn, "debug_info"),
        "jaxpr": jaxcompat.consts_as_arguments(eqn.params["jaxpr"]),
    }


def _read_scoped(params: Params, operands: Avals, results: Avals) -> Params:
    params = _read_kernel(params, operands, results)
    return {**params, "jaxpr": jaxcompat.arguments_as_consts(params["jaxpr"], len(operands))}


def _read_core_map(params: Params, operands: Avals, results: Avals) -> Params:
    params = _read_scoped(params, operands, results)
    return {**params, "debug_info": params["jaxpr"].debug_info}


rule(forms, "run_scoped")(Form(_write_scoped, _read_scoped))
rule(forms, "core_map")(Form(_write_scoped, _read_core_map))


# --- opaque ---------------------------------------------------------------------------------------
# The parameters of opaque equations in a `.jaxpr` file: see `jaxcompat.opaque`.
#
#     y:f32[8,128] = pallas_call[
#       @opaque=()
#       compiler_params=Record('jax…CompilerParams', dimension_semantics=('arbitrary',), …)
#       jaxpr=open({ lambda ; … })
#       …
#     ] x
#
# `@opaque` has the equation's effects. A value that the file cannot have is a record of its fields,
# if it has some, or else the description of an object. Jaxprs in records are written as jaxprs.

#: The setting of an opaque equation that has its effects.
OPAQUE = "opaque"


def encode_opaque(value: Any, encode: Encode) -> str:
    """Return the text of a value that cannot be written otherwise: a record, or a description."""
    try:
        return record_text(value, encode)
    except Unwritable:
        return encode(StaticLeaf(Placeholder(_described(value))))


def _described(value: Any) -> str:
    """Return the description of an object, whose `repr` may raise."""
    try:
        return " ".join(description(value).split())
    except Exception:
        return f"a value of {type(value).__module__}.{type(value).__qualname__}"
