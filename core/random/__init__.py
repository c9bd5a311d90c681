"""Random numbers: generators, seeds, permutations."""
