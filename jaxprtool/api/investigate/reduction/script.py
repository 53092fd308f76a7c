"""Write a reduced program as a standalone Python script that shows the fault with JAX alone."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxprtool.api.investigate.reduction.checks import Check, Mismatch, Nan, Timeout
from jaxprtool.formats.python.emit import to_python
from jaxprtool.ir.core.equations import has_64_bit_types
from jaxprtool.ir.programs.program import Program

_RUN = ["print(jax.block_until_ready(jax.jit({fun})(*arguments)))"]
_TIMEOUT = [
    "start = time.monotonic()",
    "jax.jit({fun}).lower(*arguments).compile()",
    'print(f"compiled in {{time.monotonic() - start:.1f}} s")',
]
_NAN = [
    "results = jax.jit({fun})(*arguments)",
    "print(results)",
    "nans = [bool(jnp.isnan(each).any()) for each in jax.tree.leaves(results)]",
    'raise SystemExit("the result has NaN" if any(nans) else 0)',
]
_MISMATCH = [
    "before = jax.jit({fun})(*arguments)",
    "after = jax.jit(rewritten())(*arguments)",
    'print("before", before)',
    'print("after ", after)',
    "for one, other in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):",
    "    np.testing.assert_allclose(one, other, rtol=1e-3)",
]
_BACKENDS = [
    "for name in {backends!r}:",
    "    with jax.default_device(jax.devices(name)[0]):",
    "        print(name, jax.jit({fun})(*arguments))",
]


def script(program: Program, check: Check, values: dict[str, Any]) -> str:
    """Return the source of a script that runs a program as a check does.

    Args:
        program: The program.
        check: The check that holds for it.
        values: The known values of its arguments, by name.

    Raises:
        UnsupportedError: If the program cannot be written as Python.
    """
    after = None
    if isinstance(check, Mismatch) and not check.backends:
        program, after = check.pair(program)
    elif check.pipelines:
        program = check.prepared(program)
    lines = _lines(check)
    text, fun = _module(program)
    parts = [_with_environment(text)]
    if after is not None:
        inner, name = _module(after)
        inside = textwrap.indent(f"{inner}\nreturn {name}\n", "    ")
        parts.append(f"\n\ndef rewritten():\n{inside}")
    body = [
        "import time\n" if isinstance(check, Timeout) else "",
        "import jax",
        "import jax.numpy as jnp",
        "import numpy as np",
        "from numpy import inf, nan\n",
    ]
    if has_64_bit_types(program.jaxpr):
        body.append('jax.config.update("jax_enable_x64", True)')
    arguments = ", ".join(map(_literal, check.arguments(program, values)))
    body.append(f"arguments = [{arguments}]")
    body += [line.format(fun=fun, backends=check.backends) for line in lines]
    main = textwrap.indent("\n".join(filter(None, body)), "    ")
    return "".join(parts) + f'\n\nif __name__ == "__main__":\n{main}\n'


def _lines(check: Check) -> Sequence[str]:
    match check:
        case Timeout():
            return _TIMEOUT
        case Nan():
            return _NAN
        case Mismatch():
            return _BACKENDS if check.backends else _MISMATCH
    return _RUN


def _module(program: Program) -> tuple[str, str]:
    """Return the source of a program as a module, and the name of its function."""
    text = to_python(program, callbacks="stub", source=False)
    found = re.match(r'"""`(\w+)`', text)
    assert found is not None
    return text, found[1]


def _with_environment(text: str) -> str:
    """Add to a module the environment variables that affect JAX, with their current values.

    These are XLA's flags and the number of CPU devices.
    """
    settings = {"XLA_FLAGS": os.environ.get("XLA_FLAGS")}
    if jax.config.jax_num_cpu_devices > 0:
        settings["JAX_NUM_CPU_DEVICES"] = str(jax.config.jax_num_cpu_devices)
    lines = [f"os.environ.setdefault({k!r}, {v!r})\n" for k, v in settings.items() if v]
    if not lines:
        return text
    docstring, end, module = text.partition('"""\n\n')
    return f"{docstring}{end}import os\n\n{''.join(lines)}\n{module}"


def _literal(value: Any) -> str:
    """Return a Python expression for the value of an argument; a constant array as `jnp.full`."""
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        data = np.asarray(jax.random.key_data(value)).tolist()
        words = f"jnp.array({data}, 'uint32')"
        return f"jax.random.wrap_key_data({words}, impl={str(jax.random.key_impl(value))!r})"
    array, dtype = np.asarray(value), value.dtype.name
    if array.size > 16 and (array == array.flat[0]).all():
        return f"jnp.full({array.shape}, {array.flat[0].item()!r}, {dtype!r})"
    return f"jnp.array({array.tolist()!r}, {dtype!r})"
