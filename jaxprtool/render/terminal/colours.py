"""The colours of the terminal: numbers of the 256-colour palette.

Themes redefine the first 16 colours, and terminals without a theme have a blue that cannot be read
on black, and a cyan and yellow that cannot be read on white. The others are the same everywhere.
These have a contrast of at least 3 on black, on white, and on the backgrounds of common themes.
"""

BLUE = 63
CYAN = 30
GREEN = 64
MAGENTA = 133
RED = 196
YELLOW = 136


def named(number: int) -> str:
    """Return Rich's name of a colour."""
    return f"color({number})"
