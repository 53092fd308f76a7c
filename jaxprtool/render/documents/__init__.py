"""The JSON documents that commands print with `--json`, as types that say what each key is.

Documents may gain keys; the keys they have keep their names, types and meaning. Numbers that JSON
does not have are the strings "NaN", "Infinity" and "-Infinity"; a complex number is
`[real, imaginary]`. The page `docs/json.md` is made from these types.
"""

from __future__ import annotations

from jaxprtool.render.documents.analyses import (
    CostDocument,
    MemoryDocument,
    OutlineDocument,
    PathDocument,
    ResidualsDocument,
    SourceDocument,
    WhyDocument,
)
from jaxprtool.render.documents.checks import CompareDocument, NansDocument, ReduceDocument
from jaxprtool.render.documents.diffs import DiffDocument
from jaxprtool.render.documents.passes import (
    BackendsDocument,
    PassDocument,
    PassesDocument,
    PipelineDocument,
    PrimitiveDocument,
)
from jaxprtool.render.documents.programs import (
    OptDocument,
    RunDocument,
    ShowDocument,
    StatsDocument,
    UnzipDocument,
    VmapDocument,
)
from jaxprtool.render.documents.watched import WatchDocument

#: The documents of each command.
DOCUMENTS: dict[str, tuple[type, ...]] = {
    "show": (ShowDocument, StatsDocument),
    "opt": (OptDocument,),
    "run": (RunDocument,),
    "unzip": (UnzipDocument,),
    "outline": (OutlineDocument,),
    "cost": (CostDocument,),
    "memory": (MemoryDocument,),
    "source": (SourceDocument,),
    "residuals": (ResidualsDocument,),
    "why": (WhyDocument, PathDocument),
    "nans": (NansDocument,),
    "watch": (WatchDocument,),
    "compare": (CompareDocument,),
    "diff": (DiffDocument,),
    "reduce": (ReduceDocument,),
    "vmap": (VmapDocument,),
    "passes": (PassesDocument,),
    "explain": (PassDocument, PipelineDocument, PrimitiveDocument),
    "backends": (BackendsDocument,),
}
