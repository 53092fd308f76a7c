"""Evaluation one equation at a time, as the package itself does it."""

from jaxprtool.ir.interpret import evaluate

__all__ = ["evaluate"]
