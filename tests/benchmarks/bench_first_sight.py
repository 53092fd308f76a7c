"""Compare the first page of `show` with JAX's text of the program.

    python tests/benchmarks/bench_first_sight.py [--rounds N] [TARGET]

Each round is a process with a terminal of 160 columns and 50 lines. Two CPU times are compared:
that of `jaxprtool show TARGET` after the function is traced, with its imports, and that of
`str(jax.make_jaxpr(...))` later in the same process. The default TARGET is the gradient of a
transformer, of about 10⁴ equations.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: The default target.
DEEP = """
import jax
import jaxprtool
from tests.benchmarks.models import transformer_loss, transformer_shapes

@jaxprtool.example(*transformer_shapes(54))
def gradient(params, x):
    return jax.value_and_grad(transformer_loss)(params, x)
"""

#: The script of each process. Its arguments are the target and the file to write the times to.
CHILD = """
import json, sys, time
from jaxprtool.cli import main, session

traced = []

def trace(*args, original=session.FunctionOptions.trace_entry):
    began = time.process_time()
    made = original(*args)
    traced[:] = made.program, time.process_time() - began, time.process_time()
    return made

session.FunctionOptions.trace_entry = trace
target, figures = sys.argv[1:]
assert main.main(["show", target]) == 0
ended = time.process_time()
program, tracing, began = traced
str(program.jaxpr)
with open(figures, "w") as file:
    json.dump([tracing, ended - began, time.process_time() - ended], file)
"""


def one_round(target: str, folder: str) -> list[float]:
    """Return the seconds of tracing, of the page, and of JAX's text."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
    figures = os.path.join(folder, "figures.json")
    drain = threading.Thread(target=_read_all, args=[ours], daemon=True)
    drain.start()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    subprocess.run(
        [sys.executable, "-c", CHILD, target, figures],
        stdout=theirs,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        check=True,
    )
    os.close(theirs)
    drain.join()
    os.close(ours)
    return json.loads(Path(figures).read_text())


def _read_all(descriptor: int) -> None:
    try:
        while os.read(descriptor, 1 << 16):
            pass
    except OSError:  # Linux raises EIO once the other end of a terminal is closed
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", nargs="?")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "deep.py").write_text(DEEP)
        target = os.path.abspath(options.target) if options.target else "deep.py:gradient"
        rounds = [one_round(target, folder) for _ in range(options.rounds)]
    tracing, page, text = map(statistics.median, zip(*rounds, strict=True))
    print(f"tracing {tracing:.3f} s, the page {page:.3f} s, JAX's text {text:.3f} s")


if __name__ == "__main__":
    main()
