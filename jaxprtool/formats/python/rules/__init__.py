"""How the equations of each primitive are spelled; every module here fills `table.python_rules`."""
