"""A Program as Python source: `emit.to_python`, and `rules.table.python_rules` for plug-ins."""
