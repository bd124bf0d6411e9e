"""What a prefilled block attends to, where that is not its session's active rows alone."""
