"""Topics: what the store holds for them, their configs, and all that happens to them."""
