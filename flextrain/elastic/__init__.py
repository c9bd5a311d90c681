"""What `flextrain run` does: torchrun's agent with an eye on the progress of training."""
