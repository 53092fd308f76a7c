"""The lint rules, one module for each family. See `analysis.lint.table` for how to add one."""
