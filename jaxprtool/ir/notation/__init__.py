"""A jaxpr as text: JAX's notation, and the layout that other notations share with it."""
