"""A jaxprtool plug-in: bounds of every value, through loops and branches.

It is an example of a domain (`jaxprtool.extend.mapping`), in `domain`: the kind of a value is its
`Interval`; `rules` has a rule for each primitive, and the engine does the rest. It is also an
example of a command: `info` declares it, and `command` is it.

The names of `__init__.pyi` are imported when they are first used, so that `jaxprtool --help`, which
imports `info`, imports neither JAX nor the domain.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
