"""Data sets, one module per kind of data. They know neither the methods nor the machinery that runs them."""
