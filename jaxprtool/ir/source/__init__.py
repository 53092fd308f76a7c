"""Source locations and name scopes of equations, and the user's names for values."""
