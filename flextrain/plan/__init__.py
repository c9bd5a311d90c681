"""Plan a training for many processes without them: `flextrain plan`."""
