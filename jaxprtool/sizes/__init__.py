"""Functions and arguments of varying sizes: masked, padded to buckets, and fitted.

Modules are imported separately, so that only those of the passes in use are imported. `mask`,
`shapecheck` and `specialize` have the public functions of these names. `buckets` implements
`jit(shapes=…)`, and fits arguments to a program. The package depends only on `jaxprtool.extend`,
like a plug-in. The sizes of a `Program` are in `ir`: `symbols`, `specialization`, and `ragged`,
which `loading` reads; `api.vmap` maps over `Ragged` arguments.
"""
