"""Measure how fast `browse` shows and scrolls a program of 100,000 equations."""

import asyncio
import gc
import statistics
import sys
import time

import jax.numpy as jnp

import jaxprtool
from jaxprtool.commands.browse.app import Browser
from jaxprtool.commands.browse.document import StateRecorder

ROUNDS, PAGES = 5, 40


def program(count):
    """Return a program of `size` equations, written as a Python loop of a few lines."""

    def fun(x):
        for _ in range(count // 5):
            hidden = jnp.sin(x) * 2.0
            x = hidden + x.reshape(2, -1).sum()
        return x

    return jaxprtool.trace(fun, jnp.ones(8))


async def measure(traced):
    """Return the seconds of the first frame, a page down, folding, and inferring names."""
    start = time.perf_counter()
    app = Browser(StateRecorder(traced).states)
    async with app.run_test(size=(160, 50)) as pilot:
        first = time.perf_counter() - start
        while not app.program.document.is_complete:
            await asyncio.sleep(0.01)
        named = time.perf_counter() - start
        await pilot.pause()
        pages = []
        for _ in range(PAGES):
            start = time.perf_counter()
            app.program.action_page(1)
            app.screen._compositor.reflow(app.screen, app.size)
            app.screen._compositor.render_update(full=True).render_segments(app.console)
            pages.append(time.perf_counter() - start)
            await pilot.pause()
        start = time.perf_counter()
        await pilot.press("slash", *"reshape", "enter")
        searched = time.perf_counter() - start
    return first, statistics.median(pages), named, searched


def main():
    """Print the medians."""
    traced = program(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
    gc.freeze()  # as the command does
    rounds = [asyncio.run(measure(traced)) for _ in range(ROUNDS)]
    first, page, named, searched = map(statistics.median, zip(*rounds, strict=True))
    print(f"{len(traced.jaxpr.eqns):,} equations")
    print(f"first frame {first:.2f} s, names {named:.2f} s, search {searched:.2f} s")
    print(f"page down {page * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
