"""Sources: data sets in files, whose samples have numbers."""
