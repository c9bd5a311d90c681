"""Everything that a user can name, with its arguments: what `flextrain show` prints and the reference of the site."""
