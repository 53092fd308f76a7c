"""The JSON documents that commands print with `--json` where these are no dataclass: their types.

What else commands print is a dataclass that they have found, as `ir.documents` shows it.
"""
