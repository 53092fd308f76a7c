"""Programs from StableHLO: text, bytecode, and the modules of `jax.export` artifacts."""

from jaxprtool.formats.stablehlo import operations as operations
from jaxprtool.formats.stablehlo import partitioning as partitioning
from jaxprtool.formats.stablehlo import structure as structure
from jaxprtool.formats.stablehlo.reader import is_stablehlo as is_stablehlo
from jaxprtool.formats.stablehlo.reader import read_module_program as read_module_program
from jaxprtool.formats.stablehlo.reader import stablehlo_rules as stablehlo_rules
