"""JAX's own transformations as passes: each evaluates a program under one, and traces the result.

No user code runs again, except the rules of custom derivatives, which are Python functions in a
program that was traced in this process. The options are those of JAX's functions.
"""
