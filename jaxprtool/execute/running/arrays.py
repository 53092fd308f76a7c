"""Arrays that go into a run and come out: filled, compared, and summarized.

An argument given by type alone (`f32[8,3]`) gets the same values in every run with the same seed
and position. Floats and complex numbers are normally distributed. Integers lie in [0, 8), so that
they are usable as indices and tokens. Booleans are True or False, and PRNG keys are split from one
key.

Programs that agree on these integers may differ on others, so a check also runs them on
`with_wide_integers`: negative ones, and ones beyond every index.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from jaxprtool.errors import ArgumentsError, Details, OutOfMemoryError
from jaxprtool.execute.running.backends import gathered_array
from jaxprtool.ir.conversions import contents
from jaxprtool.ir.dataflow import POSITIVE, Domain, Start, domain_text, forward_slice, input_domains
from jaxprtool.ir.dtypes import is_extended, is_foreign, physical
from jaxprtool.ir.program import Program
from jaxprtool.ir.regions import While, view
from jaxprtool.ir.symbols import LengthsBound, SizeBound, sizes_by_symbol
from jaxprtool.jaxcompat import Aval, open_jaxpr

# --- fill -----------------------------------------------------------------------------------------
# Values for a program's arguments: given by the user, or random arrays.

#: The exclusive limit of random integers, unless their dtype's is smaller.
INTEGER_LIMIT = 8

#: An array with so many elements has negative and large integers at once. With fewer, and scalars,
#: several draws have them.
_MANY_ELEMENTS, _WIDE_DRAWS = 8, 4


@dataclass(frozen=True)
class FilledArguments:
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
        """Return a description of the values: `random values, seed 0; v is positive`."""
        count, random = len(self.arguments), len(self.random)
        if not random:
            return "the given values" if count else "no inputs"
        text = f"the given values, {random} of {count} of them random"
        return f"{'random values' if random == count else text}, seed {seed}{self.domains_text()}"

    def domains_text(self) -> str:
        """Return the restricted domains of random values: `; v is positive`."""
        by_domain: dict[str, list[str]] = {}
        for name, domain in self.within.items():
            by_domain.setdefault(domain_text(domain), []).append(name)
        texts = []
        for described, names in by_domain.items():
            said = ", ".join(names) if len(names) <= 4 else f"{len(names):,} arguments"
            texts.append(f"; {said} {'is' if len(names) == 1 else 'are'} {described}")
        return "".join(texts)


def fill_arguments(
    program: Program,
    values: Mapping[str, Any],
    seed: int = 0,
    domains: Mapping[str, Domain] | None = None,
) -> FilledArguments:
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
        if name not in values:
            raise ArgumentsError(
                f"the passes added an argument '{name}' to {program.name}, which has no value"
            )
        value = contents(values[name])
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
    return FilledArguments(tuple(program.checked(arguments)), tuple(random), within)


def refitted(
    program: Program, by_name: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return values by argument name; those added or reshaped by passes are given by type.

    A Ref is replaced by its value. `fill_arguments` makes random values for a type: for instance,
    tangents of `jvp` are not given, and the value of one batch element does not fit a batch. Also
    returns the names of the replaced values.
    """
    values, dropped = {name: contents(value) for name, value in by_name.items()}, []
    for name, aval in zip(program.arg_names, program.in_avals, strict=True):
        value = values.get(name)
        if isinstance(value, jax.ShapeDtypeStruct):
            continue
        if name not in values or np.shape(values[name]) != aval.shape:
            dropped += [name] if name in values else []
            values[name] = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    return values, tuple(dropped)


def with_wide_integers(
    program: Program, filled: FilledArguments, seed: int
) -> list[FilledArguments]:
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
    eqns = (body_run.jaxpr.eqns[i] for body_run in run.runs() for i in body_run.inside)
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
            name: int(random_argument(program, i, seed))
            for i, (name, aval) in enumerate(program.arguments)
            if isinstance(bounds.get(name), SizeBound) and aval.shape == ()
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


# --- arrays ---------------------------------------------------------------------------------------
# Comparison of arrays, bit by bit or within the tolerance of their dtype.

#: The relative tolerance by width of the mantissa: some dozen rounding errors.
_ROUNDINGS = 64

#: Returns a mask of the elements that agree, and the tolerated error of each.
Comparison = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class ValueDifference:
    """A description of a difference, and further details."""

    text: str
    details: Details = ()

    def __str__(self) -> str:
        return self.text


def first_value_difference(
    before: Sequence[object],
    after: Sequence[object],
    agree: Comparison,
    names: Sequence[str] | None = None,
) -> ValueDifference | None:
    """Return the first difference between two lists of values; None if there is none.

    `agree` compares two arrays of the same shape and dtype elementwise. The values are called
    `names`, or by their position.
    """
    if len(before) != len(after):
        return ValueDifference(f"{len(before)} values before, {len(after)} after")
    for i, pair in enumerate(zip(before, after, strict=True)):
        fault = value_difference(names[i] if names else f"value {i}", *pair, agree)
        if fault is not None:
            return fault
    return None


def value_difference(
    name: str, before: object, after: object, agree: Comparison
) -> ValueDifference | None:
    """Return the difference of two values: in type, or the positions and errors."""
    # A literal among the results is a Python number with a dtype.
    a, b = (x if hasattr(x, "shape") else jnp.asarray(x) for x in (before, after))
    if (types := (dtype_and_shape(a), dtype_and_shape(b)))[0] != types[1]:
        return ValueDifference(f"{name} is {types[0]} before, {types[1]} after")
    a, b = as_numpy(a), as_numpy(b)
    same, tolerated = agree(a, b)
    wrong = ~same
    if not wrong.any():
        return None
    where = tuple(int(k) for k in np.argwhere(wrong)[0])
    count = f"{wrong.sum():,} of {wrong.size:,} elements"
    details = [
        ("result", f"{name}, {types[0]}"),
        ("differs in", f"{count}, the first at {list(where)}" if where else count),
        ("before", str(a[where])),
        ("after", str(b[where])),
        *_by_how_much(a, b, wrong, tolerated),
    ]
    return ValueDifference(f"{name} differs in {count}", details)


def _by_how_much(a: np.ndarray, b: np.ndarray, wrong: np.ndarray, tolerated: np.ndarray) -> Details:
    """Return the largest errors of wrong finite elements, and the tolerance of the first one."""
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return []
    a, b = wide(a), wide(b)
    finite = wrong & np.isfinite(a) & np.isfinite(b)
    if not finite.any():
        return []
    errors, sizes = np.abs(a[finite] - b[finite]), np.abs(a[finite])
    most = f"{errors.max():.3g} absolute"
    if sizes.any():
        most += f", {(errors[sizes > 0] / sizes[sizes > 0]).max():.3g} relative"
    tolerance = f"{tolerated[finite][0]:.3g} absolute"
    if sizes[0]:
        tolerance += f", {tolerated[finite][0] / sizes[0]:.3g} relative"
    return [("largest error", most), ("tolerance", f"{tolerance}, for the first")]


def bits_agree(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a mask of elements with equal bits; all NaNs are equal."""
    if np.iscomplexobj(a):
        return bits_agree(a.real, b.real) & bits_agree(a.imag, b.imag)
    if not jnp.issubdtype(a.dtype, jnp.floating):
        return a == b
    return (np.isnan(a) & np.isnan(b)) | ((a == b) & (np.signbit(a) == np.signbit(b)))


def values_agree(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a mask of elements that are equal up to rounding errors of the largest one."""
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return a == b, np.zeros(a.shape)
    relative = _ROUNDINGS * float(jnp.finfo(a.dtype).eps)
    a, b = wide(a), wide(b)
    sizes = np.abs(a[np.isfinite(a)])
    absolute = relative * float(sizes.max(initial=0.0))
    return np.isclose(a, b, rtol=0, atol=absolute, equal_nan=True), np.full(a.shape, absolute)


def wide(x: np.ndarray) -> np.ndarray:
    """Return numbers in double precision, real or complex."""
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def dtype_and_shape(x: Any) -> str:
    """Return the dtype and shape of an array, as one word."""
    return f"{x.dtype}{list(x.shape)}"


def as_numpy(x: Any) -> np.ndarray:
    """Return the array on the host; for an extended dtype, such as of keys, its base array."""
    return np.asarray(physical(x))


# --- summary --------------------------------------------------------------------------------------
# Summaries of arrays: the value of a small one, statistics of a large one.

#: The maximum number of elements of an array that is given in full.
WHOLE = 16


@dataclass(frozen=True)
class ArraySummary:
    """The value of a small array, or the statistics of a large one.

    Floats have min, max (without NaNs), mean (of finite elements), and the counts nan and inf.
    Complex numbers have the same, with min and max of the magnitude. Integers have min, max and
    mean, and booleans the counts true and false. Extended dtypes, such as PRNG keys, have no
    statistics. Arrays of dtype float0 have neither a value nor statistics.

    Attributes:
        value: The array if it is small, else None.
        statistics: The statistics by name, if it is large.
    """

    value: np.ndarray | None
    statistics: dict[str, Any] = field(default_factory=dict)

    @property
    def numbers(self) -> dict[str, Any]:
        """The statistics, also of a small array; empty for an empty one."""
        if self.value is not None and self.value.size:
            return statistics(self.value)
        return self.statistics

    @property
    def is_finite(self) -> bool:
        """Whether it has neither NaNs nor infinities."""
        if self.value is not None and self.value.dtype.kind in "fc":
            return bool(np.isfinite(self.value).all())
        return not (self.statistics.get("nan") or self.statistics.get("inf"))


def summarize(array: Any) -> ArraySummary:
    """Return the summary of a NumPy or JAX array of any dtype."""
    values = plain_array(array)
    if values.dtype == jax.dtypes.float0:
        return ArraySummary(None)
    has_numbers = not is_extended(getattr(array, "dtype", values.dtype))
    if np.size(array) <= WHOLE:
        return ArraySummary(values)
    return ArraySummary(None, statistics(values) if has_numbers else {})


def is_on_host(array: jax.Array) -> bool:
    """Return True for an array on one CPU device."""
    return len(array.devices()) == 1 and next(iter(array.devices())).platform == "cpu"


@jax.transfer_guard("allow")
def plain_array(array: Any) -> np.ndarray:
    """Return an array in one of NumPy's own dtypes, with exactly the same values.

    bfloat16 and the 8-bit floats become float32, 2- and 4-bit integers int8 or uint8, PRNG keys
    their key data, and other extended dtypes their base arrays; float0 is unchanged.
    """
    values = np.asarray(gathered_array(physical(array)))
    if values.dtype.isbuiltin == 1 or values.dtype == jax.dtypes.float0:
        return values
    if jnp.issubdtype(values.dtype, np.integer):
        return values.astype(
            np.uint8 if jnp.issubdtype(values.dtype, np.unsignedinteger) else np.int8
        )
    return values.astype(np.float32)


def statistics(values: np.ndarray) -> dict[str, Any]:
    """Return the statistics of a `ArraySummary` for an array in one of NumPy's own dtypes."""
    if values.dtype == np.bool_:
        count = int(values.sum())
        return {"true": count, "false": values.size - count}
    if np.issubdtype(values.dtype, np.integer):
        return {
            "min": int(values.min()),
            "max": int(values.max()),
            "mean": float(values.mean(dtype=np.float64)),
        }
    wide = values.astype(np.complex128 if np.iscomplexobj(values) else np.float64)
    numbers, finite = wide[~np.isnan(wide)], wide[np.isfinite(wide)]
    sizes: np.ndarray = abs(numbers) if np.iscomplexobj(values) else numbers
    return {
        "min": float(sizes.min()) if sizes.size else None,
        "max": float(sizes.max()) if sizes.size else None,
        "mean": finite.mean().item() if finite.size else None,
        "nan": int(np.isnan(wide).sum()),
        "inf": int(np.isinf(wide).sum()),
    }
