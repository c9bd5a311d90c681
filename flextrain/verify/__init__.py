"""Verify that strategies train a user's model as one device does: `flextrain verify`."""
