"""The lint rules, one module for each family. See `commands.lint.findings` for how to add one."""
