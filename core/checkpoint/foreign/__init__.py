"""Weights in the files of other programs, read without executing anything that is stored in them."""
