"""A jaxprtool plug-in: collect the intermediate values that a function sows, or replace them.

    from jaxprtool import nest, sow
    from jaxprtool_harvest import call_and_reap, harvest, plant, reap

    def f(x):
        y = sow(x + 1.0, tag="debug", name="y")
        return 2.0 * y

    reap(f, tag="debug")(1.0)                     # {'y': 2.0}
    call_and_reap(f, tag="debug")(1.0)            # (4.0, {'y': 2.0})
    plant(f, tag="debug")({"y": 5.0}, 1.0)        # 10.0
    harvest(f, tag="debug")({"y": 5.0}, 1.0)      # (10.0, {})

The contract is that of Oryx's `harvest` (2020-2023). This module defines the passes and their
options without importing JAX, so that `jaxprtool passes` lists them quickly. The functions,
imported when they are first used, are in `functions`; the passes are implemented in `programs`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from jaxprtool import Pass

if TYPE_CHECKING:
    from jaxprtool import Program
    from jaxprtool_harvest.functions import call_and_reap, harvest, plant, reap
    from jaxprtool_harvest.sites import HarvestError, Settings

_HOME = {
    "HarvestError": "jaxprtool_harvest.sites",
    "call_and_reap": "jaxprtool_harvest.functions",
    "harvest": "jaxprtool_harvest.functions",
    "plant": "jaxprtool_harvest.functions",
    "reap": "jaxprtool_harvest.functions",
}

__all__ = [
    "CallAndReap",
    "HarvestError",
    "Plant",
    "Reap",
    "call_and_reap",
    "harvest",
    "plant",
    "reap",
]


@dataclass(frozen=True)
class _Harvest(Pass):
    """The options of the passes, as for the functions.

    Args:
        tag: The tag that the values are sown under.
        allowlist: The names of the values to use; by default all.
        blocklist: The names of values to ignore.
        exclusive: Remove the sows under all other tags too.
    """

    tag: str
    allowlist: tuple[str, ...] | str | None = None
    blocklist: tuple[str, ...] | str = ()
    exclusive: bool = False

    def _settings(self) -> Settings:
        from jaxprtool_harvest.sites import Settings

        return Settings.of(self.tag, self.allowlist, self.blocklist, self.exclusive)


@dataclass(frozen=True)
class Reap(_Harvest):
    """Return the values that are sown under a tag, by name, instead of the results.

    Example:
        def f(x):
            y = jaxprtool.sow(x + 1.0, tag="debug", name="y")
            return 2.0 * y

        $ jaxprtool opt f.py:f --args "f32[]" -p "reap(tag='debug')"
        { lambda ; a:f32[]. let b:f32[] = add a 1.0:f32[] in (b,) }
    """

    name: ClassVar[str] = "reap"
    preserves: ClassVar[bool] = False

    def __call__(self, program: Program) -> Program:
        from jaxprtool_harvest.programs import reaped

        return reaped(program, self._settings(), keep_results=False)


@dataclass(frozen=True)
class CallAndReap(_Harvest):
    """Return the values that are sown under a tag, by name, after the results.

    Example:
        def f(x):
            y = jaxprtool.sow(x + 1.0, tag="debug", name="y")
            return 2.0 * y

        $ jaxprtool opt f.py:f --args "f32[]" -p "call_and_reap(tag='debug')"
        { lambda ; a:f32[]. let
            b:f32[] = add a 1.0:f32[]
            c:f32[] = mul 2.0:f32[] b
          in (c, b) }
    """

    name: ClassVar[str] = "call_and_reap"
    preserves: ClassVar[bool] = False

    def __call__(self, program: Program) -> Program:
        from jaxprtool_harvest.programs import reaped

        return reaped(program, self._settings(), keep_results=True)


@dataclass(frozen=True)
class Plant(_Harvest):
    """Take the values that are sown under a tag as a first argument, a dict by name.

    Example:
        def f(x):
            y = jaxprtool.sow(x + 1.0, tag="debug", name="y")
            return 2.0 * y

        $ jaxprtool opt f.py:f --args "f32[]" -p "plant(tag='debug'), dce"
        { lambda ; a:f32[] b:f32[]. let c:f32[] = mul 2.0:f32[] a in (c,) }
    """

    name: ClassVar[str] = "plant"
    preserves: ClassVar[bool] = False

    def __call__(self, program: Program) -> Program:
        from jaxprtool_harvest.programs import planted

        return planted(program, self._settings())


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'jaxprtool_harvest' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
