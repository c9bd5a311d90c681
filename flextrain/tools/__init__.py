"""What the commands do: doctor, verify, and the machinery that compares trainings."""
