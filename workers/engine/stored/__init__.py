"""Stored sessions of a worker: rows, recurrent states, the names of pages, and the threads that read and write."""
