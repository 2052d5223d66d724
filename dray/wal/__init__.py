"""WAL objects: what produced batches become in object storage."""
