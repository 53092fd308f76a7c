"""Python source of Programs: `emit.to_python`, and `rules.table.python_rules` for plug-ins."""
