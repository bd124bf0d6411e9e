"""Online prefill sparsification: the lines of a block's attention, and attention over them alone."""
