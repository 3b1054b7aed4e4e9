"""The buffer: dispatch and combine over the symmetric memory of one group, as torch ops."""
