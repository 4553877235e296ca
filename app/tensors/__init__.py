"""Buffers in shared memory that other processes read: `plane` for all of it, `segment` for the file alone."""
