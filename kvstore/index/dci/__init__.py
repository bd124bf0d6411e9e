"""DCI-tree: the index of the IceCache paper, a choice for research beside the descent (kvstore.index.summaries)."""
