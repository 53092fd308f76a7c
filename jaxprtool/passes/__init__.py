"""The rewrites: what a pass is, where passes are found, and a module for each of ours."""
