"""Load generator and comparisons. Not needed to serve."""
