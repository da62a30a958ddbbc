"""One module for each outside package that this block can work with."""
