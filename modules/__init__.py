"""Research methods, one package each."""
