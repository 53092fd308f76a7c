"""The Python functions that are no command: tracing, `jit` and `vmap`, and methods of `Program`."""
