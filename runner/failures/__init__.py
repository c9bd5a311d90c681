"""What to say of an error that ends a run: where it came from, its own words, and what to do."""
