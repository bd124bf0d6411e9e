"""The one check of a stored session, for `kvrecall import` and `kvrecall fsck`."""
