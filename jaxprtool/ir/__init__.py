"""The basis of all passes: the Program, structured views of equations, and rewriting."""
