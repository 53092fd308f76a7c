"""From a TARGET and its arguments to a Program."""
