"""Read weights from files of other programs, without executing code that is stored in them."""
