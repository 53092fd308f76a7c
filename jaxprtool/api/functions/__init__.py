"""The functions of the Python interface that take functions: jit, vmap, lowering."""
