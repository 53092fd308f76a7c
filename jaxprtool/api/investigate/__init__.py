"""Run, compare, measure and reduce programs, and explain their gradients."""
