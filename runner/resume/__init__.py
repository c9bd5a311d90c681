"""What a checkpoint of a run holds beside the strategy's state, and bringing a run back to it."""
