"""To watch a pipeline: `pipeline.run(program, observer)` calls an `Observer` around each step."""

from jaxprtool.passes.framework.pipeline import Observer, Step

__all__ = ["Observer", "Step"]
