"""Equations: typed views of those that hold jaxprs, their regions, and the traits of primitives."""
