"""Programs as files: the `.jaxpr` text, Python source, StableHLO and HLO."""
