"""Comparing arrays, as the package itself does it."""

from jaxprtool.execute.compare import Comparison, bits_agree, difference, values_agree

__all__ = ["Comparison", "bits_agree", "difference", "values_agree"]
