"""Functions and arguments of varying sizes: masked, ragged, padded to buckets, and fitted.

Modules are imported separately, so that only those of the passes in use are imported. `mask`,
`shapecheck` and `specialize` have the public functions of these names. `ragged_vmap` maps over
`Ragged` arguments, `buckets` implements `jit(shapes=…)`, and `fitting` fits arguments to a program.
The package depends only on `jaxprtool.extend`, like a plug-in. The sizes of a `Program` are in
`ir`: `symbols`, `specialization`, and `ragged`, which `loading` reads.
"""
