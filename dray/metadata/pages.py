"""All records of a directory, however many: scan after scan. Not one snapshot."""

from __future__ import annotations

from collections.abc import AsyncIterator

from dray.metadata.store import MetadataStore, Record

PAGE_RECORDS = 500


async def records_of(
    store: MetadataStore, domain: int, directory: str, *, page_records: int = PAGE_RECORDS
) -> AsyncIterator[Record]:
    """In the order of their keys. Fewer at a time where records are large."""
    start = ""
    while page := await store.scan(domain, directory, start=start, limit=page_records):
        for found in page:
            yield found
        if len(page) < page_records:
            return
        start = page[-1].key.rpartition("/")[2] + "\0"
