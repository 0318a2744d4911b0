"""Reading answers to maths problems: where they stand, what they are, whether two are equal."""
