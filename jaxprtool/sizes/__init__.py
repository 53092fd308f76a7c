"""Functions and arguments whose sizes vary: masked, ragged, padded to buckets, and fitted.

Each module is a door of its own, so that none of the passes is imported that is not needed:
`mask`, `shapecheck` and `specialize` hold what users call by these names, `ragged_vmap` maps over
`Ragged` arguments, `buckets` is `jit(shapes=…)`, and `fitting` fits arguments to a program. The
package stands on `jaxprtool.extend` alone, as a plug-in would. What every `Program` has of sizes is
below that, in `ir`: `symbols`, `bounds`, `specialization`, and `ragged`, which `loading` reads.
"""
