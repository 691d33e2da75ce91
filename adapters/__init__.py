"""Host code around the kernel: load, parse, call, format."""
