"""The documents that commands assemble from their findings, as NamedTuples.

Most commands print what they find as it is: `ir.basics.documents` makes JSON of any dataclass. That
of a program, which may have many equations, is made of dicts, as the TypedDicts here describe them.
"""
