"""checkpoint, jit, pmap, named_call and disable_jit as passes, with the options of JAX's functions.

    trace(loss, x).apply("checkpoint(policy='dots_saveable'), grad")
    trace(step, state, x).apply("jit(name='train_step', donate_argnums=0)")

The pass `closed`, which binds arguments, has a module of its own.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import jax
import numpy as np
from jax import numpy as jnp
from jax.tree_util import PyTreeDef

from jaxprtool import jaxcompat
from jaxprtool.errors import ArgumentsError, PipelineError, UnsupportedError, did_you_mean
from jaxprtool.ir.arguments import Mismatch, matched_leaves
from jaxprtool.ir.custom_rules import (
    POLICIES,
    POLICY_FACTORIES,
    custom_rule,
    has_rule,
    rule_jaxprs,
    rules_followed,
)
from jaxprtool.ir.documents import listed
from jaxprtool.ir.equations import equations, named, size_of, substitute, type_of, with_operands
from jaxprtool.ir.meshes import Specs
from jaxprtool.ir.notation import expressions
from jaxprtool.ir.program import JitOptions, Program, Programs, top_jaxpr
from jaxprtool.ir.regions import keep, open_regions, sub_jaxprs
from jaxprtool.ir.rewrite import Memo, Taken, pass_constants
from jaxprtool.ir.symbols import LengthsBound
from jaxprtool.ir.trees import filled, named_by_end, paths, structure, unique
from jaxprtool.jaxcompat import AnyJaxpr, Aval, ClosedJaxpr, JaxprEqn, Literal, Var
from jaxprtool.jaxcompat.jaxprs import identity
from jaxprtool.passes import Pass
from jaxprtool.passes.cleanup.inline import Inline
from jaxprtool.passes.mapping.batch.axes import Axis, free_axes, program_axes
from jaxprtool.passes.retrace import (
    chosen,
    function_of,
    positional,
    positional_roots,
    retraced,
    with_names,
)
from jaxprtool.passes.transforms.scoped_checkpoint import checkpoint_scopes

__all__ = ["Checkpoint", "Closed", "DisableJit", "Jit", "NamedCall", "Pmap"]

# --- closed ---------------------------------------------------------------------------------------
# closed and open_constants: arguments become constants, and constants an argument.
#
#     program.apply("closed({0: 3.0, 'training': False})")
#     program.apply(Closed({"params": params}))
#
# A key is the position of an argument, or a path as in `Program.arg_names`: of one flat value,
# `params['w']`, or of a larger part of the arguments, `params`, which takes a value of the same
# tree. The end of a path is enough if only one path has it: `w`. A number represents a scalar, and
# nested lists represent an array. An argument that is bound as a whole is removed, as from a
# `functools.partial`; a bound part of one becomes None.


#: The maximum number of names that an error lists.
_SHOWN = 5


@dataclass(frozen=True)
class Closed(Pass):
    """Bind arguments to values, by position or name; the values become constants.

    An argument that is bound as a whole is removed, as from a `functools.partial`; a bound part of
    an argument becomes None.

    Args:
        args: The values by position, or by the path of an argument or of a part of one: `{0: 3.0,
            'params': …}`. A number represents a scalar, and nested lists represent an array.

    Raises:
        ArgumentsError: If there is no argument at a position or with a name, an argument is bound
            twice, or a value does not fit its type.

    Example:
        def f(x, scale):
            return x * scale

        $ jaxprtool opt f.py:f --args "f32[3], f32[]" -p "closed({'scale': 2.0})"
        { lambda ; a:f32[3]. let b:f32[3] = mul a 2.0:f32[] in (b,) }
    """

    name: ClassVar[str] = "closed"
    group: ClassVar[str] = "transform"
    preserves: ClassVar[bool] = False

    args: dict[int | str, Any]

    def __call__(self, program: Program) -> Program:
        """Return the program with the arguments bound.

        Raises ArgumentsError for an unknown argument, or a value that does not fit.
        """
        values: dict[int, Any] = {}
        for key, value in self.args.items():
            for i, leaf in _leaves(program, key, value):
                name = program.arg_names[i]
                if i in values:
                    raise ArgumentsError(f"closed: argument {name} is bound twice")
                _require_rows(program, name)
                values[i] = program.bounded(i, _of_type(name, leaf, program.in_avals[i]))
        return _bound(program, values) if values else program


def _bound(program: Program, values: dict[int, Any]) -> Program:
    """Return the program with flat arguments bound: scalars as literals, others as constants."""
    jaxpr = program.jaxpr
    literals: dict[Var, Literal] = {}
    constvars, consts = list(jaxpr.constvars), list(jaxpr.consts)
    for i, value in values.items():
        var = jaxpr.invars[i]
        if (literal := jaxcompat.as_literal(value, var.aval)) is not None:
            literals[var] = literal
        else:
            constvars.append(var)
            consts.append(value)

    free = [i not in values for i in range(len(jaxpr.invars))]
    arg_names = keep(program.arg_names, free)
    new = jaxcompat.replace_jaxpr(
        jaxpr,
        constvars=constvars,
        consts=consts,
        invars=keep(jaxpr.invars, free),
        outvars=substitute(jaxpr.outvars, literals),
        eqns=[with_operands(eqn, literals) for eqn in jaxpr.eqns],
    )
    in_tree = structure(remaining(program, free))
    return program.replace(jaxpr=new, in_tree=in_tree, arg_names=arg_names)


def remaining(program: Program, free: Sequence[bool]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments that remain, with flat indices as leaves.

    `free` marks the flat arguments that remain. An argument of which nothing remains is removed; a
    removed part of one is None.
    """
    before = filled(program.in_tree, range(len(free)))
    after = filled(program.in_tree, [i if flag else None for i, flag in enumerate(free)])

    def stays(had: object, has: object) -> bool:
        return bool(jax.tree.leaves(has)) or not jax.tree.leaves(had)

    args = tuple(has for had, has in zip(before[0], after[0], strict=True) if stays(had, has))
    kwargs = {name: has for name, has in after[1].items() if stays(before[1][name], has)}
    return args, kwargs


def _require_rows(program: Program, name: str) -> None:
    """Refuse to bind lengths that could then not be checked against the rows."""
    bound = dict(program.bounds).get(name)
    if isinstance(bound, LengthsBound) and not isinstance(bound.rows, int):
        raise ArgumentsError(
            f"closed: argument {name} is {bound}, and the number of rows is unknown",
            f"give it with specialize({bound.rows}=…)",
        )


# --- selection of arguments -----------------------------------------------------------------------


def _leaves(program: Program, key: int | str, value: object) -> list[tuple[int, Any]]:
    """Return the flat arguments that a key names, each with its part of the value."""
    if isinstance(key, str):
        leaves, tree = _named(program, key)
    elif isinstance(key, int) and not isinstance(key, bool):
        (number,) = chosen(program, "closed", "args", key)
        leaves = positional(program)[number]
        tree = program.in_tree.children()[0].children()[number]
    else:
        raise ArgumentsError(f"closed: {key!r} is neither the position nor the name of an argument")
    if tree == structure(0):
        return [(leaves[0], value)]  # nested lists are an array
    try:
        return list(zip(leaves, matched_leaves(tree, value, str(key)), strict=True))
    except Mismatch as mismatch:
        wanted = ", ".join(program.arg_names[i] for i in leaves)
        raise ArgumentsError(
            f"closed: the value of argument {key} does not fit: {mismatch}",
            f"its parts are: {wanted}" if wanted else None,
        ) from None


def _named(program: Program, key: str) -> tuple[list[int], PyTreeDef]:
    """Return the flat arguments whose path is, or begins with, `key`, and their tree."""
    names = program.arg_names
    if key in names:
        return [names.index(key)], structure(0)
    if not any(name.startswith((f"{key}[", f"{key}.")) for name in names):
        ends = named_by_end(names, key)
        if len(ends) > 1:
            raise ArgumentsError(
                f"closed: '{key}' is the end of {len(ends)} names: {listed(ends, _SHOWN)}",
                "write more of the path",
            )
        if ends:
            return _named(program, *ends)
    positions = [i for i, name in enumerate(names) if name.startswith((f"{key}[", f"{key}."))]
    if not positions:
        roots = dict.fromkeys([*names, *(name.split("[")[0] for name in names)])
        raise ArgumentsError(
            f"closed: {program.name} has no argument '{key}'",
            did_you_mean(key, roots) or f"its arguments are: {', '.join(names)}",
        )
    example = filled(program.in_tree, range(len(names)))
    key_paths = [key_path for key_path, _ in jax.tree.leaves_with_path(example)]
    first, suffix = positions[0], names[positions[0]][len(key) :]
    for depth in range(len(key_paths[first]) + 1):
        if jax.tree_util.keystr(key_paths[first][depth:]) == suffix:
            inside = [
                i
                for i, key_path in enumerate(key_paths)
                if key_path[:depth] == key_paths[first][:depth]
            ]
            if inside == positions:
                return positions, _subtree(program.in_tree, first, depth)
    raise ArgumentsError(
        f"closed: '{key}' is not a single part of the arguments of {program.name}",
        f"bind each by its own name: {', '.join(names[i] for i in positions)}",
    )


def _subtree(tree: PyTreeDef, leaf: int, depth: int) -> PyTreeDef:
    """Return the part of a structure that is `depth` steps down the path to a leaf."""
    for _ in range(depth):
        for child in tree.children():
            if leaf < child.num_leaves:
                tree = child
                break
            leaf -= child.num_leaves
    return tree


# --- values ---------------------------------------------------------------------------------------


def _of_type(name: str, value: Any, aval: Aval) -> Any:
    """Return a value as an array of an argument's type. Raises ArgumentsError for a misfit."""
    shown = type_of(aval)
    shape = getattr(aval, "shape", None)
    if isinstance(aval, jaxcompat.AbstractRef) or shape is None:
        raise ArgumentsError(f"closed: argument {name} is {shown}, which cannot be bound")
    if not all(isinstance(n, int) for n in shape):
        raise ArgumentsError(f"closed: argument {name} is {shown}, whose size is unknown")
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        if getattr(value, "dtype", None) != aval.dtype or value.shape != shape:
            raise ArgumentsError(
                f"closed: argument {name} is {shown}, but the value is not",
                "from Python, bind an array of keys: Closed({...: jax.random.key(0)})",
            )
        return value
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        raise ArgumentsError(f"closed: the value of argument {name} is not an array") from None
    if array.shape != shape:
        raise ArgumentsError(
            f"closed: argument {name} is {shown}, but the value has shape {array.shape}"
        )
    if not _holds(aval.dtype, array):
        raise ArgumentsError(f"closed: argument {name} is {shown}, which cannot hold {value!r}")
    return value if getattr(value, "dtype", None) == aval.dtype else array.astype(aval.dtype)


#: The kinds of numbers, each of which holds those before it.
_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


def _holds(dtype: np.dtype, value: np.ndarray) -> bool:
    """Return True if a dtype can represent values: the kind must fit, and integers their range."""

    def kind(of: np.dtype) -> int:
        return next((i for i, k in enumerate(_KINDS) if jnp.issubdtype(of, k)), len(_KINDS))

    if kind(value.dtype) > kind(dtype):
        return False
    if jnp.issubdtype(dtype, jnp.integer) and value.dtype != np.bool_:
        bounds = jnp.iinfo(dtype)
        return bool(np.all((value >= bounds.min) & (value <= bounds.max)))
    return True


# --- open constants -------------------------------------------------------------------------------
# open_constants: turn constants of a program into an argument, returned separately.
#
#     constants, apply = program.apply("open_constants").values()
#     apply(x, constants())           # program(x); other constants give other results
#
# Constants of the bodies of loops, branches and calls are passed in from outside. Values that a
# custom derivative closes over stay: JAX does not differentiate with respect to them, and the rule,
# a Python function, has its own.


@dataclass(frozen=True)
class OpenConstants(Pass):
    """Turn constants into an argument, as `jax.closure_convert` does; the inverse of `closed`.

    The result is two programs: `constants`, which takes no arguments and returns a list of the
    values, and `apply`, which takes such a list after the other positional arguments. Constants in
    the bodies of loops, branches and calls are included, each once.

    Args:
        min_bytes: The minimum size in bytes of a constant to turn into an argument.

    Note:
        Values that a function with a custom derivative closes over stay constants: JAX does not
        differentiate with respect to them, and the rule holds them itself.

    Example:
        table = jnp.arange(3.0)

        def f(x):
            return x * table

        $ jaxprtool opt f.py:f --args "f32[3]" -p open_constants
        # constants
        { lambda a:f32[3]; . let  in (a,) }

        # apply
        { lambda ; a:f32[3] b:f32[3]. let c:f32[3] = mul a b in (c,) }
    """

    name: ClassVar[str] = "open_constants"
    group: ClassVar[str] = "split"
    preserves: ClassVar[bool] = False

    min_bytes: int = 0

    def __call__(self, program: Program) -> Programs:
        whole = jaxcompat.close_jaxpr(program.jaxpr)
        pinned = _Pinned()
        pinned.leading(whole, [False] * len(whole.outvars))
        body, taken = _Opener(self.min_bytes, pinned.values).opened(whole)
        constants, values = (
            [var for var, _ in taken.values()],
            [value for _, value in taken.values()],
        )
        count = len(program.in_avals)
        args, kwargs = filled(program.in_tree, range(count))
        place = len(jax.tree.leaves(args))
        old, names = body.invars[:count], program.arg_names
        arg_names = unique([*names[:place], *paths("constants", values), *names[place:]])
        invars = [*old[:place], *constants, *old[place:]]
        jaxpr = jaxcompat.replace_jaxpr(body, invars=invars)
        apply = program.replace(
            jaxpr=with_names(jaxpr, program.name, arg_names, program.out_names),
            in_tree=structure(((*args, values), kwargs)),
            arg_names=arg_names,
        )
        return Programs(
            {"constants": _constants_program(program, constants, values), "apply": apply}
        )


def _constants_program(
    program: Program, constants: Sequence[Var], values: Sequence[Any]
) -> Program:
    """Return the program without arguments that returns the list of these constants."""
    out_names = tuple(paths("result", values))
    parts: dict[str, Any] = {"constvars": constants, "consts": values, "invars": (), "eqns": ()}
    jaxpr = jaxcompat.replace_jaxpr(program.jaxpr, outvars=constants, **parts)
    return Program(
        name=program.name,
        jaxpr=with_names(jaxpr, program.name, (), out_names),
        in_tree=structure(((), {})),
        out_tree=structure(values),
        arg_names=(),
        out_names=out_names,
        roots=program.roots,
    )


# --- constants that become arguments --------------------------------------------------------------


@dataclass
class _Opener:
    """The state of opening one program's constants; bodies that equations share are opened once."""

    min_bytes: int
    pinned: set[int]
    memo: Memo = field(default_factory=Memo)

    def opened(self, body: ClosedJaxpr) -> tuple[ClosedJaxpr, Taken]:
        """Return a body that takes constants after its arguments, and these constants."""
        return self.memo(lambda: self._opened(body), body)

    def _opened(self, body: ClosedJaxpr) -> tuple[ClosedJaxpr, Taken]:
        taken: Taken = {}
        names: dict[Any, Var] = {}
        left: list[tuple[Var, Any]] = []
        for var, value in zip(body.constvars, body.consts, strict=True):
            if self._opens(var, value):
                names[var], _ = taken.setdefault((identity(value), var.aval), (var, value))
            else:
                left.append((var, value))
        eqns = [self._equation(eqn, names, taken) for eqn in body.eqns]
        if not taken:
            return body, taken
        new = jaxcompat.replace_jaxpr(
            body,
            constvars=[var for var, _ in left],
            consts=[value for _, value in left],
            invars=[*body.invars, *(var for var, _ in taken.values())],
            outvars=substitute(body.outvars, names),
            eqns=eqns,
        )
        return new, taken

    def _opens(self, var: Var, value: object) -> bool:
        size = None if isinstance(var.aval, jaxcompat.AbstractRef) else size_of(var.aval)
        return size is not None and size >= self.min_bytes and identity(value) not in self.pinned

    def _equation(self, eqn: JaxprEqn, names: Mapping[Any, Var], taken: Taken) -> JaxprEqn:
        """Return an equation whose bodies are passed their constants; adds new ones to `taken`."""
        eqn = with_operands(eqn, names)
        if (inside := open_regions(eqn)) is None:
            return eqn
        return pass_constants(
            inside, [self.opened(body) for body in inside.bodies], taken, self.memo
        )


# --- constants that stay --------------------------------------------------------------------------


@dataclass
class _Pinned:
    """The constants, by identity, that must stay: those that custom derivatives close over.

    So must those of bodies that cannot take more operands.
    """

    values: set[int] = field(default_factory=set)
    memo: Memo = field(default_factory=Memo)

    @rules_followed()
    def leading(self, body: ClosedJaxpr, outs: Sequence[bool]) -> list[bool]:
        """Record the constants that stay in a body, and return which of its arguments are fixed.

        `outs` states which results are fixed, and may not depend on a constant that varies.
        """
        return self.memo(lambda: self._leading(body, outs), body, tuple(outs))

    def _leading(self, body: ClosedJaxpr, outs: Sequence[bool]) -> list[bool]:
        fixed = {v for v, flag in zip(body.outvars, outs, strict=True) if flag and _is_var(v)}
        for eqn in reversed(body.eqns):
            fixed_outs = [v in fixed for v in eqn.outvars]
            inside = open_regions(eqn)
            if inside is None:
                flags = [any(fixed_outs)] * len(eqn.invars)
                if has_rule(eqn):
                    closed_over = eqn.params["num_consts"]
                    flags[:closed_over] = [True] * closed_over
                    self._note(_rule_constants(eqn))
                for _, inner in sub_jaxprs(eqn):
                    self._note(_constants(inner))
            else:
                flags = inside.backward(fixed_outs, partial(self._through, inside.bodies))
            fixed |= {v for v, flag in zip(eqn.invars, flags, strict=True) if flag and _is_var(v)}
        for var, value in zip(body.constvars, body.consts, strict=True):
            if var in fixed:
                self._note([value])
        return [v in fixed for v in body.invars]

    def _through(
        self, bodies: Sequence[ClosedJaxpr], number: int, outs: Sequence[bool]
    ) -> list[bool]:
        return self.leading(bodies[number], outs)

    def _note(self, values: Iterable[Any]) -> None:
        self.values.update(map(identity, values))


def _is_var(atom: object) -> bool:
    return isinstance(atom, Var)


def _rule_constants(eqn: JaxprEqn) -> Iterator[Any]:
    """Yield the constants of the rule of a custom derivative, and of the rules in it."""
    try:
        rule = custom_rule(eqn)
    except UnsupportedError:
        return  # then it cannot be differentiated
    for jaxpr in rule_jaxprs(rule).values():
        yield from _constants(jaxpr)


def _constants(jaxpr: AnyJaxpr) -> Iterator[Any]:
    """Yield the constants of a jaxpr at any depth."""
    closed = jaxcompat.close_jaxpr(jaxpr)
    yield from closed.consts
    for eqn in equations(jaxcompat.open_jaxpr(closed)):
        for _, inner in sub_jaxprs(eqn):
            yield from getattr(inner, "consts", ())


# --- calls ----------------------------------------------------------------------------------------

#: The type of the `policy` argument of `jax.checkpoint`.
Policy = Callable[..., Any]


@dataclass(frozen=True)
class Checkpoint(Pass):
    """Recompute intermediate values in derivatives: the jaxpr of checkpoint(f).

    The program becomes one call. A later `grad`, or another derivative, recomputes the values of
    this call in the backward pass instead of storing them.

    Args:
        policy: Which values may be stored: a policy of `jax.checkpoint_policies`, such as
            `dots_saveable` or `save_only_these_names('a', 'b')`; quotes are optional. In Python it
            may also be the policy itself.
        prevent_cse: Prevent XLA from merging the recomputation with the original.
        only: Apply it only to the scopes and loop bodies that match a pattern, `Block_*` or
            `GPT/Block_3`, each in a call of its own. A scope belongs to a module or a called
            function; a loop body has the name of its function.

    Raises:
        PipelineError: If there is no policy of that name, or no scope matches `only`.
        UnsupportedError: If a matching scope has effects.

    Example:
        $ jaxprtool opt model.py:loss -p "checkpoint(policy=dots_saveable), grad"
    """

    name: ClassVar[str] = "checkpoint"
    group: ClassVar[str] = "transform"
    expressions: ClassVar[frozenset[str]] = frozenset({"policy"})

    policy: Any = None
    prevent_cse: bool = True
    only: str | None = None

    def __call__(self, program: Program) -> Program:
        """Return the program under `jax.checkpoint`. Raises PipelineError for an unknown policy."""
        policy = policy_of(self.policy) if isinstance(self.policy, str) else self.policy
        checkpointed = partial(jax.checkpoint, prevent_cse=self.prevent_cse, policy=policy)
        if self.only is not None:
            return checkpoint_scopes(program, self.only, checkpointed)
        fun = checkpointed(function_of(program))
        return retraced(program, self.name, fun, out_names=program.out_names)


@dataclass(frozen=True)
class Jit(Pass):
    """Wrap the program in one call: the jaxpr of jit(f).

    The options apply to the program as they do to a function under `jax.jit`: donated arguments are
    donated when the program is called, compiled, exported or written.

    Args:
        name: The name of the call; by default the program's name.
        donate_argnums: The positional arguments whose memory the results may reuse.
        donate_argnames: The names of arguments whose memory the results may reuse.
        keep_unused: Keep unused arguments.
        inline: Let JAX inline the call: JAX 0.10 does so at once, JAX 0.12 when it lowers the call.
        in_shardings: The specs of the arguments on the mesh that is set (`--mesh`), as the text of
            a prefix tree: `(P(), P('data'))`. JAX chooses where a spec is None.
        out_shardings: The specs of the results, likewise.
        compiler_options: Options of XLA: `{'xla_cpu_enable_fast_math': True}`.

    Raises:
        ArgumentsError: If there is no argument at a position or with a name, or specs do not fit
            the program or the mesh.

    Example:
        def f(x):
            return jnp.sin(x)

        $ jaxprtool opt f.py:f --args "f32[3]" -p "jit(name='step')"
        { lambda ; a:f32[3]. let
            b:f32[3] = jit[
              name=step
              jaxpr={ lambda ; a:f32[3]. let b:f32[3] = sin a in (b,) }
            ] a
          in (b,) }
    """

    group: ClassVar[str] = "transform"
    expressions: ClassVar[frozenset[str]] = frozenset({"in_shardings", "out_shardings"})

    name: str | None = None  # type: ignore[misc, assignment]
    donate_argnums: int | tuple[int, ...] = ()
    donate_argnames: str | tuple[str, ...] = ()
    keep_unused: bool = False
    inline: bool = False
    in_shardings: str | None = None
    out_shardings: str | None = None
    compiler_options: dict[str, Any] | None = None

    @property
    def partitions(self) -> bool:
        return self.in_shardings is not None or self.out_shardings is not None

    def __call__(self, program: Program) -> Program:
        """Return the program under `jax.jit`.

        Raises ArgumentsError for unknown arguments to donate, and specs that do not fit.
        """
        numbers, names = self._donated(program)
        fun = jax.jit(
            function_of(program, self.name),
            donate_argnums=numbers,
            donate_argnames=names,
            keep_unused=self.keep_unused,
            inline=self.inline,
        )
        call = retraced(program, "jit", fun, out_names=program.out_names)
        specs = Specs(self.in_shardings, self.out_shardings, ("in_shardings", "out_shardings"))
        return specs.applied(call.replace(jit=self._jit_options(program, numbers, names)))

    def _donated(self, program: Program) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Return the positions and the keywords to donate.

        Raises ArgumentsError for an unknown argument.
        """
        numbers = list(chosen(program, "jit", "donate_argnums", self.donate_argnums))
        argnames = self.donate_argnames
        keywords = program.in_tree.children()[1].node_data()[1]
        roots = positional_roots(program)
        names = []
        for name in (argnames,) if isinstance(argnames, str) else argnames:
            if name in keywords:
                names.append(name)
            elif name in roots:
                numbers.append(roots.index(name))
            else:
                raise ArgumentsError(
                    f"jit: {program.name} has no argument '{name}' for donate_argnames",
                    did_you_mean(name, [*keywords, *filter(None, roots)]),
                )
        return tuple(dict.fromkeys(numbers)), tuple(names)

    def _jit_options(
        self, program: Program, numbers: Sequence[int], names: Sequence[str]
    ) -> JitOptions | None:
        """Return the options of `jax.jit` for the whole program, which consists of the call."""
        if not (numbers or names or self.keep_unused or self.compiler_options):
            return program.jit
        args, kwargs = filled(program.in_tree, range(len(program.arg_names)))
        donated = jax.tree.leaves(([args[n] for n in numbers], [kwargs[n] for n in names]))
        options = (program.jit or JitOptions()).donating(program.arguments, donated)
        asked = self.compiler_options or {}
        return replace(
            options,
            keep_unused=options.keep_unused or self.keep_unused,
            compiler_options=tuple({**dict(options.compiler_options), **asked}.items()),
        )


Jit.name = "jit"  # type: ignore[misc, assignment]


@dataclass(frozen=True)
class NamedCall(Pass):
    """Put the program in a name scope, shown in profiles: the jaxpr of named_call(f).

    `show --scopes` shows the scope of each equation.

    Args:
        name: The name of the scope; by default the program's name.

    Example:
        $ jaxprtool show model.py:loss -p "named_call(name='loss')" --scopes
    """

    group: ClassVar[str] = "transform"

    name: str | None = None  # type: ignore[misc, assignment]

    def __call__(self, program: Program) -> Program:
        fun = jax.named_call(function_of(program), name=self.name or program.name)
        return retraced(program, "named_call", fun, out_names=program.out_names)


NamedCall.name = "named_call"  # type: ignore[misc, assignment]


@dataclass(frozen=True)
class Pmap(Pass):
    r"""Map over devices, one batch element on each: the jaxpr of pmap(f).

    Equations keep the context in which they were traced, without a mesh. Static arguments are those
    of the traced function (`--static-argnums`): there is no `static_broadcasted_argnums`.

    Args:
        axis_name: The name of the axis, for collectives.
        in_axes: The mapped axis of each argument: 0, None, or a prefix of the tree of positional
            arguments.
        out_axes: The mapped axis of each result.
        axis_size: The number of devices; by default all devices of this process.
        donate_argnums: The positional arguments whose memory the results may reuse.
        devices: The indices of the devices in `jax.devices()`; by default the first ones.

    Raises:
        ArgumentsError: If there is no argument at a position.
        UnsupportedError: If there are fewer devices than `axis_size`, or the program already maps
            over devices, by `pmap` or `shard_map`.

    Example:
        $ XLA_FLAGS=--xla_force_host_platform_device_count=4 \
            jaxprtool show model.py:loss -p "pmap(axis_name='i')"
    """

    name: ClassVar[str] = "pmap"
    group: ClassVar[str] = "transform"
    preserves: ClassVar[bool] = False

    axis_name: Hashable = None
    in_axes: Any = 0
    out_axes: Any = 0
    axis_size: int | None = None
    donate_argnums: int | tuple[int, ...] = ()
    devices: tuple[int, ...] | None = None

    @property
    def bound_axes(self) -> tuple[tuple[Hashable, int], ...]:
        return () if self.axis_name is None else ((self.axis_name, self._size()),)

    def _size(self) -> int:
        if self.axis_size is not None:
            return self.axis_size
        return jax.local_device_count() if self.devices is None else len(self.devices)

    def __call__(self, program: Program) -> Program:
        """Return the program under `jax.pmap`.

        Raises:
            BatchError: If the axes do not fit the program, as `batch` does.
            UnsupportedError: If there are not enough devices, or the program maps over devices.
        """
        inner = (e for e in equations(top_jaxpr(program)) if e.primitive.name == "shard_map")
        if (eqn := next(inner, None)) is not None:
            raise UnsupportedError(
                f"pmap cannot be nested: {program.name} already maps over devices, by {named(eqn)}",
                'JAX refuses nested pmap; map over one of the axes by -p "batch, pmap"',
            )
        dims, size = program_axes(program, self.in_axes, self._size())
        if size > (there := jax.local_device_count()):
            raise UnsupportedError(
                f"pmap of {program.name} needs {size} devices, but this machine has {there}",
                "XLA_FLAGS=--xla_force_host_platform_device_count=N creates N devices on a CPU",
            )
        devices = self._chosen_devices()
        donated = chosen(program, "pmap", "donate_argnums", self.donate_argnums)
        axis = Axis(None, size)
        avals = [
            aval if dim is None else axis.aval(aval, dim)
            for aval, dim in zip(program.in_avals, dims, strict=True)
        ]
        free = free_axes(program, self.axis_name, size)
        mapped = jax.pmap(
            function_of(program),
            axis_name=self.axis_name,
            in_axes=self.in_axes,
            out_axes=self.out_axes,
            axis_size=size,
            donate_argnums=donated,
            devices=devices,
        )
        program = program.replace(axis_env=free)
        result = retraced(program, "pmap", mapped, avals=avals, out_names=program.out_names)
        if not donated:
            return result
        args, _ = filled(result.in_tree, range(len(result.arg_names)))
        donated_leaves = jax.tree.leaves([args[n] for n in donated])
        return result.replace(
            jit=(result.jit or JitOptions()).donating(result.arguments, donated_leaves)
        )

    def _chosen_devices(self) -> list[jax.Device] | None:
        """Return the devices at the indices. Raises UnsupportedError for one that is missing."""
        if self.devices is None:
            return None
        there = jax.devices()
        missing = [index for index in self.devices if not 0 <= index < len(there)]
        if missing:
            raise UnsupportedError(
                f"pmap: there is no device {missing[0]}; this machine has {len(there)}"
            )
        return [there[index] for index in self.devices]


# --- disable_jit ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class DisableJit(Pass):
    """Inline every jit and closed call, at every depth, whatever its settings.

    Calls that `inline` keeps for their settings (donation, shardings, backends, `keep_unused`) are
    inlined too, as under `jax.disable_jit`. But `jax.disable_jit` also runs loops and branches in
    Python, which requires values: here they stay. Use `unroll` to unroll loops.

    The result is still compiled as a whole when it is run. To run one equation at a time, use
    `jaxprtool compare --op-by-op`, and `--bisect` to find where that differs from compiled code.

    Note:
        Calls of `nest` with a value sown inside stay. So do shared bodies that `inline` keeps to
        bound the growth of the program.

    Example:
        def f(x):
            return jax.jit(jnp.sin, keep_unused=True)(x)

        $ jaxprtool opt f.py:f --args "f32[3]" -p disable_jit
        { lambda ; a:f32[3]. let b:f32[3] = sin a in (b,) }
    """

    name: ClassVar[str] = "disable_jit"
    group: ClassVar[str] = "clean up"

    def __call__(self, program: Program) -> Program:
        return Inline(force=True)(program)


# --- policies of checkpoint -----------------------------------------------------------------------


def policy_of(text: str) -> Policy:
    """Return the policy with a name of `jax.checkpoint_policies`: `dots_saveable`.

    Those that take arguments are written as calls with literals, `save_only_these_names('a')`; the
    arguments of `save_from_both_policies` are policies. Raises PipelineError.
    """
    source = expressions.parse_arguments(text, "the policy", PipelineError)
    if len(source.args) != 1 or source.keywords:
        raise PipelineError(f"a policy must be one of jax.checkpoint_policies, not '{text}'")
    return _policy(source, source.args[0])


def _policy(source: expressions.ParsedArguments, node: ast.expr) -> Policy:
    called = isinstance(node, ast.Call)
    name_node = node.func if isinstance(node, ast.Call) else node
    name = source.segment(name_node).removeprefix("jax.").removeprefix("checkpoint_policies.")
    policies = {**POLICIES, **POLICY_FACTORIES}
    if name not in policies:
        hint = did_you_mean(name, policies) or f"available: {', '.join(sorted(policies))}"
        raise source.fail(node, f"JAX has no checkpoint policy '{name}'", hint)
    policy = policies[name]
    if called is not (name in POLICY_FACTORIES):
        raise source.fail(node, f"the policy {name} takes {'no ' if called else ''}arguments")
    if not isinstance(node, ast.Call):
        return policy
    read = _policy if name == "save_from_both_policies" else expressions.ParsedArguments.literal
    args = [read(source, arg) for arg in node.args]
    kwargs = {k.arg: read(source, k.value) for k in node.keywords if k.arg is not None}
    try:
        return policy(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise source.fail(node, f"the policy {name} cannot be created: {error}") from None
