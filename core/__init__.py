"""Code shared by strategies, optimizers and the runner; it imports from none of them."""
