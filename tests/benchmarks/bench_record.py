"""Measure the overhead of recording a script.

    python tests/benchmarks/bench_record.py [scripts|calls|program|import] [REPEATS]

`scripts` runs each script of `scripts/` alone, under `record` and under `record --calls`,
alternately, and prints medians of the script's own wall time and of its peak memory, and their
ratios. `calls` prints the time of a call of a jitted function. `program` prints the time of
recording a program of 10^4 equations, and of tracing and lowering it. `import` prints the time of
importing the recorder.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"


def _timed(command, environment):
    """Return the wall time and the peak memory of a process, in seconds and MiB."""
    start = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{command[1]} failed")
    return time.perf_counter() - start, usage.ru_maxrss / 1024


def scripts(repeats):
    """Compare each script alone, recorded, and recorded with its calls."""
    from jaxprtool.recording.new_run import _environment
    from jaxprtool.recording.settings import Settings

    print("medians: seconds (ratio to alone), MiB (ratio to alone)")
    for script in sorted(SCRIPTS.glob("*.py")):
        found = {"alone": [], "recorded": [], "with calls": []}
        for _ in range(repeats):
            for how, values in found.items():
                environment = dict(os.environ)
                with tempfile.TemporaryDirectory() as run:
                    if how != "alone":
                        calls = how == "with calls"
                        environment = _environment(Settings(run, 0.0, calls=calls))
                    values.append(_timed([sys.executable, str(script)], environment))
        alone = [statistics.median(each) for each in zip(*found["alone"], strict=True)]
        for how, values in found.items():
            seconds, memory = (statistics.median(each) for each in zip(*values, strict=True))
            ratios = f"({seconds / alone[0]:.3f})", f"({memory / alone[1]:.3f})"
            print(f"{script.stem:14} {how:11} {seconds:7.2f} {ratios[0]} {memory:7.0f} {ratios[1]}")


def calls(repeats):
    """Compare a call of a jitted function alone, in a recorded process, and recorded itself."""
    import jax
    import jax.numpy as jnp

    from jaxprtool.recording.recorder import Recorder
    from jaxprtool.recording.settings import Settings

    def best(fun):
        times = []
        for _ in range(max(repeats, 5)):
            start = time.perf_counter()
            for _ in range(2000):
                fun()
            times.append((time.perf_counter() - start) / 2000 * 1e6)
        return min(times)

    def made():
        fun = jax.jit(lambda x: {"next": x + 1, "sum": x.sum()})
        fun(x)
        return lambda: fun(x)

    x = jnp.ones(3)
    alone = best(made())
    for how in ("recorded", "with calls"):
        with tempfile.TemporaryDirectory() as run:
            settings = Settings(run, 0.0, calls=how == "with calls")
            with Recorder(settings).recording():
                taken = best(made())
                read = best(lambda: float(x[0]))
        print(f"a call: alone {alone:.1f} µs, {how} {taken:.1f} µs; float(x[0]) {read:.1f} µs")
    print(f"float(x[0]) alone {best(lambda: float(x[0])):.1f} µs")


def program(repeats):
    """Compare recording a program of 10^4 equations with tracing and lowering it."""
    import jax
    import jax.numpy as jnp

    from jaxprtool.recording.recorder import Recorder
    from jaxprtool.recording.settings import Settings

    def loss(weights, x):
        for w in weights:
            h = jnp.tanh(x @ w)
            m = h.mean(-1, keepdims=True)
            x = x + (h - m) / jnp.sqrt(((h - m) ** 2).mean(-1, keepdims=True) + 1e-5)
        return (x**2).sum()

    class Timed(Recorder):
        taken = 0.0

        def lowered(self, lowering):
            start = time.process_time()
            known = super().lowered(lowering)
            Timed.taken = time.process_time() - start
            Timed.of = lowering.cpu + lowering.call.trace_cpu
            return known

    weights, x = [jnp.ones((8, 8))] * 213, jnp.ones((4, 8))
    with tempfile.TemporaryDirectory() as run, Timed(Settings(run, 0.0)).recording():
        for _ in range(repeats):
            jax.clear_caches()
            jax.jit(jax.grad(loss)).lower(weights, x)
            share = f"{Timed.taken / Timed.of:.1%}"
            print(f"CPU: recording {Timed.taken:.3f} s, JAX {Timed.of:.3f} s: {share}")


def import_(repeats):
    """Print the CPU time of importing the recorder."""
    code = (
        "import time, jax; t = time.process_time(); import jaxprtool.recording.recorder; "
        "print(time.process_time() - t)"
    )
    found = [float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(repeats)]
    print(f"import: {statistics.median(found):.3f} s of CPU")


if __name__ == "__main__":
    what = sys.argv[1] if len(sys.argv) > 1 else "scripts"
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    {"scripts": scripts, "calls": calls, "program": program, "import": import_}[what](count)
