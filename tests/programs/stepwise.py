"""Evaluation one equation at a time, as the package itself does it."""

from jaxprtool.execute.stepwise import evaluate

__all__ = ["evaluate"]
