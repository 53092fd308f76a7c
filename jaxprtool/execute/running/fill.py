"""Values for a program's arguments: given by the user, or random arrays.

An argument given by type alone (`f32[8,3]`) gets the same values in every run with the same seed
and position. Floats and complex numbers are normally distributed. Integers lie in [0, 8), so that
they are usable as indices and tokens. Booleans are True or False, and PRNG keys are split from one
key.

Programs that agree on these integers may differ on others, so a check also runs them on
`with_wide_integers`: negative ones, and ones beyond every index.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxprtool.errors import ArgumentsError, OutOfMemoryError
from jaxprtool.ir.basics.dtypes import is_foreign
from jaxprtool.ir.core.structured import While, view
from jaxprtool.ir.dataflow.input_domains import POSITIVE, Domain, input_domains, shown
from jaxprtool.ir.dataflow.slicing import Start, forward_slice
from jaxprtool.ir.programs.program import Program
from jaxprtool.ir.programs.ref_contents import contents
from jaxprtool.ir.shapes.bounds import LengthsBound, SizeBound
from jaxprtool.ir.shapes.symbols import sizes_by_symbol
from jaxprtool.jaxcompat import Aval, open_jaxpr

#: The exclusive limit of random integers, unless their dtype's is smaller.
INTEGER_LIMIT = 8

#: An array with so many elements has negative and large integers at once. With fewer, and scalars,
#: several draws have them.
_MANY_ELEMENTS, _WIDE_DRAWS = 8, 4


@dataclass(frozen=True)
class Filled:
    """Flat arguments for running a program.

    Attributes:
        arguments: The values.
        random: The names of the random ones.
        within: The domains of random ones, by name. Others are drawn from all numbers.
    """

    arguments: tuple[Any, ...]
    random: tuple[str, ...]
    within: Mapping[str, Domain] = field(default_factory=dict)

    def described(self, seed: int) -> str:
        """Return a description of the values: `random values, seed 0, v positive`."""
        count, random = len(self.arguments), len(self.random)
        if not random:
            return "the given values" if count else "no inputs"
        given = f"the given values, {random} of {count} of them random"
        return f"{'random values' if random == count else given}, seed {seed}{self.domains_text()}"

    def domains_text(self) -> str:
        """Return the restricted domains of random values: `, v positive`."""
        by_domain: dict[str, list[str]] = {}
        for name, domain in self.within.items():
            by_domain.setdefault(shown(domain), []).append(name)
        domains = [
            f"{', '.join(names) if len(names) <= 4 else f'{len(names)} arguments'} {domain}"
            for domain, names in by_domain.items()
        ]
        return f", {'; '.join(domains)}" if domains else ""


def fill(
    program: Program,
    given: Mapping[str, Any],
    seed: int = 0,
    domains: Mapping[str, Domain] | None = None,
) -> Filled:
    """Return the program's flat arguments, from values given by argument name.

    A `jax.ShapeDtypeStruct` is replaced by random values of the program's argument type, which a
    pass may have changed. They are drawn from the argument's entry of `domains`, or else from the
    domain in which its use in the program is finite.

    Raises:
        ArgumentsError: If an argument is not given, a pass has changed the type of a value, or a
            shape has a dimension that is not a number.
    """
    arguments, random, within = [], [], {}
    names = zip(program.arg_names, program.in_avals, strict=True)
    for position, (name, aval) in enumerate(names):
        if name not in given:
            raise ArgumentsError(
                f"the passes added an argument '{name}' to {program.name}, which has no value"
            )
        value = contents(given[name])
        if isinstance(value, jax.ShapeDtypeStruct):
            sharding = value.sharding
            domain = (domains or {}).get(name) or _domain(program, position)
            try:
                value = random_argument(program, position, seed, domain)
            except MemoryError as error:
                raise OutOfMemoryError(
                    f"argument '{name}' of {program.name} does not fit: {error}"
                ) from error
            if domain is not None:
                within[name] = domain
            if isinstance(getattr(sharding, "mesh", None), jax.sharding.Mesh):
                value = jax.device_put(value, sharding)
            if aval.dtype != jax.dtypes.float0:  # has only one value
                random.append(name)
        elif np.shape(value) != aval.shape:
            raise ArgumentsError(
                f"argument '{name}' has shape {np.shape(value)}, but after the passes "
                f"{program.name} takes {aval.str_short(short_dtypes=True)}",
                hint="give it by type alone, to fill it with random values that fit",
            )
        arguments.append(value)
    return Filled(tuple(program.checked(arguments)), tuple(random), within)


def refitted(program: Program, given: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return values by argument name; those added or reshaped by passes are given by type.

    A Ref is replaced by its value. `fill` makes random values for a type: for instance, tangents of
    `jvp` are not given, and the value of one batch element does not fit a batch. Also returns the
    names of the replaced values.
    """
    values, dropped = {name: contents(value) for name, value in given.items()}, []
    for name, aval in zip(program.arg_names, program.in_avals, strict=True):
        value = values.get(name)
        if isinstance(value, jax.ShapeDtypeStruct):
            continue
        if name not in values or np.shape(values[name]) != aval.shape:
            dropped += [name] if name in values else []
            values[name] = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    return values, tuple(dropped)


def with_wide_integers(program: Program, filled: Filled, seed: int) -> list[Filled]:
    """Return arguments whose random integers are of both signs and any size, in several draws.

    Sizes, lengths, and integers that a `while` loop depends on stay as they are: the loop might
    run for as many iterations.

    Args:
        program: The program.
        filled: The arguments.
        seed: The seed of random values.

    Returns:
        The arguments of each draw; none if no argument is such an integer.
    """
    bounded, avals = dict(program.bounds), program.in_avals
    positions = [
        position
        for position, name in enumerate(program.arg_names)
        if name in filled.random
        and name not in bounded
        and jnp.issubdtype(avals[position].dtype, np.integer)
        and math.prod(avals[position].shape)
        and not _steers_a_loop(program, position)
    ]
    if not positions:
        return []
    names = {program.arg_names[position] for position in positions}
    within = {name: domain for name, domain in filled.within.items() if name not in names}
    is_small = any(math.prod(avals[position].shape) < _MANY_ELEMENTS for position in positions)
    draws = []
    for draw in range(_WIDE_DRAWS if is_small else 1):
        arguments = list(filled.arguments)
        for count, position in enumerate(positions):
            # Four draws are all pairs of signs of two scalars.
            value = _wide_integers(avals[position], (seed, position, draw), draw >> count % 2)
            old = arguments[position]
            arguments[position] = (
                jax.device_put(value, old.sharding) if isinstance(old, jax.Array) else value
            )
        checked = tuple(program.checked(arguments))
        draws.append(replace(filled, arguments=checked, within=within))
    return draws


def _steers_a_loop(program: Program, position: int) -> bool:
    """Return True if an argument flows into a `while` loop."""
    top = open_jaxpr(program.jaxpr)
    run = forward_slice(top, Start([(top, top.invars[position])]))
    eqns = (each.jaxpr.eqns[i] for each in run.runs() for i in each.inside)
    return any(isinstance(view(eqn), While) for eqn in eqns)


def _wide_integers(aval: Aval, seed: tuple[int, ...], first: int) -> np.ndarray:
    """Return as many negative integers as large ones, and some of the usual range between them.

    A scalar is negative if `first` is even, and large if it is odd.
    """
    rng, info = np.random.default_rng(seed), jnp.iinfo(aval.dtype)
    low, high, size = int(info.min), int(info.max), math.prod(aval.shape)
    negative = [n for n in (-1, -2, -3, -100, low, low + 1) if low <= n < 0]
    large = [n for n in (INTEGER_LIMIT, 100, 1000, high, high - 1) if INTEGER_LIMIT <= n <= high]
    usual = list(range(min(INTEGER_LIMIT, high + 1)))
    kinds = [negative or usual, large or usual, usual]
    values = [int(rng.choice(kinds[(i + first % 2) % 3])) for i in range(size)]
    if first == 0:
        values[0] = kinds[0][0]
    return np.array([values[i] for i in rng.permutation(size)], aval.dtype).reshape(aval.shape)


def _domain(program: Program, position: int) -> Domain | None:
    """Return the domain of random values of an argument; None for all numbers."""
    dtype = getattr(program.in_avals[position], "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, np.number):
        return None
    domain = input_domains(program.jaxpr)[position]
    if jnp.issubdtype(dtype, jnp.floating):
        return domain
    return domain if domain == POSITIVE and jnp.issubdtype(dtype, jnp.integer) else None


def random_argument(
    program: Program, position: int, seed: int, domain: Domain | None = None
) -> Any:
    """Return a random value of a flat argument; sizes and lengths are within their bounds.

    Floats are from `domain`, or else from the domain in which their use is finite.

    Raises:
        ArgumentsError: As in `random_array`, and if no lengths fit.
    """
    name, aval = program.arguments[position]
    bounds = dict(program.bounds)
    bound = bounds.get(name)
    if bound is None:
        array = random_array(aval, (seed, position), name)
        domain = domain or _domain(program, position)
        return array if domain is None else _into(array, domain)
    sizes = {}
    if isinstance(bound, LengthsBound):
        sizes = {
            each: int(random_argument(program, i, seed))
            for i, (each, aval) in enumerate(program.arguments)
            if isinstance(bounds.get(each), SizeBound) and aval.shape == ()
        }
    rng = np.random.default_rng((seed, position))
    try:
        return np.asarray(bound.random(rng, aval.shape, sizes), aval.dtype)
    except ValueError as error:
        raise ArgumentsError(f"argument '{name}' of {program.name}: {error}") from None


def _into(array: np.ndarray, domain: Domain) -> np.ndarray:
    """Return normal numbers mapped to an open interval, or to a positive definite matrix."""
    if jnp.issubdtype(array.dtype, jnp.integer):
        return np.maximum(array, 1)  # the only domain of integers is positive
    values = np.asarray(array, np.float64)
    if domain == "positive definite":
        size = values.shape[-1]
        values = values @ np.swapaxes(values, -1, -2) / size + np.eye(size)
        return values.astype(array.dtype)
    low, high = domain
    if math.isinf(high):
        values = low + np.maximum(abs(values), 1e-3)
    elif math.isinf(low):
        values = high - np.maximum(abs(values), 1e-3)
    else:
        values = low + (high - low) * (0.5 + 0.49 * np.tanh(values))
    return values.astype(array.dtype)


@jax.transfer_guard("allow")
def random_array(aval: Aval, seed: tuple[int, int], name: str = "argument") -> Any:
    """Return an array of an abstract value's shape and dtype, the same for the same seed.

    Raises ArgumentsError, which names the argument, if a dimension is symbolic or the dtype is
    defined by another package.
    """
    symbolic = [str(n) for n in aval.shape if not isinstance(n, int)]
    if symbolic:
        names = "=…, ".join(sizes_by_symbol([aval]))
        raise ArgumentsError(
            f"argument '{name}' is {aval.str_short(short_dtypes=True)}: "
            f"{', '.join(symbolic)} needs a number before the program can run",
            hint=f'write the sizes in --args, or -p "specialize({names}=…)"',
        )
    rng = np.random.default_rng(seed)
    dtype, shape = aval.dtype, aval.shape
    if is_foreign(dtype):
        raise ArgumentsError(
            f"argument '{name}' is {aval.str_short(short_dtypes=True)}, for which random values "
            "cannot be generated: only its package knows which are valid"
        )
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        key = jax.random.key(int(rng.integers(2**31)), impl=dtype)
        return jax.random.split(key, shape) if shape else key
    return _random_numbers(rng, dtype, shape)


def _random_numbers(
    rng: np.random.Generator, dtype: np.dtype, shape: tuple[int, ...]
) -> np.ndarray:
    if dtype == jax.dtypes.float0:
        return np.zeros(shape, dtype)
    if dtype == np.bool_:
        return _booleans(rng, shape)
    if jnp.issubdtype(dtype, np.integer):
        top = min(INTEGER_LIMIT, int(jnp.iinfo(dtype).max) + 1)
        return rng.integers(0, top, shape).astype(dtype)
    values = rng.standard_normal(shape)
    if jnp.issubdtype(dtype, np.complexfloating):
        return (values + 1j * rng.standard_normal(shape)).astype(dtype)
    if float(jnp.finfo(dtype).min) > 0:  # f8_e8m0fnu has only powers of two
        values = abs(values)
    return np.asarray(values).astype(dtype)


def _booleans(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    values = np.asarray(rng.integers(0, 2, shape)).astype(bool)
    if values.size > 1 and values.all() == values.any():
        values.flat[0] = not values.flat[0]
    return values
