"""The health of a run: signals, the watchdog, and what is said of failures."""
