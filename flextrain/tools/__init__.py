"""The work behind the commands: doctor, and verify with its comparison of trainings."""
