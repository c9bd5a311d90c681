"""All private names of torch that flextrain uses, by what they are for."""
