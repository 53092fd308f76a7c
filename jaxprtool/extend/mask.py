"""For rules of the tables "mask" and "mask_bodies".

`rule(masking, eqn, *operands)` of "mask" computes on `Padded` operands what the equation computes
on logical ones, and returns its padded results: arrays, or `Filled` where it knows what their
padding holds. `MaskContext.apply` says how padding is kept out of derivatives. A primitive with the
trait `elementwise` needs no rule. `rule(writing, eqn)` of "mask_bodies", for equations that hold
jaxprs, is one of the domain of masks; see `extend.domains`. A loop or branch that has a view needs
none.
"""

from jaxprtool.passes.mapping.mask import Filled, MaskContext, MaskDomain, MaskWriting, Padded
from jaxprtool.passes.mapping.mask.values import Facts

__all__ = ["Facts", "Filled", "MaskContext", "MaskDomain", "MaskWriting", "Padded"]
