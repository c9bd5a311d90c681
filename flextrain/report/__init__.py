"""Reports of runs: what `flextrain report` writes."""
