"""One thin module per API: decode, one operation, encode."""
