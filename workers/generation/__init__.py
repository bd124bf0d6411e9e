"""Block prefill, decoding and sampling."""
