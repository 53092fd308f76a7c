"""Compare the startup of the command line with bare Python and with `import jax`.

    python tests/benchmarks/bench_startup.py [rounds]

Help and completion may take 0.15 s more than `python -c pass`, and showing a small function 0.15 s
more than importing JAX and tracing it. The times are CPU seconds. The minimum of each is compared,
since load can only add time.
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ALLOWED = 0.15

SMALL = """
import jax.numpy as jnp

def f(x):
    return jnp.sin(x) * 2
"""
SHAPE = "jax.ShapeDtypeStruct((8,), 'float32')"
TRACE = f"import jax, small; print(jax.make_jaxpr(small.f)({SHAPE}))"
TOOL = f"import jax, jaxprtool, small; print(jaxprtool.trace(small.f, {SHAPE}))"
JITTED = "import jax, small; jax.jit(small.f)(1.0)"


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def tool(*arguments: str) -> list[str]:
    return python("-m", "jaxprtool", *arguments)


def completion(*words: str) -> tuple[list[str], dict[str, str]]:
    environment = {
        "_JAXPRTOOL_COMPLETE": "complete_bash",
        "COMP_WORDS": "\n".join(["jaxprtool", *words]),
        "COMP_CWORD": str(len(words)),
    }
    return tool(), environment


BARE, WITH_JAX, SCRIPT = "python -c pass", "import jax, and trace", "a script of one jit"

#: Name, command, additional environment variables, and the command to compare with.
CASES: list[tuple[str, list[str], dict[str, str], str | None]] = [
    (BARE, python("-c", "pass"), {}, None),
    ("--help", tool("--help"), {}, BARE),
    *((f"{c} --help", tool(c, "--help"), {}, BARE) for c in ("show", "opt", "run", "explain")),
    ("complete a command", *completion("s"), BARE),
    ("complete a target", *completion("show", "small.py", ":"), BARE),
    ("complete a pass", *completion("opt", "small.py:f", "-p", "d"), BARE),
    (WITH_JAX, python("-c", TRACE), {}, None),
    ("show", tool("show", "small.py:f", "--args", "f32[8]"), {}, WITH_JAX),
    ("jaxprtool.trace", python("-c", TOOL), {}, WITH_JAX),
    ("explain", tool("explain"), {}, BARE),
    ("explain a pass", tool("explain", "dce"), {}, BARE),
    ("explain a pass with rules", tool("explain", "simplify"), {}, BARE),
    (SCRIPT, python("script.py"), {}, None),
    ("record", tool("record", "--overwrite", "script.py"), {}, SCRIPT),
]


def measure(rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each case in each round."""
    times: dict[str, list[float]] = {name: [] for name, *_ in CASES}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "small.py").write_text(SMALL)
        Path(folder, "script.py").write_text(JITTED)
        for _ in range(rounds):
            for name, command, environment, _ in CASES:
                before = children()
                subprocess.run(
                    command,
                    cwd=folder,
                    env={**os.environ, **environment},
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    check=True,
                )
                times[name].append(children() - before)
    return times


def children() -> float:
    """Return the CPU seconds of all child processes so far."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    measured = measure(rounds)
    best = {name: min(times) for name, times in measured.items()}
    print(f"| {'command':<22} | best s | median s | more than       |   by s | allowed |")
    print(f"|{'-' * 24}|-------:|---------:|{'-' * 17}|-------:|--------:|")
    for name, _, _, base in CASES:
        median = statistics.median(measured[name])
        more = f"{best[name] - best[base]:.3f}" if base else ""
        beside = {BARE: "bare Python", WITH_JAX: "JAX and tracing", SCRIPT: "the script"}
        allowed = f"{ALLOWED:.2f}" if base else ""
        row = f"| {name:<22} | {best[name]:6.3f} | {median:8.3f} | {beside.get(base, ''):<15} |"
        print(f"{row} {more:>6} | {allowed:>7} |")


if __name__ == "__main__":
    main()
