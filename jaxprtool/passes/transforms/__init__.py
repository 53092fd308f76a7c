"""JAX's own transformations as passes: each evaluates a program under one, and traces that anew.

No code of the user's runs again, but for the rules of custom derivatives, which are Python
functions in a program that was traced in this process. The options are those of JAX's functions.
"""
