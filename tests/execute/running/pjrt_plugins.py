"""Third-party PJRT plug-ins, written as packages that are installed in a folder."""

import textwrap

#: A package that registers the CPU's client under another name.
DUMMY = """
    from jax._src import xla_bridge

    def initialize():
        xla_bridge.register_backend_factory("dummy", xla_bridge.make_cpu_client, priority=-10)
"""

#: One whose library is missing.
NO_LIBRARY = """
    raise ImportError("libabacus.so: cannot open shared object file")
"""

#: One that fails when JAX calls it.
NOT_INITIALIZED = """
    def initialize():
        raise OSError("no driver")
"""

#: One whose backend fails when JAX starts it. `fail_quietly` is False for `register_plugin`.
NO_DEVICE = """
    from jax._src import xla_bridge

    def client():
        raise RuntimeError("no device answers")

    def initialize():
        xla_bridge.register_backend_factory("silent", client, fail_quietly={quietly})
"""

#: One that breaks JAX, which does not catch its error.
RAISES = """
    raise ValueError("written for another JAX")
"""


def install(folder, name, code):
    """Install a package with a plug-in, without a package manager."""
    (folder / f"{name}.py").write_text(textwrap.dedent(code))
    info = folder / f"{name}-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(f"[jax_plugins]\n{name} = {name}\n")
