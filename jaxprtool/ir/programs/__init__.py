"""Programs: a jaxpr with its name, trees, argument names, and how it is called."""
