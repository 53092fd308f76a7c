"""Compare the startup of the command line with bare Python and with `import jax`.

    python tests/benchmarks/bench_startup.py [rounds]

Help and completion may take 0.15 s more than `python -c pass`, and showing a small function 0.15 s
more than importing JAX and tracing it. The commands alternate, so that other load slows them all
alike. The minimum of each is compared, since load can only add time.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ALLOWED = 0.15

SMALL = """
import jax.numpy as jnp

def f(x):
    return jnp.sin(x) * 2
"""
TRACE = "import jax, small; print(jax.make_jaxpr(small.f)(jax.ShapeDtypeStruct((8,), 'float32')))"


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


BARE, WITH_JAX = "python -c pass", "import jax, and trace"

#: Name, command, additional environment variables, and the command to compare with.
CASES: list[tuple[str, list[str], dict[str, str], str | None]] = [
    (BARE, python("-c", "pass"), {}, None),
    ("--help", tool("--help"), {}, BARE),
    *((f"{c} --help", tool(c, "--help"), {}, BARE) for c in ("show", "opt", "run", "passes")),
    ("complete a command", *completion("s"), BARE),
    ("complete a target", *completion("show", "small.py", ":"), BARE),
    ("complete a pass", *completion("opt", "small.py:f", "-p", "d"), BARE),
    (WITH_JAX, python("-c", TRACE), {}, None),
    ("show", tool("show", "small.py:f", "--args", "f32[8]"), {}, WITH_JAX),
]


def measure(rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each case in each round."""
    times: dict[str, list[float]] = {name: [] for name, *_ in CASES}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "small.py").write_text(SMALL)
        for _ in range(rounds):
            for name, command, environment, _ in CASES:
                start = time.perf_counter()
                subprocess.run(
                    command,
                    cwd=folder,
                    env={**os.environ, **environment},
                    stdout=subprocess.DEVNULL,
                    check=True,
                )
                times[name].append(time.perf_counter() - start)
    return times


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    measured = measure(rounds)
    best = {name: min(times) for name, times in measured.items()}
    print(f"| {'command':<22} | best s | median s | more than       |   by s | allowed |")
    print(f"|{'-' * 24}|-------:|---------:|{'-' * 17}|-------:|--------:|")
    for name, _, _, base in CASES:
        median = statistics.median(measured[name])
        more = f"{best[name] - best[base]:.3f}" if base else ""
        beside = {None: "", BARE: "bare Python", WITH_JAX: "JAX and tracing"}[base]
        allowed = f"{ALLOWED:.2f}" if base else ""
        row = f"| {name:<22} | {best[name]:6.3f} | {median:8.3f} | {beside:<15} | {more:>6} |"
        print(f"{row} {allowed:>7} |")


if __name__ == "__main__":
    main()
