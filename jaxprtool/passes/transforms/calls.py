"""checkpoint, jit, pmap, named_call and disable_jit as passes, with the options of JAX's functions.

    trace(loss, x).apply("checkpoint(policy='dots_saveable'), grad")
    trace(step, state, x).apply("jit(name='train_step', donate_argnums=0)")

The pass `closed`, which binds arguments, has a module of its own.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax

from jaxprtool.errors import ArgumentsError, PipelineError, UnsupportedError, did_you_mean
from jaxprtool.ir.custom_rules import POLICIES, POLICY_FACTORIES
from jaxprtool.ir.equations import equations, named
from jaxprtool.ir.meshes import Specs
from jaxprtool.ir.notation import expressions
from jaxprtool.ir.program import JitOptions, Program, top_jaxpr
from jaxprtool.ir.trees import filled
from jaxprtool.passes.cleanup.inline import Inline
from jaxprtool.passes.framework.base import Pass
from jaxprtool.passes.framework.retrace import (
    chosen,
    function_of,
    positional_roots,
    retraced,
)
from jaxprtool.passes.mapping.batch.axes import Axis, free_axes, program_axes
from jaxprtool.passes.transforms.closed import Closed
from jaxprtool.passes.transforms.scoped_checkpoint import checkpoint_scopes

__all__ = ["Checkpoint", "Closed", "DisableJit", "Jit", "NamedCall", "Pmap"]


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
