"""The colors of the terminal: numbers of the 256-color palette.

Themes redefine the first 16 colors, and terminals without a theme have a blue that cannot be read
on black, and a cyan and yellow that cannot be read on white. The others are the same everywhere.
These have a contrast of at least 3 on black and white, and nearly so on common backgrounds.
"""

BLUE = 63
CYAN = 30
GREEN = 28
MAGENTA = 133
RED = 196
YELLOW = 136


def named(number: int) -> str:
    """Return Rich's name of a color."""
    return f"color({number})"
