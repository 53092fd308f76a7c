"""The documents that commands assemble from their findings, as NamedTuples.

Most commands print their findings directly: `ir.documents` converts any dataclass to JSON.
The document of a program, which may have many equations, consists of dicts, described by the
TypedDicts here.
"""
