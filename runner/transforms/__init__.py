"""Transforms: changes of a model between its construction and its distribution over devices."""
