"""What people look at: the log, the memory map, families, pauses, lists. Opens and changes nothing."""
