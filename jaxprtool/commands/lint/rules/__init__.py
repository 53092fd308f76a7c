"""The lint rules, one module for each family: every module in this folder is loaded.

See `commands.lint.lint` for how to write a rule.
"""
