"""For rules of the tables "mask" and "mask_bodies".

`rule(masking, eqn, *operands)` of "mask" computes on `Padded` operands what the equation computes
on logical ones, and returns its padded results: arrays, or `Filled` where it knows what their
padding holds. `Masking.apply` says how padding is kept out of derivatives. A primitive with the
trait `elementwise` needs no rule. `rule(writing, eqn, operands, facts)` of "mask_bodies", for
equations that hold jaxprs, writes an equation with `writing.add`, whose bodies `writing.run.body`
masks.
"""

from jaxprtool.passes.mask import Filled, Masking, Padded, Writing
from jaxprtool.passes.mask.body import MaskedBody
from jaxprtool.passes.mask.values import Facts

__all__ = ["Facts", "Filled", "MaskedBody", "Masking", "Padded", "Writing"]
