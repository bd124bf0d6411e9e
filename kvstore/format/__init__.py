"""Page format: header, codec and page table."""
