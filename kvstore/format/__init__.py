"""Page format: header, codec, page table and key summaries."""
