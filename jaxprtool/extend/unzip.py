"""For rules of the table "unzip": `rule(eqn, known, context)` returns an `Outcome`."""

from jaxprtool.passes.unzip import Context, Known, Outcome, Variable, whole

__all__ = ["Context", "Known", "Outcome", "Variable", "whole"]
