"""Indexes over a layer's keys beside the scan of all of them, on models' keys and made-up ones."""
