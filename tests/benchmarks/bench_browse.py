"""Measure the CPU time in which `browse` shows and scrolls a program, against JAX's tracing.

Keys arrive as a terminal sends them; a picture of the screen is made for each, but not written.
"""

import asyncio
import gc
import statistics
import sys
import time

import jax
import jax.numpy as jnp
from textual import events

import jaxprtool
from jaxprtool.commands.browse.app import Browser
from jaxprtool.commands.browse.document import StateRecorder

ROUNDS, KEYS = 5, 40

#: The seconds between two keys, in which the screen is refreshed.
PAUSE = 0.06


def chain(x, count):
    """Compute `count` equations, written as a Python loop of a few lines."""
    for _ in range(count // 5):
        hidden = jnp.sin(x) * 2.0
        x = hidden + x.reshape(2, -1).sum()
    return x


async def seconds_per_key(app, key):
    """Return the CPU seconds that a key takes, its refresh included."""
    start = time.process_time()
    for _ in range(KEYS):
        app.post_message(events.Key(key, None))
        await asyncio.sleep(PAUSE)
    return (time.process_time() - start) / KEYS


async def measure(traced):
    """Return the CPU seconds of the first screen, the names, a page down, a row down, a search."""
    start = time.process_time()
    app = Browser(StateRecorder(traced).states)
    async with app.run_test(size=(160, 50)) as pilot:
        first = time.process_time() - start
        while not app.program.document.is_complete:
            await asyncio.sleep(0.01)
        named = time.process_time() - start
        await pilot.pause()
        page, row = await seconds_per_key(app, "pagedown"), await seconds_per_key(app, "down")
        start = time.process_time()
        await pilot.press("slash", *"reshape", "enter")
        searched = time.process_time() - start
    return first, named, page, row, searched


def main():
    """Print the medians."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    start = time.process_time()
    jax.make_jaxpr(chain, static_argnums=1)(jnp.ones(8), count)
    jax_seconds = time.process_time() - start
    traced = jaxprtool.trace(lambda x: chain(x, count), jnp.ones(8))
    gc.freeze()  # as the command does
    rounds = [asyncio.run(measure(traced)) for _ in range(ROUNDS)]
    first, named, page, row, searched = map(statistics.median, zip(*rounds, strict=True))
    print(f"{len(traced.jaxpr.eqns):,} equations, which JAX traces in {jax_seconds:.2f} s of CPU")
    print(f"first screen {first:.2f} s, names {named:.2f} s, search {searched:.2f} s")
    print(f"page down {page * 1e3:.1f} ms, row down {row * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
