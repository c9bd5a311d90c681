"""Rows of tests/runner/test_mistakes.py, by kind."""
