"""The documents that commands put together of what they find, as NamedTuples.

Most commands print what they find as it is: `ir.basics.documents` makes JSON of any dataclass. That
of a program, which may have many equations, is made of dicts, as the TypedDicts here describe them.
"""
