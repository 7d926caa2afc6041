"""Other sources of rows than .jsonl files. Seam: `read_records` of runtime/sources.py."""
