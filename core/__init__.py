"""What strategies, optimizers and the runner share; imports nothing above itself."""
