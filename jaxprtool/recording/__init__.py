"""Record what JAX compiles in a script that runs unchanged, and why."""
