"""Processes and what they say to each other: groups, collectives, and who is what to the others."""
