"""Retrieval attention: besides its active rows, a step attends to rows found for its own queries."""
