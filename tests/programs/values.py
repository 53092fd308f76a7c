"""Comparing arrays, as the package itself does it."""

from jaxprtool.execute.compare import bits_agree, difference, values_agree

__all__ = ["bits_agree", "difference", "values_agree"]
