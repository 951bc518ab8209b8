"""Matrix products with unquantized weights, from one row to many."""
