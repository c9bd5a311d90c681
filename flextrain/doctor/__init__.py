"""Report installed packages, the needs of each strategy, and what is missing: `flextrain doctor`."""
