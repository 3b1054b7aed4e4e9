"""The buffer: dispatch and combine over one group's symmetric memory, as torch ops."""
