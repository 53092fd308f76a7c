"""A jaxpr as text: how JAX writes it down, and the layout that other notations share with it."""
