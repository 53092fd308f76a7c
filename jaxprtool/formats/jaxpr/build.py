"""From the syntax tree of a `.jaxpr` file to jaxprs, with every name bound and every type checked.

Jaxprs are built from the outside in, since a `shard_map` binds the axes that its body mentions: a
body is built when the parameter that holds it is read. Types and effects are those that JAX's own
checker finds. It is asked once for all equations that look alike: of the same primitive,
parameters and types, in the same setting. So the time is linear, and a fraction of what JAX's
checker takes for all of them.

The rules of custom derivatives come last. JAX asks for them only when it differentiates, and a
rule may call the function that it belongs to.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from jaxprtool import jaxcompat
from jaxprtool.errors import ProgramFileError, described, did_you_mean
from jaxprtool.formats.jaxpr import params, values
from jaxprtool.formats.jaxpr.body_checks import RULE_CHECKS, check_bodies
from jaxprtool.formats.jaxpr.constants import Constants
from jaxprtool.formats.jaxpr.source import MAX_DEPTH, Expression
from jaxprtool.formats.jaxpr.syntax import Binder, Body, Equation, File, Kind, Parameter
from jaxprtool.formats.jaxpr.types import TypeReader
from jaxprtool.ir.equations import type_of
from jaxprtool.ir.plugins import missing_plugin
from jaxprtool.jaxcompat import Atom, DebugInfo, DropVar, JaxprEqn, Literal, Var


@dataclass(frozen=True, eq=False)
class Setting:
    """Where a jaxpr stands: within which `shard_map`s, outermost first, by their parameters."""

    shard_maps: tuple[Mapping[str, Any], ...] = ()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Have JAX's settings be those of this place."""
        with ExitStack() as stack:
            for parameters in self.shard_maps:
                stack.enter_context(jaxcompat.inside_shard_map(**parameters))
            yield


@dataclass(frozen=True, eq=False)
class Inferred:
    """What equations that look alike have in common."""

    primitive: Any
    params: dict[str, Any]
    types: list[Any]
    effects: Any
    context: Any


@dataclass(eq=False)
class Meaning:
    """What the parameters of equations mean in a setting; `lasting` if nothing else counts."""

    given: dict[str, Any]
    contexts: dict[str, Any]
    lasting: bool
    inferred: dict[tuple[Any, ...], Inferred] = field(default_factory=dict)


class Builder:
    """Builds the jaxprs of one file; `places` has what equations bear for their comments."""

    def __init__(
        self, file: File, types: TypeReader, constants: Constants, places: Mapping[Any, Any]
    ):
        self.file = file
        self.source = file.source
        self.types = types
        self.constants = constants
        self.places = places
        #: What names mean in every parameter.
        self.type_names = {"aval": types, "dim": types.dimension}
        self._literals: dict[str, Literal] = {}
        self._meanings: dict[tuple[Kind, Setting], Meaning] = {}
        self._settings: dict[Any, Setting] = {}
        self._shared: dict[tuple[str, Setting], Any] = {}
        self._rules: dict[tuple[Body, Setting], Callable[[], Any]] = {}
        self._waiting: list[Callable[[], Any]] = []
        self._depth = 0

    def program(self, debug_info: DebugInfo) -> Any:
        """The program's closed jaxpr. Raises ProgramFileError."""
        jaxpr = self.jaxpr(self.file.body, Setting(), debug_info)
        while self._waiting:
            self._waiting.pop()()
        return jaxpr

    # --- jaxprs -------------------------------------------------------------------------------

    def jaxpr(self, tree: Body, setting: Setting, debug_info: DebugInfo) -> Any:
        """The closed jaxpr of a tree that stands in this setting, which JAX is set to."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self.source.fail(tree.position, f"more than {MAX_DEPTH} jaxprs within each other")
        env: dict[str, Any] = {}
        consts = [self._constant(binder) for binder in tree.constants]
        constvars, invars = self._bound(tree.constants, env), self._bound(tree.arguments, env)
        for binder in tree.arguments:
            if binder.value is not None:
                raise self.source.fail(
                    binder.position, "only a constant has a value, before the ';'"
                )
        eqns = [self._equation(equation, env, setting) for equation in tree.equations]
        outvars = self._atoms(tree.results, env, tree.place)
        for i, atom in enumerate(outvars):
            if _is_ref(atom):
                position = self._position(tree.results, i, tree.place)
                raise self.source.fail(position, "a ref cannot be a result")
        try:
            jaxpr = jaxcompat.new_jaxpr(constvars, consts, invars, outvars, eqns, debug_info)
        except ValueError:
            message = "an equation has an effect on a ref that is neither an argument nor made here"
            raise self.source.fail(tree.position, message) from None
        self._depth -= 1
        return jaxpr

    def _constant(self, binder: Binder) -> Any:
        aval = self._type(binder.type, binder.position)
        if binder.value is None:
            raise self.source.fail(binder.position, f"the constant '{binder.name}' has no value")
        with self._faults_of(binder.value):
            return self.constants.array(binder.value.parse(self.source), aval)

    def _bound(self, binders: Sequence[Binder], env: dict[str, Any]) -> list[Var]:
        variables = []
        for binder in binders:
            variable = Var(self._type(binder.type, binder.position))
            if binder.name in env:
                raise self._bound_twice(binder.name, binder.position)
            if binder.name != "_":
                env[binder.name] = variable
            variables.append(variable)
        return variables

    def _bound_twice(self, name: str, position: int) -> ProgramFileError:
        return self.source.fail(position, f"'{name}' is bound already")

    # --- atoms --------------------------------------------------------------------------------

    def _atoms(self, names: Sequence[str], env: dict[str, Any], place: int) -> list[Atom]:
        atoms = [*map(env.get, names)]
        if None in atoms:
            for i, name in enumerate(names):
                if atoms[i] is None:
                    env[name] = atoms[i] = self._literal(name, env, self._position(names, i, place))
        return atoms  # type: ignore[return-value]

    def _position(self, names: Sequence[str], index: int, place: int) -> int:
        """Where an operand or result stands; `place` is before all of them."""
        position = place
        for name in names[:index]:
            position = self.source.text.index(name, position) + len(name)
        return self.source.text.index(names[index], position)

    def _literal(self, text: str, env: Mapping[str, Any], position: int) -> Literal:
        literal = self._literals.get(text)
        if literal is None:
            if ":" not in text:
                hint = did_you_mean(text, env) if len(text) > 2 else None
                raise self.source.fail(position, f"there is no variable '{text}' here", hint)
            if text not in self.file.literals:
                number, _, type_ = text.partition(":")
                self.file.literals[text] = Expression(number, position, {}), type_
            value, type_ = self.file.literals[text]
            aval = self._type(type_, position)
            with self._faults_of(value):
                literal = Literal(self.constants.literal(value.parse(self.source), aval), aval)
            self._literals[text] = literal
        return literal

    def _type(self, text: str, position: int) -> Any:
        try:
            return self.types(text)
        except Exception as error:  # of any class: JAX's types check what they are made of
            raise self.source.fail(position, f"bad type {text}: {_said(error)}") from error

    @contextmanager
    def _faults_of(self, expression: Expression) -> Iterator[None]:
        """Say where in the file what is wrong with an expression is."""
        try:
            yield
        except values.Unreadable as error:
            position = expression.position_of(error.node)
            raise self.source.fail(position, str(error)) from error
        except (RecursionError, MemoryError):
            raise self.source.fail(expression.position, "a value that cannot be read") from None

    # --- equations ----------------------------------------------------------------------------

    def _equation(self, tree: Equation, env: dict[str, Any], setting: Setting) -> JaxprEqn:
        operands = self._atoms(tree.operands, env, tree.place)
        meaning = self._meanings.get((tree.kind, setting)) or self._meaning(tree.kind, setting)
        key = *(id(atom.aval) for atom in operands), None, *tree.types
        inferred = meaning.inferred.get(key)
        if inferred is None:
            inferred = self._inferred(tree, operands, meaning)
            if meaning.lasting and not any(map(_is_ref, operands)):
                meaning.inferred[key] = inferred
        results: list[Var] = []
        for name, aval in zip(tree.results, inferred.types, strict=True):
            if name == "_":
                results.append(DropVar(aval))
                continue
            if name in env:
                position = self._result_position(tree, len(results))
                raise self._bound_twice(name, position)
            variable = env[name] = Var(aval)
            results.append(variable)
        place = self.places[tree.comment]
        primitive, parameters, effects = inferred.primitive, inferred.params, inferred.effects
        eqn = JaxprEqn(operands, results, primitive, parameters, effects, place, inferred.context)
        if primitive.name in RULE_CHECKS:
            self._waiting.append(partial(self._check_rules, tree, eqn, meaning.given))
        return eqn

    def _check_rules(self, tree: Equation, eqn: JaxprEqn, given: dict[str, Any]) -> None:
        try:
            RULE_CHECKS[eqn.primitive.name](eqn, given)
        except ProgramFileError:
            raise
        except Exception as error:  # what the file says may be anything
            message = f"{tree.kind.primitive}: {_said(error)}"
            raise self.source.fail(tree.position, message) from error

    def _inferred(self, tree: Equation, operands: list[Atom], meaning: Meaning) -> Inferred:
        """What JAX says of an equation, if that is what the file says."""
        declared = [
            None if text is None else self._type(text, self._result_position(tree, i))
            for i, text in enumerate(tree.types)
        ]
        kind = tree.kind
        types = [atom.aval for atom in operands]
        try:
            primitive, parameters = params.restored(kind.primitive, meaning.given, types, declared)
            known = [aval for aval in declared if aval is not None]
            context = params.context(meaning.contexts, types, known, self.types.mesh)
        except Exception as error:  # what the file says may be anything
            raise self._bad_equation(tree, declared, error) from error
        try:
            check_bodies(
                JaxprEqn(operands, [], primitive, parameters, set(), self.places[None], context)
            )
            with context.manager:
                types, effects = jaxcompat.inferred_types(primitive, parameters, operands)
        except ProgramFileError:
            raise
        except Exception as error:  # the rules of primitives fail in every way
            raise self._bad_equation(tree, declared, error) from error
        return Inferred(
            primitive, parameters, self._agreed(tree, declared, types), effects, context
        )

    def _bad_equation(
        self, tree: Equation, declared: Sequence[Any], error: Exception
    ) -> ProgramFileError:
        name, primitives = tree.kind.primitive, jaxcompat.registered_primitives()
        if isinstance(error, params.UnknownPrimitive):
            hint = missing_plugin(name) or did_you_mean(name, primitives)
            return self.source.fail(tree.kind.position, f"there is no primitive '{name}'", hint)
        hint = f"perhaps the type of '{tree.results[-1]}' is needed" if None in declared else None
        return self.source.fail(tree.position, f"{name}: {_said(error)}", hint)

    def _agreed(self, tree: Equation, declared: Sequence[Any], actual: Sequence[Any]) -> list[Any]:
        """The types of an equation's results: as declared, if they fit what it gives."""
        name = tree.kind.primitive
        if len(declared) != len(actual):
            message = f"{name} gives {len(actual)} results, not {len(declared)}"
            raise self.source.fail(tree.position, message)
        for i, (said, found) in enumerate(zip(declared, actual, strict=True)):
            if said is not None and not jaxcompat.fits(said, found):
                message = f"declared {tree.types[i]}, but {name} gives {type_of(found)}"
                raise self.source.fail(self._result_position(tree, i), message)
        pairs = zip(declared, actual, strict=True)
        return [found if said is None else said for said, found in pairs]

    def _result_position(self, tree: Equation, index: int) -> int:
        position = tree.position
        for i in range(index):
            for text in (tree.results[i], tree.types[i] or ""):
                position = self.source.text.index(text, position) + len(text)
        return self.source.text.index(tree.results[index], position)

    # --- parameters ---------------------------------------------------------------------------

    def _meaning(self, kind: Kind, setting: Setting) -> Meaning:
        """The values of the parameters of a kind of equation."""
        holding = [p for p in kind.parameters if self._mentions_jaxpr(p)]
        meaning = Meaning({}, {}, lasting=not holding)
        for parameter in kind.parameters:
            if parameter not in holding:
                value = self._value(parameter, self.type_names)
                if isinstance(value, str) and "jaxpr" in parameter.name:
                    hint = did_you_mean(value, self.file.shared)
                    message = f"there is no jaxpr '{value}' in this file"
                    raise self.source.fail(parameter.value.position, message, hint)
                at = meaning.contexts if parameter.name[0] == "@" else meaning.given
                at[parameter.name.removeprefix("@")] = value
        if not holding:
            self._meanings[kind, setting] = meaning
            return meaning
        with self._inside(kind, setting, meaning.given) as inner:
            for parameter in holding:
                meaning.given[parameter.name] = self._holder(
                    kind.primitive, parameter, inner, meaning.given
                )
        return meaning

    def _mentions_jaxpr(self, parameter: Parameter) -> bool:
        if parameter.value.bodies:
            return True
        words = _WORD.findall(parameter.value.text) if self.file.shared else ()
        return parameter.name != "name" and any(word in self.file.shared for word in words)

    def _value(self, parameter: Parameter, names: Mapping[str, Any]) -> Any:
        with self._faults_of(parameter.value):
            return values.decode(parameter.value.parse(self.source), names)

    def _holder(
        self, primitive: str, parameter: Parameter, setting: Setting, given: dict[str, Any]
    ) -> Any:
        """The value of a parameter that holds jaxprs."""
        label = given.get("name")
        names = _Names(self, parameter, setting, label if isinstance(label, str) else "")
        is_rule = parameter.name in params.RULES.get(primitive, ())
        if parameter.named is None and not is_rule:
            return self._value(parameter, names)
        with self._faults_of(parameter.named or parameter.value):
            name = values.decode((parameter.named or parameter.value).parse(self.source))
        node = parameter.value.parse(self.source)
        tree = names.tree(node.id) if isinstance(node, ast.Name) else None
        if tree is None or not isinstance(name, str):
            message = f"{parameter.name} is a name and a jaxpr"
            raise self.source.fail(parameter.position, message)
        return params.Rule(name, self._rule(tree, setting, name))

    def _rule(self, tree: Body, setting: Setting, name: str) -> Callable[[], Any]:
        """What gives the jaxpr of a custom rule, once it is built; the same for the same rule."""
        if (tree, setting) not in self._rules:

            @cache
            def rule() -> Any:
                with setting.entered():
                    return self.jaxpr(tree, setting, _debug_info("custom rule", name))

            self._rules[tree, setting] = rule
            self._waiting.append(rule)
        return self._rules[tree, setting]

    def shared_jaxpr(self, name: str, setting: Setting, debug_info: DebugInfo) -> Any:
        """The jaxpr that the file defines under a name."""
        tree, key = self.file.shared[name], (name, setting)
        if key not in self._shared:
            self._shared[key] = None
            self._shared[key] = self.jaxpr(tree, setting, debug_info)
        if self._shared[key] is None:
            raise self.source.fail(tree.position, f"'{name}' holds itself")
        return self._shared[key]

    @contextmanager
    def _inside(self, kind: Kind, setting: Setting, given: dict[str, Any]) -> Iterator[Setting]:
        """Have JAX's settings, and ours, be those of the bodies of an equation."""
        if kind.primitive != "shard_map":
            yield setting
            return
        with ExitStack() as stack:
            try:
                bound = {k: given[k] for k in ("mesh", "newly_manual_axes", "check_vma")}
                key = setting, *bound.values()
                inner = self._settings.setdefault(key, Setting((*setting.shard_maps, bound)))
                stack.enter_context(jaxcompat.inside_shard_map(**bound))
            except Exception as error:  # what the file says may be anything
                message = f"shard_map: {_said(error)}"
                raise self.source.fail(kind.position, message) from error
            yield inner


class _Names(Mapping[str, Any]):
    """What names mean in a parameter that holds jaxprs: these are built when they are asked for."""

    def __init__(self, builder: Builder, parameter: Parameter, setting: Setting, label: str):
        self._builder = builder
        self._parameter = parameter
        self._setting = setting
        self._label = label

    def tree(self, name: str) -> Body | None:
        """The tree of the jaxpr of that name."""
        written_here = self._parameter.value.bodies.get(name)
        return written_here or self._builder.file.shared.get(name)

    def __getitem__(self, name: str) -> Any:
        builder, here = self._builder, self._parameter.value.bodies
        debug_info = _debug_info(self._parameter.name, self._label or self._parameter.name)
        if name in here:
            return builder.jaxpr(here[name], self._setting, debug_info)
        if name in builder.file.shared:
            return builder.shared_jaxpr(name, self._setting, debug_info)
        return builder.type_names[name]

    def __contains__(self, name: object) -> bool:
        builder, here = self._builder, self._parameter.value.bodies
        return name in here or name in builder.file.shared or name in builder.type_names

    def __iter__(self) -> Iterator[str]:
        return iter(
            (*self._parameter.value.bodies, *self._builder.file.shared, *self._builder.type_names)
        )

    def __len__(self) -> int:
        return len(list(iter(self)))


_WORD = re.compile(r"[^\W\d]\w*")


def _debug_info(what: str, name: str) -> DebugInfo:
    return DebugInfo(what, name, None, None)


def _said(error: Exception) -> str:
    """What an exception of JAX's says is wrong with an equation, on one line and not too long."""
    text = " ".join(str(error).split())
    if missing := re.search(r"missing \d+ required .*arguments?: (.*)", text):
        return f"missing: {missing[1]}"
    if unknown := re.search(r"unexpected keyword argument ('\w+')", text):
        return f"there is no parameter {unknown[1]}"
    if isinstance(error, KeyError):
        return f"missing: {text}"
    if not text or not isinstance(error, ValueError | TypeError | NotImplementedError):
        return f"it does not take these operands and parameters ({described(error)})"
    return text if len(text) <= 300 else text[:297] + "..."


def _is_ref(atom: Atom) -> bool:
    return isinstance(atom.aval, jaxcompat.AbstractRef)
