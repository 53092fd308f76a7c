"""The public names of jaxprtool, each with the module that it is imported from."""

from .api.jit import jit as jit
from .api.program import (
    load as load,
)
from .api.program import (
    make_jaxpr as make_jaxpr,
)
from .api.program import (
    show as show,
)
from .api.program import (
    unzip as unzip,
)
from .api.program import (
    xla_computation as xla_computation,
)
from .api.vmap import vmap as vmap
from .commands.bench.bench import bench as bench
from .commands.compare.compare import compare as compare
from .commands.compare.verify import verify as verify
from .commands.cost.estimate import cost as cost
from .commands.determinism.determinism import determinism as determinism
from .commands.diff.diff import diff as diff
from .commands.kernels.kernels import kernels as kernels
from .commands.lint.lint import lint as lint
from .commands.memory.compiled import compiled_memory as compiled_memory
from .commands.memory.estimate import memory as memory
from .commands.nans.nans import find_nan as find_nan
from .commands.precision.precision import precision as precision
from .commands.profile.profile import profile as profile
from .commands.profile.profile import profiling as profiling
from .commands.record.record import record as record
from .commands.reduce.reduction import reduce as reduce
from .commands.residuals.policies import residuals as residuals
from .commands.shardings.shardings import shardings as shardings
from .commands.source.lines import source as source
from .commands.watch.watch import watch as watch
from .commands.why.slices import flow_path as flow_path
from .commands.why.slices import why as why
from .commands.why.why_gradient import why_gradient as why_gradient
from .formats.jaxpr.read import read as read
from .formats.jaxpr.write import write as write
from .formats.python.emit import python_rules as python_rules
from .formats.python.emit import to_python as to_python
from .ir.backends import clear_caches as clear_caches
from .ir.equivalence import equivalent as equivalent
from .ir.frames import frames as frames
from .ir.program import Program as Program
from .ir.program import Programs as Programs
from .ir.ragged import Ragged as Ragged
from .loading import example as example
from .loading import static as static
from .loading.trace import trace as trace
from .passes import Pass as Pass
from .passes import Pipeline as Pipeline
from .passes import register as register
from .passes.cleanup.dce import dce_jaxpr as dce_jaxpr
from .passes.mapping.batch import batch_jaxpr as batch_jaxpr
from .passes.patterns import Rewrite as Rewrite
from .passes.patterns import rewrite as rewrite
from .primitives import nest as nest
from .primitives import sow as sow
from .primitives import variable as variable
from .sizes.mask import mask as mask
from .sizes.shapecheck import shapecheck as shapecheck

__version__: str

def load_ipython_extension(shell: object) -> None: ...
