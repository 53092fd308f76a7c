"""Types and functions for rules of the tables "mask" and "mask_bodies".

`rule(context, eqn, *operands)` of "mask" applies an equation to `Padded` operands, and returns its
padded results: arrays, or `Filled` if the contents of their padding are known. `MaskContext.apply`
keeps padding out of derivatives. A primitive with the trait `elementwise` needs no rule.
`rule(builder, eqn)` of "mask_bodies", for equations that hold jaxprs, is a rule of the domain of
masked programs; see `extend.domains`. A loop or branch that has a view needs no rule.
"""

from jaxprtool.passes.mapping.mask import Filled, MaskBodyBuilder, MaskContext, MaskDomain, Padded
from jaxprtool.passes.mapping.mask.table import Facts

__all__ = ["Facts", "Filled", "MaskBodyBuilder", "MaskContext", "MaskDomain", "Padded"]
