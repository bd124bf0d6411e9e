"""What of a request is not taken as it was sent."""
