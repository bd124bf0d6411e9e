"""Places that keep pages: fastest first, the lowest one durable."""
