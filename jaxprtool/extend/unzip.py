"""The rules of the table "unzip": `rule(eqn, times, context)` returns an `Outcome`."""

from jaxprtool.passes.unzip import BindingTime, Context, Outcome, Variable, whole

__all__ = ["BindingTime", "Context", "Outcome", "Variable", "whole"]
