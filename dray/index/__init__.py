"""The offset index: which object holds which offsets of a stream."""
