"""A script run unchanged: the programs that JAX compiled in it, and why."""
