"""The time of a hunk is that of its lines, in both programs."""

import jax
import jax.numpy as jnp
import pytest

import jaxprtool
from jaxprtool.commands.diff.diff import with_measured_times
from jaxprtool.commands.profile.lines import Profile, TimedLine
from jaxprtool.ir.frames import frames_now

X = jnp.ones((4, 3))


#: The lines of functions whose time is a part of fusions, from their first one on.
SPLIT = {2}


def name(program, function, at):
    """Return the name of a line of a function in this file."""
    file = frames_now(program.roots).path(__file__)
    return f"{file}:{function.__code__.co_firstlineno + at}"


def profile(program, function, times):
    """Return a profile in which lines of this file take some seconds, and 1 second has no line."""
    lines = tuple(
        TimedLine(name(program, function, at), each, 0.0, 1.0, each, 0.0, 0.0, at in SPLIT)
        for at, each in times.items()
    )
    whole = sum(times.values()) + 1
    return Profile("timed", whole, 1.0, 1, None, lines, (), (), (), (), ())


def measured(before, after, times_before, times_after):
    programs = [jaxprtool.trace(each, X) for each in (before, after)]
    functions, times = (before, after), (times_before, times_after)
    return with_measured_times(jaxprtool.diff(*programs), *map(profile, programs, functions, times))


def plain(x):
    y = jnp.sin(x)
    return (y * 2).sum()


def added(x):
    y = jnp.sin(x)
    return (jnp.cos(y) * 2).sum()


def test_a_line_that_gained_an_equation_took_time_before():
    found = measured(plain, added, {1: 8, 2: 4}, {1: 9, 2: 6})
    times = found.times
    assert (times.whole.before, times.whole.after) == (13, 16)
    assert (times.differing.before, times.differing.after) == (4, 6)
    assert (times.others.before, times.others.after) == (8, 9)
    assert (times.no_line.before, times.no_line.after) == (1, 1)
    assert times.differing.is_split and not times.others.is_split
    assert times.hunks == (times.differing,)


def loop(x):
    def body(c, row):
        return jnp.tanh(c) + row, None

    return jax.lax.scan(body, x[0], x)[0]


def unrolled(x):
    def body(c, row):
        return jnp.tanh(c) + row, None

    return jax.lax.scan(body, x[0], x, unroll=2)[0]


def test_a_loop_that_changed_has_the_time_of_its_body():
    found = measured(loop, unrolled, {2: 8, 4: 2}, {2: 5, 4: 1})
    (seconds,) = found.times.hunks
    assert (seconds.before, seconds.after, seconds.is_split) == (10, 6, True)


def twice(x):
    y = jnp.sin(x) * 3
    z = jnp.exp(jnp.sin(x)) @ x.T
    return y.sum(), z.sum()


def other(x):
    y = jnp.sin(x) * 4
    z = jnp.log(jnp.sin(x)) @ x.T
    return y.sum(), z.sum()


@pytest.mark.parametrize("slow", [1, 2])
def test_the_largest_change_is_first(slow):
    found = measured(twice, other, {1: 1, 2: 1}, {1: 2, 2: 2} | {slow: 9})
    assert [each.after for each in found.times.hunks] == [9, 2]
    program = jaxprtool.trace(other, X)
    assert found.hunks[0].lines[0].source == name(program, other, slow)
    assert found.times.differing.after == 11
