"""What other libraries keep on the same input: fixtures that our methods are compared with."""
