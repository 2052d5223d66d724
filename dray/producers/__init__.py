"""Producers: who they are. What they have written is for `dray.index.fold`."""
