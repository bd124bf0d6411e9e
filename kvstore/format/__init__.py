"""The page format: layout, codec, page tables, key summaries."""
